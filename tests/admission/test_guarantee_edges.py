"""What the proof of docs/guarantee.md needed beyond the walk: one test for each hole that it showed, and for each kind
of request that is not simply promised.

The first tests are counter-examples to earlier versions: each of them broke a promise there.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from _build import decoding, pending, request, view
from _loop import Arrival, Loop
from headway.admission import create as create_admission
from headway.core import Accept, CostCoefficients, Ledger, Line, Reason, Reject, RequestState, Slo, StepPlan
from headway.core.desk import Desk
from headway.core.walk import guaranteed, worst_slot
from headway.policies import create as create_policy
from headway.trace import SCHEMA, ReadReport, Trace
from headway.twin import Profile, Scenario
from headway.twin.check import STRICT, Attempt, attempted
from headway.twin.patterns import constant, spells
from headway.twin.scenario import simulate

COST = CostCoefficients(g=0.01, a=1e-4, b=5e-4, k=1e-7, x=1e-8)
STRICT_TEST = {"strict": True, "foresight": 0.0}


def trace(rows: list[tuple[float, int, int, str]], hashes: list[list[int]] | None = None) -> Trace:
    """Return a trace of (arrival, prompt, output, class), with prefix ids of 16 tokens if given."""
    at, inputs, outputs, names = zip(*rows, strict=True)
    frame = pl.DataFrame({"arrival_s": at, "input_tokens": inputs, "output_tokens": outputs, "slo_class": names})
    if hashes is not None:
        frame = frame.with_columns(hash_ids=pl.Series(hashes, dtype=pl.List(pl.UInt64)))
    missing = [pl.lit(None, dtype=dtype).alias(key) for key, dtype in SCHEMA.items() if key not in frame.columns]
    frame = frame.with_columns(missing).select(pl.col(key).cast(dtype) for key, dtype in SCHEMA.items())
    report = ReadReport(read=len(rows), kept=len(rows))
    block = None if hashes is None else 16
    return Trace(frame=frame, format="synthetic", source="test", sha256="0" * 64, report=report, block_size=block)


def scenario(
    slos: dict[str, Slo],
    *,
    factor: float = 1.2,
    cost: CostCoefficients = COST,
    lines: tuple[Line, ...] = (),
    **settings: object,
) -> Scenario:
    """Return strict settings on a twin of this cost."""
    profile = Profile(name="test", label="estimated", cost=cost, envelope_factor=factor, lines=lines)
    return Scenario(profile=profile, slos=slos, settings={**STRICT, **settings})  # type: ignore[arg-type]


def at_envelope(arrived: Trace, given: Scenario) -> Attempt:
    """Run with every step at its envelope."""
    return attempted(arrived, given, "envelope", constant(given.profile.envelope_factor))


# Counter-examples to earlier versions


def test_a_stream_that_joins_behind_the_step_in_flight_keeps_its_pace() -> None:
    """Asynchronous scheduling: while the only prompt's last chunk runs, nothing decodes, yet the next step is its gap.

    The next step was sized by the blocking allowance and filled with the document: a gap of 250 ms under a pace of 40.
    """
    slos = {"chat": Slo(ttft_s=1.0, tbt_s=0.04), "document": Slo(ttft_s=5.0, tbt_s=0.3)}
    found = at_envelope(trace([(0.0, 300, 6, "chat"), (0.0, 3900, 4, "document")]), scenario(slos, async_lag=True))
    assert (found.accepted, found.missed) == (2, 0)


def test_what_is_left_of_a_chunk_is_not_used_to_overtake() -> None:
    """A token late in a long prompt costs 5 ms, one of a new prompt 0.1 ms: that room let short prompts overtake.

    They then decoded at a pace of 15 ms while the long prompt, promised on steps of 250 ms, was still being computed.
    """
    cost = CostCoefficients(g=0.01, a=1e-4, b=0.0, x=3e-6)
    ledger = Ledger()
    pending(ledger, request(0, ttft=5.0, prompt=1900), request(1, ttft=6.0, tpot=0.015, prompt=1))
    ledger.schedule("r0", 1500)
    plan = create_policy("headway", jump=False).plan(view(ledger, cost, blocking_s=0.2499))
    room = 0.2499 - cost.g - cost.work_s(plan.chunks["r0"], 1500)
    assert cost.work_s(1, 0) < room < cost.work_s(1, 1500 + plan.chunks["r0"])
    assert list(plan.chunks) == ["r0"]


def test_a_long_prompt_whose_smallest_chunk_outlasts_a_step_is_no_error() -> None:
    """16 tokens at the end of 8,000 take 144 ms under a pace of 100: no slot has a length, and that one is never done.

    Slots of less than nothing ended one before the other, which the look-up of what is overdue did not stand.
    """
    cost = CostCoefficients(g=0.01, a=0.001, b=0.0, x=1e-6)
    ledger = Ledger()
    pending(ledger, request(1, ttft=0.5, prompt=10), request(2, ttft=60.0, prompt=8000))
    test = create_admission("response_time", strict=True, foresight=0.0)
    asked = request(9, ttft=5.0, arrival=1.0, tpot=0.1)
    verdict = test.decide(view(ledger, cost, now=1.0), asked)
    assert isinstance(verdict, Reject)
    assert verdict.detail == "it would break a promise already made to another request"


def test_slots_that_decodes_overfill_are_owed_not_forgiven() -> None:
    """Steps of 10 ms on paper, decodes that take 50: five slots are used up by each step, not by none.

    100 decodes of 2 tokens at 0.5 ms: 2 steps of 50 ms. At slots of 10 ms they are over after 0.1 s, not after 0.02 s.
    """
    cost = CostCoefficients(g=0.0, a=1e-4, b=5e-4)
    slot = worst_slot(cost, step_s=0.01, factor=1.0, served=101, reserved_tokens=0, waste_s=0.0, step_tokens=10_000)
    counts = np.array([100.0, 100.0, *[0.0] * 18])
    walk = guaranteed(cost, slot, factor=1.0, decodes=counts, reserved_tokens=0, backlog=np.array([0.005]))
    # 0.1 s pays for the decodes; the prompt itself counts as a decode too, 0.5 ms a slot: 12 slots of 9.5 ms pay for
    # that and 5 ms of work, and one step more is for the phase.
    assert walk.finish_s(np.array([0.005])) == pytest.approx([0.13])


def test_a_prompt_in_several_steps_is_computed_whole() -> None:
    """Asynchronous twin: a prompt whose last chunk was planned while the one before ran lost that last chunk."""
    executed: list[int] = []
    given = scenario({"chat": Slo(ttft_s=3.0, tpot_s=0.05), "document": Slo(ttft_s=9.0, tpot_s=0.3)}, async_lag=True)
    arrived = trace([(0.0, 200, 40, "chat"), (0.02, 1500, 3, "document"), (0.03, 700, 3, "document")])
    simulate(arrived, given, on_step=lambda issued: executed.append(issued.step.q))
    assert sum(executed) == 200 + 1500 + 700


def test_what_nobody_promised_goes_behind_every_promise() -> None:
    """A class without targets is ordered by its patience: shorter than a TTFT, it went before promises already made."""
    slos = {"batch": Slo(), "chat": Slo(ttft_s=2.0, tpot_s=0.1)}
    rows = [(0.0, 2000, 4, "chat"), (0.001, 2000, 4, "chat"), *[(0.002, 1500, 2, "batch")] * 12]
    found = at_envelope(trace(rows), scenario(slos, patience_s=0.3))
    assert (found.accepted, found.unpromised, found.missed) == (2, 12, 0)


def test_a_preempted_request_without_promise_goes_behind_too() -> None:
    """Its old deadline lies before a promise that was made while it decoded, which did not count on its work."""
    ledger = Ledger()
    old, promised = request(0, ttft=None, arrival=-59.5, prompt=500), request(1, ttft=1.0)
    pending(ledger, old, promised=False)
    ledger.token("r0", 0.0)
    pending(ledger, promised)
    ledger.preempt("r0")
    assert [r.id for r in ledger.pending] == ["r1", "r0"]
    assert old.due_s > promised.due_s


def test_a_hit_found_at_the_start_never_lengthens_the_step() -> None:
    """105 tokens planned from the first on, 112 turn out to be cached: 41 tokens there touch as many token pairs."""
    one = request(0, prompt=300)
    plan = StepPlan(token_budget=512, chunks={"r0": 105})
    tokens = plan.granted(one, 112)
    assert (tokens, plan.granted(one, 0), plan.granted(request(1), 0)) == (41, 105, 0)
    assert tokens * (112 + tokens / 2) <= 105 * 105 / 2 < (tokens + 1) * (112 + (tokens + 1) / 2)
    assert 112 + tokens >= 105  # it comes at least as far


def test_hits_that_are_not_held_yet_are_not_counted_on() -> None:
    """A prompt whose cached blocks may be evicted before it starts counts with its whole work, also for others."""
    walk = create_admission("response_time", **STRICT_TEST)

    def bound(cached: int, *, started: bool = False) -> float:
        ledger = Ledger()
        first = request(0, ttft=2.0, tpot=0.05, prompt=1000, cached_tokens=cached)
        pending(ledger, first)
        if started:
            ledger.set_computed("r0", cached, started=True)
        verdict = walk.decide(view(ledger, COST), request(1, ttft=5.0, tpot=0.05, prompt=100))
        assert isinstance(verdict, Accept)
        assert verdict.bound_s is not None
        return verdict.bound_s

    assert bound(900) >= bound(0)
    assert bound(900, started=True) < bound(0)  # held: work that is not needed


@pytest.mark.parametrize("strict", [False, True])
def test_a_pace_that_no_step_keeps_never_fits(strict: bool) -> None:
    """A decode alone takes longer than it may (by default four times as long), idle or not; one token has no pace."""
    walk = create_admission("response_time", strict=strict)
    gap = COST.seconds(0, 1, 100, 0)
    for busy in (False, True):
        ledger = Ledger()
        if busy:
            decoding(ledger, request(0, tpot=1.0))
        here = view(ledger, COST)
        verdict = walk.decide(here, request(1, ttft=5.0, tpot=(0.9 if strict else 0.2) * gap, prompt=100))
        assert isinstance(verdict, Reject)
        assert verdict.reason is Reason.NEVER_FITS
        assert "even alone" in str(verdict.detail)
    assert isinstance(walk.decide(view(Ledger(), COST), request(1, ttft=5.0, tbt=5 * gap, prompt=100)), Accept)
    assert isinstance(
        create_admission("response_time").decide(
            view(Ledger(), COST), request(1, ttft=5.0, tpot=0.2 * gap, prompt=100, output=1)
        ),
        Accept,
    )


def test_an_idle_engine_gets_no_emptier_by_waiting() -> None:
    """A strict promise cannot be given alone: no time to come back is told, as there is behind another request."""
    walk, told = create_admission("response_time", **STRICT_TEST), []
    for busy in (False, True):
        ledger = Ledger()
        if busy:
            pending(ledger, request(0, ttft=1.0, prompt=100))
        verdict = walk.decide(view(ledger, COST), request(1, ttft=0.4, tpot=0.05, prompt=3000))
        assert isinstance(verdict, Reject)
        assert verdict.reason is Reason.TTFT
        told.append(verdict.retry_after_s)
    assert told[0] is None
    assert told[1] is not None


def test_what_fills_the_whole_pool_never_fits() -> None:
    """A strict promise keeps a block in reserve, so nothing that ends would ever make room for this one."""
    walk = create_admission("response_time", **STRICT_TEST)
    one = request(0, ttft=2.0, tpot=0.05, prompt=150, output=10)
    assert walk.decide(view(Ledger(), COST, blocks=10), one) == Reject(reason=Reason.NEVER_FITS)
    assert isinstance(walk.decide(view(Ledger(), COST, blocks=11), one), Accept)


# Kinds of requests


@pytest.mark.parametrize("seed", range(4))
def test_best_effort_never_endangers_a_promise(seed: int) -> None:
    """Twice what fits, the rest as best effort on a small pool: they are preempted and held, promises stand."""
    rng = random.Random(seed)
    slos = {
        "chat": Slo(name="chat", ttft_s=0.6, tpot_s=0.03, on_miss="best_effort"),
        "reader": Slo(name="reader", ttft_s=2.0, tbt_s=0.06, on_miss="reject"),
    }
    rows, now = [], 0.0
    for _ in range(300):
        now += rng.expovariate(1 / 0.02)
        rows.append((now, rng.choice([20, 100, 600]), rng.choice([4, 30, 80]), rng.choice(["chat", "chat", "reader"])))
    given = scenario(slos, kv_blocks=250, max_running=64)
    arrived = trace(rows)
    found = attempted(arrived, given, "spells", spells(0.3, 1.2, seed))
    assert found.missed == 0
    assert found.accepted > 30
    assert found.unpromised > 30
    assert simulate(arrived, given).facts["preemptions"] > 0


def test_decodes_without_a_pace_skip_a_step_that_would_break_one() -> None:
    """One stream of 30 ms among 60 that nothing is promised: the youngest of those skip until the step fits."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.03), *[request(n, ttft=None) for n in range(1, 61)])
    seen = view(ledger, COST)
    held = create_policy("headway", jump=False).plan(seen).held
    each = COST.b + COST.k * 101
    assert COST.seconds(0, 61, seen.context_tokens, 0) - len(held) * each <= 0.03
    assert COST.seconds(0, 61, seen.context_tokens, 0) - (len(held) - 1) * each > 0.03
    assert held == {f"r{n}" for n in range(61 - len(held), 61)}


