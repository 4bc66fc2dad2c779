"""The simulated engine against sums done by hand (1 s a step + 0.1 s a prompt token, budget 10 tokens)."""

from __future__ import annotations

import random
from dataclasses import replace

import polars as pl
import pytest
from twin_build import NOISY, SIMPLE, make_trace, run

from headway.core import CostCoefficients, Slo
from headway.replay.targets import Targets
from headway.twin import NoiseModel, Scenario, simulate
from headway.twin.engine import Engine, StarvationError
from headway.twin.flight import Issued


def times(outcome: object) -> list[list[float]]:
    """Return the token times of every request, rounded."""
    return [[round(t, 6) for t in row] for row in outcome.frame["token_s"].to_list()]  # type: ignore[attr-defined]


def test_prompt_longer_than_the_budget_is_chunked() -> None:
    """15 tokens: 10 in a step of 2 s, 5 in one of 1.5 s, then a decode step of 1 s."""
    assert times(run([(0.0, 15, 2)])) == [[3.5, 4.5]]


def test_arrival_during_a_step_waits_for_its_end() -> None:
    """The second request arrives in the first step (0 to 1.5 s); its prompt runs beside the other's decode."""
    assert times(run([(0.0, 5, 2), (0.1, 5, 1)])) == [[1.5, 3.0], [3.0]]


def test_decodes_take_their_tokens_from_the_budget() -> None:
    """Beside one decode only 9 of the 10 tokens of the second prompt fit the step."""
    assert times(run([(0.0, 10, 4), (0.1, 10, 1)])) == [[2.0, 3.9, 5.0, 6.0], [5.0]]


def test_slots_bound_the_running_requests() -> None:
    """With max_running 1 the second starts when the first is done."""
    assert times(run([(0.0, 5, 2), (0.0, 5, 1)], max_running=1)) == [[1.5, 2.5], [4.0]]


def test_lag_of_one_step_with_asynchronous_scheduling() -> None:
    """The step of 1.5 to 2.5 s was planned at 0 s, before the second arrived: it starts a step later."""
    outcome = run([(0.0, 5, 3), (0.1, 5, 1)], async_lag=True)
    assert times(outcome) == [[1.5, 2.5, 4.0], [4.0]]


def test_preempted_request_is_computed_again() -> None:
    """4 blocks of 4 tokens: two prompts of 8 fill the pool, so the one started last makes room and comes back."""
    outcome = run([(0.0, 8, 3), (0.0, 8, 3)], kv_blocks=4, block_size=4, token_budget=100)
    assert outcome.facts["preemptions"] == 1
    # Both prompts: 1 + 1.6 s. Then the first alone until it is done (4.6); then 8 + 1 tokens again: 1 + 0.9 s.
    assert times(outcome) == [[2.6, 3.6, 4.6], [2.6, 6.5, 7.5]]


def test_whole_prompt_must_fit_before_it_starts() -> None:
    """vLLM reserves for the whole prompt: with 2 free blocks a prompt of 3 waits although its first chunk would fit."""
    outcome = run([(0.0, 8, 2), (0.1, 12, 1)], kv_blocks=4, block_size=4, token_budget=8)
    assert times(outcome) == [[1.8, 2.8], [6.0]]


def test_shared_prefix_is_computed_once() -> None:
    """The second prompt finds two of its three blocks of 4 tokens; its last token is never taken from the cache."""
    outcome = run(
        [(0.0, 12, 1), (10.0, 12, 1)],
        ids=[[7, 8, 9], [7, 8, 5]],
        ids_block=4,
        block_size=4,
        prefix_cache=True,
        token_budget=100,
    )
    assert outcome.facts["cached_prompt_tokens"] == 8
    assert times(outcome) == [[2.2], [11.4]]


def test_prompt_that_never_fits_is_refused_at_once() -> None:
    """Longer than the model, or than the pool: refused, whatever the admission test, and the others go on."""
    outcome = run([(0.0, 50, 1), (0.0, 5, 1), (0.0, 10, 20)], kv_blocks=5, block_size=4, max_model_len=40)
    assert outcome.frame["status"].to_list() == ["refused", "ok", "refused"]
    assert outcome.frame["reason"].to_list() == ["never_fits", None, "never_fits"]
    assert outcome.frame["http_status"].to_list() == [400, 200, 400]


def test_stock_valve_counts_prompts_in_prefill() -> None:
    """max_queued_tokens 10: the second is taken at 8 queued tokens, the third refused at 16."""
    outcome = run([(0.0, 8, 1), (0.0, 8, 1), (0.0, 8, 1)], max_queued_tokens=10)
    assert outcome.frame["status"].to_list() == ["ok", "ok", "refused"]


def test_front_time_is_added_once() -> None:
    """Every token reaches the client 0.25 s after its step; gaps do not change."""
    outcome = run([(0.0, 5, 3)], front_s=0.25)
    assert times(outcome) == [[1.75, 2.75, 3.75]]
    assert outcome.frame["tpot_s"].to_list() == [1.0]