def test_a_pace_without_a_ttft_is_checked_too() -> None:
    """A class with a pace alone is refused where its pace, or that of others, could not be kept."""
    test = create_admission("response_time", **STRICT_TEST)
    ledger = Ledger()
    decoding(ledger, *[request(n, tpot=0.03) for n in range(30)])
    assert test.decide(view(ledger, COST), request(40, ttft=None, tpot=0.03)) == Accept()
    verdict = test.decide(view(ledger, COST), request(40, ttft=None, tpot=0.02))
    assert isinstance(verdict, Reject)
    assert verdict.reason is Reason.TBT


def test_an_answer_beyond_its_cap_is_outside_the_guarantee() -> None:
    """A request without max_tokens counts with its class's cap; beyond it promises to others may break, and do here.

    40 decodes are said to end after 2 tokens, and a prompt is promised on that; they go on instead.
    """
    cost = CostCoefficients(g=0.002, a=1e-4, b=1e-3)
    stream = Slo(ttft_s=2.0, tpot_s=0.07)

    def misses(*, outrun: bool) -> int:
        arrivals = [Arrival(at_s=0.0, prompt=1, output=2 if not outrun else 400, slo=stream) for _ in range(40)]
        arrivals.append(Arrival(at_s=0.1, prompt=1800, output=1, slo=Slo(ttft_s=0.45, tpot_s=0.07)))
        loop = _Capped(
            coefficients=cost,
            policy=create_policy("headway", jump=False),
            admission=create_admission("response_time", **STRICT_TEST),
            blocking_s=0.07,
            cap=2,
        )
        outcomes = loop.run(arrivals)
        assert outcomes[-1].verdict == "accept"
        return sum(bool(o.misses()) for o in outcomes)

    assert misses(outrun=False) == 0
    assert misses(outrun=True) > 0