def test_end_of_the_run_cuts_open_requests_off() -> None:
    """With a grace of 1 s after the last arrival what runs then is cut off and never attained."""
    outcome = run([(0.0, 5, 1), (2.0, 5, 9)], grace_s=3.0)
    assert outcome.frame["status"].to_list() == ["ok", "cut_off"]
    assert outcome.frame["attained"].to_list() == [True, False]
    assert times(outcome) == [[1.5], [3.5, 4.5]]


def test_attainment_is_scored_like_a_replay() -> None:
    """A request late for its first token is not attained; one without targets is when it ends well."""
    rows = [(0.0, 5, 2), (0.0, 10, 2)]
    late = run(rows, targets={"default": Targets(ttft_s=2.0)})
    assert late.frame["attained"].to_list() == [True, False]
    assert run(rows, targets={}).frame["attained"].to_list() == [True, True]


def test_two_replicas_share_the_load() -> None:
    """Round robin puts two simultaneous requests on two engines, so neither waits."""
    assert times(run([(0.0, 5, 1), (0.0, 5, 1)], replicas=2)) == [[1.5], [1.5]]


@pytest.mark.parametrize("router", ["least_work", "deadline"])
def test_router_avoids_the_busy_replica(router: str) -> None:
    """Behind a long prompt on the first engine both later requests go to the second."""
    outcome = run([(0.0, 90, 1), (0.1, 5, 1), (1.9, 5, 1)], replicas=2, router=router)
    assert [round(row[0], 6) for row in outcome.frame["token_s"].to_list()[1:]] == [1.6, 3.4]


def test_same_seed_same_bytes() -> None:
    """Twice the same scenario gives the same table; another seed another one."""
    rows = [(0.05 * i, 10 + i, 5 + i % 7) for i in range(40)]
    one, two = (run(rows, NOISY, policy="headway", admission="response_time") for _ in range(2))
    assert one.frame.equals(two.frame)


def test_every_step_is_told_to_the_listener() -> None:
    """The listener sees q, n, K and X of each step: the terms of its price."""
    seen: list[tuple[int, int, int, float]] = []
    run(
        [(0.0, 15, 3)], on_step=lambda issued: seen.append((issued.step.q, issued.step.n, issued.step.K, issued.step.X))
    )
    assert seen == [(10, 0, 0, 50.0), (5, 0, 0, 62.5), (0, 1, 16, 0.0), (0, 1, 17, 0.0)]


def test_live_state_does_not_grow_with_the_trace() -> None:
    """After 3,000 requests the engine holds nothing of those that left."""
    from headway.twin import engine as module

    kept: list[module.Engine] = []
    original = module.Engine.__init__

    def remember(self: module.Engine, **arguments: object) -> None:
        original(self, **arguments)  # type: ignore[arg-type]
        kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Engine, "__init__", remember)
        run([(0.2 * i, 5, 20) for i in range(3000)], NOISY)
    engine = kept[0]
    assert not engine.gate.undecided
    assert not engine.ledger.requests
    assert not engine.batcher.running
    assert engine.pool.free == engine.pool.total
    assert len(engine._finishing) == 0
    engine.check()


def test_policy_that_runs_nothing_is_an_error() -> None:
    """A policy that never grants a chunk ends in an error that names it, not in a spin."""
    from headway import policies
    from headway.core import EngineView, StepPlan

    class Idle:
        name = "idle"

        def plan(self, view: EngineView) -> StepPlan:
            return StepPlan(token_budget=1, starts=())

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(policies.REGISTRY, "idle", Idle)
        with pytest.raises(StarvationError, match="idle"):
            run([(0.0, 5, 1)], policy="idle")


def test_step_ends_are_forgotten_but_for_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one token with asynchronous scheduling: nobody decodes when a step is told of."""
    rows = [(0.05 * i, 20, 1 + i % 2) for i in range(60)]
    given = {"policy": "headway", "admission": "response_time", "async_lag": True, "profile": NOISY}
    plain = run(rows, **given)  # type: ignore[arg-type]
    trims = []
    trim = Engine._trim

    def soon(self: Engine) -> None:
        trim(self)
        self._trim_at = 1
        trims.append(len(self._ends))

    monkeypatch.setattr(Engine, "_trim", soon)
    started = Engine.__init__

    def small(self: Engine, **settings: object) -> None:
        started(self, **settings)  # type: ignore[arg-type]
        self._trim_at = 1

    monkeypatch.setattr(Engine, "__init__", small)
    assert run(rows, **given).frame.equals(plain.frame)  # type: ignore[arg-type]
    assert len(trims) > 50
    assert max(trims) < 20


def test_a_deferred_request_waits_for_its_deadline_however_far() -> None:
    """Nothing runs for 300 s, and that is no starvation: the request is refused when its deadline comes."""
    slo = Slo(name="default", ttft_s=300.0, on_miss="defer")
    bucket = {"admission": "token_bucket", "admission.rate": 0.001, "admission.burst": 1.0}
    scenario = Scenario(profile=SIMPLE, slos={"default": slo}, settings=bucket)
    first, second = simulate(make_trace([(0.0, 5, 2), (1.0, 5, 2)]), scenario).frame.to_dicts()
    assert first["status"] == "ok"
    assert (second["status"], second["reason"]) == ("refused", "queue_full")


def test_an_answer_is_declared_no_longer_than_the_model_holds() -> None:
    """A cap of 4,096 for a prompt of 60 in a model of 100 tokens reserves 100 of the pool's 100, not more."""
    given = {"output_cap": 4096, "max_model_len": 100, "kv_blocks": 26, "block_size": 4, "token_budget": 100}
    outcome = run([(0.0, 60, 2)], admission="response_time", **given)
    assert outcome.frame["status"].to_list() == ["ok"]


def test_steps_without_a_ttft_target_are_as_long_as_the_engines() -> None:
    """Nobody's target shortens them: the driver's second, a quarter of four."""
    profile = replace(NOISY, cost=CostCoefficients(g=0.01, a=0.001, b=0.0), noise=NoiseModel())
    steps: list[Issued] = []
    run([(0.0, 2000, 1)], profile=profile, policy="headway", targets={}, learn=False, on_step=steps.append)
    longest = max(each.end_s - each.start_s for each in steps)
    assert longest == pytest.approx(1.0 / profile.envelope_factor, abs=0.01)


def test_held_decode_skips_a_step() -> None:
    """A policy that holds the second stream in one step delays each of its later tokens by that step."""
    from headway import policies
    from headway.core import EngineView, StepPlan

    class Holding:
        name = "holding"

        def __init__(self) -> None:
            self.steps = 0

        def plan(self, view: EngineView) -> StepPlan:
            self.steps += 1
            return StepPlan(token_budget=10, open_chunks=True, held=frozenset({"1"} if self.steps == 3 else ()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(policies.REGISTRY, "holding", Holding)
        outcome = run([(0.0, 5, 4), (0.0, 5, 4)], policy="holding")
    assert times(outcome) == [[2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 5.0, 6.0]]


def test_held_decode_may_lose_its_blocks_in_the_same_step() -> None:
    """4 blocks of 4 tokens: in step 3 the second prompt needs a block of the first stream, which is held just then."""
    from headway import policies
    from headway.core import EngineView, StepPlan

    class Taking:
        name = "taking"

        def __init__(self) -> None:
            self.plans = [
                StepPlan(token_budget=10, chunks={"0": 8, "1": 2}, starts=("0", "1")),
                StepPlan(token_budget=10, chunks={"1": 2}, starts=()),
                StepPlan(token_budget=10, chunks={"1": 4}, starts=(), held=frozenset({"0"}), victims=("0",)),
            ]

        def plan(self, view: EngineView) -> StepPlan:
            return self.plans.pop(0) if self.plans else StepPlan(token_budget=10, open_chunks=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(policies.REGISTRY, "taking", Taking)
        outcome = run([(0.0, 8, 4), (0.0, 8, 8)], policy="taking", block_size=4, kv_blocks=4)
    assert outcome.facts["preemptions"] == 1
    assert outcome.frame["generated_tokens"].to_list() == [4, 8]


@pytest.mark.parametrize("seed", range(3))
def test_holding_and_preempting_lose_no_block(seed: int) -> None:
    """A policy that holds and preempts at random on a small pool: at every boundary each block has one holder."""
    from headway import policies
    from headway.core import EngineView, StepPlan
    from headway.twin import engine as module

    engines: list[module.Engine] = []
    original = module.Engine.__init__
    rng = random.Random(seed)

    def remember(self: module.Engine, **arguments: object) -> None:
        original(self, **arguments)  # type: ignore[arg-type]
        engines.append(self)

    class Holding:
        name = "holding"

        def plan(self, view: EngineView) -> StepPlan:
            engines[0].check()
            decoding = list(view.ledger.decoding)
            held = frozenset(i for i in decoding[1:] if rng.random() < 0.3)  # somebody runs
            return StepPlan(
                token_budget=40, open_chunks=True, held=held, victims=tuple(rng.sample(decoding, len(decoding)))
            )

    rows = [(0.02 * i, rng.randint(1, 30), rng.randint(1, 30)) for i in range(60)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(policies.REGISTRY, "holding", Holding)
        patch.setattr(module.Engine, "__init__", remember)
        outcome = run(rows, NOISY, policy="holding", block_size=4, kv_blocks=24)
    assert outcome.facts["preemptions"] > 0
    assert outcome.frame["generated_tokens"].to_list() == [output for _, _, output in rows]
    assert engines[0].pool.free == engines[0].pool.total


def test_results_have_the_columns_of_a_replay() -> None:
    """Same columns, same types, ordered by index, trace rows counted from where the slice began."""
    from headway.replay.record import SCHEMA

    outcome = run([(0.0, 5, 1)])
    assert pl.Schema(SCHEMA) == outcome.frame.schema