class _Capped(Loop):
    """A loop that tells the decisions of at most `cap` output tokens."""

    def __init__(self, *, cap: int, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self.cap = cap

    def _decide(self, view: object, request: RequestState) -> None:
        request.max_output_tokens = min(request.max_output_tokens, self.cap)
        super()._decide(view, request)  # type: ignore[arg-type]


@pytest.mark.parametrize(("room", "accepted"), [(4, 0), (5, 5)])
def test_a_group_is_promised_whole_or_not_at_all(room: int, accepted: int) -> None:
    """n = 5: each member counts for those after it; all are accepted, or all refused and the books as before."""
    ledger, desk = Ledger(), Desk()
    test = create_admission("response_time", **STRICT_TEST)
    members = [request(n, ttft=5.0, tbt=0.1, prompt=50, output=10) for n in range(5)]
    for one in members:
        ledger.arrive(one)
        desk.join(one.id, group="g", size=5, now_s=0.0)
    answers = list(desk.ask(view(ledger, COST, max_running=room), test))
    assert [len(answer.requests) for answer in answers] == [5]
    assert len(ledger.pending) == accepted
    verdict = answers[0].verdict
    if accepted:
        assert isinstance(verdict, Accept)
        assert verdict.bound_s == max(r.bound_s or 0.0 for r in ledger.pending)
    else:
        assert isinstance(verdict, Reject)
        assert verdict.reason is Reason.NEVER_FITS  # five in four places, on an idle engine
        assert (ledger.requests, ledger.reserved_tokens) == ({}, 0)


def test_a_deferred_request_is_promised_when_room_appears() -> None:
    """Steps at a quarter of their envelope leave room that nobody could promise before: asked again, it is accepted."""
    chat = Slo(name="chat", ttft_s=1.0, tpot_s=0.1)
    rows = [(0.001 * n, 400, 2, "chat") for n in range(40)]
    counts = {}
    for rule in ("reject", "defer"):
        given = scenario({"chat": replace(chat, on_miss=rule)})  # type: ignore[arg-type]
        found = attempted(trace(rows), given, "fast", constant(0.3))
        assert found.missed == 0
        counts[rule] = found.accepted
    assert counts["defer"] > counts["reject"] > 0


def test_a_stream_of_twice_the_pace_may_run_in_every_second_step() -> None:
    """`skip`: with 30 ms and 60 ms as hard paces, the slow one skips every second step while prefill waits."""
    fast, slow = request(0, tbt=0.03, output=50), request(1, tbt=0.06, output=50)
    ledger = Ledger()
    decoding(ledger, fast, slow)
    pending(ledger, request(2, ttft=9.0, tbt=0.03, prompt=2000))
    policy = create_policy("headway", jump=False, skip=True)
    ran = []
    now = 0.0
    for _ in range(6):
        plan = policy.plan(view(ledger, COST, now=now))
        ran.append("r1" not in plan.held)
        now += 0.03
        for one in (fast, slow):
            if one.id not in plan.held:
                ledger.token(one.id, now)
        ledger.schedule("r2", plan.chunks["r2"])
    assert ran == [False, True] * 3
    assert create_policy("headway", jump=False).plan(view(ledger, COST, now=now)).held == frozenset()


def test_plans_take_the_step_in_flight_at_its_own_envelope() -> None:
    """Asynchronous, and a stream that is far ahead of its pace: the first step is five times as long as the pace.

    A promise that counted on steps in a row alone was given up as lost: by the clock of the plan, the step behind began
    so much later.
    """
    slos = {"stream": Slo(name="stream", tpot_s=0.05), "soon": Slo(name="soon", ttft_s=0.28, tpot_s=0.05)}
    slos["later"] = Slo(name="later", ttft_s=10.0, tpot_s=0.05)
    given = scenario(
        slos,
        factor=1.5,
        cost=CostCoefficients(g=1e-3, a=1e-3, b=0.0),
        lines=(Line(1.0, 0.0),),
        async_lag=True,
        blocking_s=0.25,
    )
    # How long a prompt may be that is promised at all is for the test to say; every length must then be in time.
    promised = []
    for tokens in range(100, 230, 5):
        rows = [(0.0, 16, 2000, "stream"), (1.0, tokens, 2, "soon"), (1.0, 2000, 2, "later")]
        found = attempted(trace(rows), given, "mean", constant(1.0))
        assert found.missed == 0, tokens
        promised.append(found.accepted)
    assert max(promised) > min(promised)


def test_a_promise_ahead_may_leave_its_last_step_short() -> None:
    """A promise made at a pace of 20 ms ends within 55 ms of its last step; slots of 250 ms count that step as lost.

    By hand: 10 ms fixed, 0.1 ms a token, nothing decodes. Slot 250 - 1.6 ms carries 238.4 ms of work; 300 tokens ahead
    and 2000 of its own are 230 ms: one slot. The short step's 10 ms fixed part do not fit in it any more.
    """
    cost = CostCoefficients(g=0.01, a=1e-4, b=0.0)
    test = create_admission("response_time", **STRICT_TEST)

    def bound(due: float) -> float:
        ledger = Ledger()
        pending(ledger, request(0, ttft=due, tpot=5.0, prompt=300))
        verdict = test.decide(view(ledger, cost, blocking_s=0.25), request(1, ttft=9.0, tpot=5.0, prompt=2000))
        assert isinstance(verdict, Accept)
        assert verdict.bound_s is not None
        return verdict.bound_s

    assert bound(8.0) == pytest.approx(0.2484 + 0.25)
    assert bound(0.055) == pytest.approx(2 * 0.2484 + 0.25)


def test_its_own_pace_does_not_slow_what_comes_before_its_first_token() -> None:
    """Alone on an idle engine a stream of a tight pace is promised at steps of the blocking allowance."""
    cost = CostCoefficients(g=0.01, a=1e-4, b=0.0)
    test = create_admission("response_time", **STRICT_TEST)
    seen = view(Ledger(), cost, blocking_s=0.25)
    verdict = test.decide(seen, request(1, ttft=4.0, tpot=0.02, prompt=9000))
    assert verdict == Accept(bound_s=pytest.approx(4 * 0.2484 + 0.25))
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.02, output=500))
    verdict = test.decide(view(ledger, cost, blocking_s=0.25), request(1, ttft=4.0, tpot=0.02, prompt=9000))
    assert verdict == Accept(bound_s=pytest.approx(108 * 0.0184 + 0.02))  # slots of 18.4 ms carry 8.4 ms


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        {"async_lag": True},
        {"async_lag": True, "token_budget": 120, "output_cap": 24},
        {"prefix_cache": True, "kv_blocks": 120, "async_lag": True},
        {"kv_blocks": 90, "max_running": 12},
        {"async_lag": True, "blocking_s": 0.3, "lines": (Line(1.0, 0.02),)},
        {"blocking_s": 0.3, "lines": (Line(1.0, 0.0), Line(1.1, 0.01))},
    ],
)
def test_no_promise_breaks_in_the_twin(seed: int, settings: dict[str, object]) -> None:
    """Bursts of every class and rule on an engine with a pool, a prefix cache, a lag: spells of fast and slow steps."""
    rng = random.Random(seed)
    cost = CostCoefficients(
        g=0.005, a=rng.choice([2e-5, 2e-4]), b=rng.choice([5e-5, 8e-4]), k=1e-7, x=rng.choice([1e-8, 1e-6])
    )
    pace = 1.3 * (cost.g + 16 * cost.a)
    slos = {}
    for name, ttft in (("a", 0.1), ("b", 0.4), ("c", 1.5)):
        hard, each = rng.random() < 0.4, pace * rng.choice([1.6, 3.0, 8.0, 20.0])
        rule = rng.choice(["reject", "reject", "defer", "best_effort"])
        slos[name] = Slo(
            name=name, ttft_s=ttft, tpot_s=None if hard else each, tbt_s=each if hard else None, on_miss=rule
        )
    rows, hashes, now = [], [], 0.0
    while len(rows) < 160:
        now += rng.expovariate(1 / 0.06)
        for _ in range(rng.choice([1, 1, 8])):
            prompt = rng.choice([1, 8, 40, 90, 300, 900])
            rows.append((now, prompt, rng.choice([1, 3, 8, 30]), rng.choice("abc")))
            hashes.append([1000 * rng.randrange(6) + block for block in range(prompt // 16)])
    arrived = trace(rows, hashes if settings.get("prefix_cache") else None)
    found = attempted(arrived, scenario(slos, cost=cost, factor=1.3, **settings), "spells", spells(0.25, 1.3, seed))
    assert found.missed == 0
    assert found.accepted > 0
