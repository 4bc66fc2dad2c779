"""The default policy: step length, order, jumps, what comes last, what may be preempted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _build import PLAIN, decoding, ids, pending, request, view
from _loop import Arrival, Loop
from headway.admission import create as create_admission
from headway.core import CostCoefficients, EngineView, Ledger, RequestState, Slo, StepCost
from headway.policies import create
from headway.policies.headway import Headway


def test_a_step_fits_the_least_slack_of_the_decodes() -> None:
    """60 ms of slack, 10 ms fixed: 50 tokens of 1 ms."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.06), request(1, tpot=0.5))
    pending(ledger, request(2, prompt=400, ttft=9.0))
    plan = create("headway").plan(view(ledger))
    assert dict(plan.chunks) == {"r2": 50}
    assert plan.token_budget == 52


def test_the_envelope_counts_not_the_mean() -> None:
    """With an envelope of twice the mean, 60 ms of slack carry 20 tokens: 2 * (10 + 20) ms."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.06))
    pending(ledger, request(1, prompt=400, ttft=9.0))
    assert dict(create("headway").plan(view(ledger, StepCost.fixed(PLAIN, factor=2.0))).chunks) == {"r1": 20}


def test_banked_slack_is_lent_to_a_larger_chunk() -> None:
    """A `tpot` stream that is 140 ms ahead lends them; a `tbt` stream at the same moment lends nothing."""
    for target, tokens in (({"tpot": 0.1}, 190), ({"tbt": 0.1}, 90)):
        ledger = Ledger()
        decoding(ledger, request(0, **target), first_s=0.0)
        ledger.token("r0", 0.0)
        pending(ledger, request(1, prompt=1000, ttft=9.0))
        assert dict(create("headway").plan(view(ledger)).chunks) == {"r1": tokens}


@pytest.mark.parametrize("follows", [False, True])
def test_a_sequence_does_not_overtake_the_one_that_computes_its_prefix(follows: bool) -> None:
    """400 tokens, then 20 of 420 left: short work may go first, but not where it would find nothing in the cache."""
    ledger = Ledger()
    first = request(0, prompt=400, ttft=9.0)
    second = request(1, prompt=420, ttft=9.0, cached_tokens=400, follows=first if follows else None)
    pending(ledger, first, second)
    policy = create("headway")
    plan = policy.plan(view(ledger))
    assert dict(plan.chunks) == ({"r0": 240} if follows else {"r1": 20, "r0": 220})
    for name, tokens in plan.chunks.items():
        ledger.schedule(name, tokens)
    if follows:  # the rest of the first, and behind it in the same step the second
        assert dict(policy.plan(view(ledger)).chunks) == {"r0": 160, "r1": 20}


@pytest.mark.parametrize(
    ("computed", "started", "order"), [(160, False, "0 1 2"), (0, True, "1 2"), (160, True, "0 1 2")]
)
def test_a_sequence_is_not_lost_for_what_is_computed_already(computed: int, started: bool, order: str) -> None:
    """260 of 420 ms are left of both when the first has 160 of its 400 tokens; who has started counts by itself."""
    ledger = Ledger()
    first = request(0, prompt=400, ttft=0.3)
    second = request(1, prompt=420, ttft=0.3, cached_tokens=400, follows=first)
    pending(ledger, first, second, request(2, prompt=30, ttft=0.9))
    if computed:
        ledger.schedule("r0", computed)
    if started:
        ledger.set_computed("r1", 400, started=True)
    plan = create("headway", jump=False).plan(view(ledger, blocking_s=9.0))
    assert list(plan.chunks) == [f"r{name}" for name in order.split()] + ([] if computed else ["r0"])


def test_a_sequence_is_lost_with_the_one_that_computes_its_prefix() -> None:
    """400 ms of work are due in 300: the second, alone 20 ms, cannot come first, so a third goes before both."""
    ledger = Ledger()
    first = request(0, prompt=400, ttft=0.3)
    second = request(1, prompt=420, ttft=0.3, cached_tokens=400, follows=first)
    pending(ledger, first, second, request(2, prompt=100, ttft=1.0))
    assert list(create("headway").plan(view(ledger)).chunks) == ["r2", "r0"]


def test_with_nothing_decoding_the_blocking_allowance_limits_a_step() -> None:
    """The next arrival waits for at most 250 ms: 240 tokens of 1 ms beside the fixed 10."""
    ledger = Ledger()
    pending(ledger, request(0, prompt=5000, ttft=60.0))
    assert dict(create("headway").plan(view(ledger)).chunks) == {"r0": 240}


def test_something_always_progresses_when_nothing_decodes() -> None:
    """A budget of 4 tokens, a blocking allowance below the fixed cost, or a long context stop nobody."""
    for more in ({"max_step_tokens": 4}, {"blocking_s": 0.001}):
        ledger = Ledger()
        pending(ledger, request(0, prompt=5000, ttft=60.0))
        assert sum(create("headway").plan(view(ledger, **more)).chunks.values()) > 0
    steep = CostCoefficients(g=0.03, a=0.001, b=0.0, x=1e-5)
    ledger = Ledger()
    pending(ledger, request(0, prompt=5000, ttft=60.0))
    ledger.schedule("r0", 4000)
    assert dict(create("headway").plan(view(ledger, steep, blocking_s=0.05)).chunks) == {"r0": 16}


def test_a_sliver_of_room_is_left_to_the_decodes() -> None:
    """10 tokens of room are less than the smallest chunk: a decode-only step, after which there is more room."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1, output=50))
    pending(ledger, request(1, prompt=400, ttft=9.0))
    now = 0.08  # 20 ms before the next token is due
    plan = create("headway").plan(view(ledger, now=now))
    assert (dict(plan.chunks), plan.token_budget) == ({}, 1)
    ledger.token("r0", now + 0.01)
    assert sum(create("headway").plan(view(ledger, now=now + 0.01)).chunks.values()) == 100


def test_the_last_chunk_of_a_prompt_may_be_smaller() -> None:
    """The five tokens that complete a prompt use that same sliver."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1, output=50))
    pending(ledger, request(1, prompt=5, ttft=9.0))
    assert dict(create("headway").plan(view(ledger, now=0.08)).chunks) == {"r1": 5}


def test_prefill_does_not_wait_for_decodes_that_cannot_gain() -> None:
    """Decodes alone take 10 ms against a pace of 10 ms: no step makes room, so the smallest chunk goes on."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.01, output=50))
    pending(ledger, request(1, prompt=400, ttft=9.0))
    assert dict(create("headway").plan(view(ledger)).chunks) == {"r1": 16}


def test_a_stream_that_is_lost_for_good_limits_nothing() -> None:
    """A pace of 8 ms cannot be had from steps of 10: others are served as if the stream had no pace."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.008, output=50))
    pending(ledger, request(1, prompt=400, ttft=9.0))
    assert dict(create("headway").plan(view(ledger)).chunks) == {"r1": 240}


def test_prefills_go_by_deadline() -> None:
    """Whole prompts in deadline order, the rest of the step to the next one."""
    ledger = Ledger()
    pending(
        ledger, request(0, ttft=3.0, prompt=150), request(1, ttft=1.0, prompt=150), request(2, ttft=2.0, prompt=150)
    )
    plan = Headway(jump=False).plan(view(ledger))
    assert list(plan.chunks.items()) == [("r1", 150), ("r2", 90)]
    assert plan.starts == ("r1", "r2")


def test_a_short_prompt_jumps_ahead_when_nothing_is_lost() -> None:
    """300 tokens go before 2,000 of a request that is due in a minute, not before one that is due in 2.2 s."""
    for ttft, first in ((60.0, "r1"), (2.2, "r0")):
        ledger = Ledger()
        pending(ledger, request(0, ttft=ttft, prompt=2000), request(1, ttft=61.0, prompt=300))
        plan = Headway().plan(view(ledger))
        assert next(iter(plan.chunks)) == first
    ledger = Ledger()
    pending(ledger, request(0, ttft=60.0, prompt=2000), request(1, ttft=61.0, prompt=20))
    assert next(iter(Headway(jump=False).plan(view(ledger)).chunks)) == "r0"


def finishes(view: EngineView, order: list[tuple[float, RequestState]], stretch: float) -> dict[str, float]:
    """Return when each request is done when served in this order at the policy's own estimate of the rate."""
    done, out = view.now_s + view.residual_s, {}
    for work, one in order:
        done += work * stretch
        out[one.id] = done
    return out


@given(
    rows=st.lists(st.tuples(st.sampled_from([0.1, 0.4, 0.8, 1.5, 4.0]), st.integers(1, 600)), min_size=1, max_size=12),
    room=st.sampled_from([0.02, 0.1, 0.24]),
)
def test_a_jump_makes_no_earlier_deadline_late(rows: list[tuple[float, int]], room: float) -> None:
    """Whoever would be in time in deadline order is in time after the jump, by the same estimate of the rate."""
    ledger = Ledger()
    pending(ledger, *(request(seq, ttft=ttft, prompt=prompt) for seq, (ttft, prompt) in enumerate(rows)))
    now = view(ledger)
    stretch = max(1.0, min(8.0, (room + PLAIN.g) / room))
    before = Headway(jump=False)._order(now, ledger.pending, room)
    after = Headway(jump=True)._order(now, ledger.pending, room)
    assert sorted(ids(one for _, one in before)) == sorted(ids(one for _, one in after))
    first, then = finishes(now, before, stretch), finishes(now, after, stretch)
    for one in ledger.pending:
        assert first[one.id] > one.due_s or then[one.id] <= one.due_s + 1e-9


def test_what_cannot_be_on_time_goes_last() -> None:
    """500 ms of work due in 200 ms would take the next one with it; a request without target is never lost."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=0.2, prompt=500), request(1, ttft=0.3, prompt=150))
    assert list(Headway().plan(view(ledger)).chunks) == ["r1", "r0"]
    ledger = Ledger()
    pending(ledger, request(0, ttft=None, patience_s=0.2, prompt=500), request(1, ttft=0.3, prompt=150))
    assert next(iter(Headway(jump=False).plan(view(ledger)).chunks)) == "r0"


def test_what_cannot_be_on_time_is_not_kept_out_by_what_has_no_target() -> None:
    """It was promised a time once; best-effort requests may come without end."""
    ledger = Ledger()
    pending(
        ledger,
        request(0, ttft=0.2, prompt=500),
        request(1, ttft=0.3, prompt=50),
        request(2, ttft=None, patience_s=60.0, prompt=20),
    )
    assert list(Headway(jump=False).plan(view(ledger)).chunks) == ["r1", "r0"]


def test_a_step_that_completes_a_first_token_ends_by_its_deadline() -> None:
    """100 tokens are due in 150 ms: the step carries 140 tokens, not the 240 of the blocking allowance."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=0.15, prompt=100), request(1, ttft=9.0, prompt=1000))
    assert dict(Headway().plan(view(ledger)).chunks) == {"r0": 100, "r1": 40}


def test_a_late_first_token_limits_no_step() -> None:
    """Once it is late, cutting the step helps nobody."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=0.05, prompt=100), request(1, ttft=9.0, prompt=1000))
    assert sum(Headway().plan(view(ledger)).chunks.values()) == 240


def test_what_the_window_leaves_goes_to_later_prompts() -> None:
    """Two prompts of 20 tokens fill no step: the third, beyond a window of two, takes the rest."""
    ledger = Ledger()
    pending(ledger, *(request(seq, prompt=20 if seq < 2 else 1000, ttft=5.0) for seq in range(3)))
    assert dict(Headway(window=2).plan(view(ledger)).chunks) == {"r0": 20, "r1": 20, "r2": 200}


def test_a_prompt_whose_last_chunk_is_in_flight_counts_as_a_decode() -> None:
    """With asynchronous scheduling it emits a token in the coming step and needs none of the prefill."""
    ledger = Ledger()
    pending(ledger, request(0, prompt=50), request(1, prompt=1000, ttft=9.0))
    ledger.schedule("r0", 50)
    plan = create("headway").plan(view(ledger))
    assert (dict(plan.chunks), plan.token_budget) == ({"r1": 240}, 241)


def test_an_idle_plan_schedules_nothing() -> None:
    """No prefill pending: decodes only, and nobody is started."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1), request(1, tpot=0.1))
    plan = create("headway").plan(view(ledger))
    assert (dict(plan.chunks), plan.starts, plan.token_budget) == ({}, (), 2)


def test_victims_are_named_only_when_blocks_run_out() -> None:
    """What nothing is promised first; of the same standing unseen prefills before streams, the latest due first."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=2.0, prompt=900), request(1, ttft=3.0, prompt=900))
    pending(ledger, request(2, ttft=1.0, prompt=900), promised=False)
    for name in ("r0", "r1", "r2"):
        ledger.schedule(name, 10)
    decoding(ledger, request(3, tpot=0.2), request(4, tpot=0.9), request(5, tpot=0.5))
    ledger.decoding["r3"].promised = False
    now = 0.05
    assert create("headway").plan(view(ledger, now=now)).victims == ()
    assert create("headway").plan(view(ledger, now=now, free=3)).victims == ("r2", "r3", "r1", "r0", "r4", "r5")


def test_same_view_same_plan() -> None:
    """A policy is a function of the view: asked twice it answers the same, and changes nothing."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1))
    pending(ledger, *(request(seq, prompt=90 * seq) for seq in range(1, 9)))
    policy = create("headway")
    assert policy.plan(view(ledger, now=0.01)) == policy.plan(view(ledger, now=0.01))
    ledger.check()


@settings(max_examples=30, deadline=None)
@given(
    pace=st.sampled_from([0.012, 0.02, 0.05, 0.2]),
    streams=st.integers(0, 12),
    prompts=st.lists(st.integers(1, 1500), min_size=1, max_size=6),
    hard=st.booleans(),
)
def test_neither_decodes_nor_prefills_starve(pace: float, streams: int, prompts: list[int], hard: bool) -> None:
    """Two-sided: decodes emit in every step, and steps without prefill do not follow each other without end.

    Decode-only steps are there to win `min_chunk` tokens of slack; when they would take more than four blocking
    allowances the smallest chunk goes ahead.
    """
    slo = Slo(ttft_s=5.0, tbt_s=pace) if hard else Slo(ttft_s=5.0, tpot_s=pace)
    arrivals = [Arrival(at_s=0.0, prompt=5, output=80, slo=slo) for _ in range(streams)]
    arrivals += [Arrival(at_s=0.2, prompt=prompt, output=2, slo=slo) for prompt in prompts]
    cost = CostCoefficients(g=0.010, a=0.001, b=0.0002)
    loop = Loop(coefficients=cost, policy=create("headway"), admission=create_admission("admit_all"), check=True)
    loop.run(arrivals)
    assert all(outcome.tokens == outcome.arrival.output for outcome in loop.outcomes)
    idle = longest = 0.0
    now, last = 0.0, max(outcome.first_s or 0.0 for outcome in loop.outcomes)
    for q, _, seconds in loop.steps:
        now += seconds
        idle = 0.0 if q or now > last or now < 0.25 else idle + seconds
        longest = max(longest, idle)
    assert longest <= 4 * 0.25 + 0.05


@settings(max_examples=40, deadline=None)
@given(
    paces=st.lists(st.sampled_from([0.04, 0.08, 0.3]), min_size=1, max_size=6),
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    now=st.floats(0.0, 0.03),
)
def test_no_step_outlasts_the_slack(paces: list[float], prompts: list[int], now: float) -> None:
    """The envelope of the planned step stays under the least slack whenever a decode-only step does."""
    cost = StepCost.fixed(CostCoefficients(g=0.010, a=0.001, b=0.0002, k=1e-7, x=1e-7), factor=1.2)
    ledger = Ledger()
    decoding(ledger, *(request(seq, tpot=pace, output=30) for seq, pace in enumerate(paces)))
    pending(ledger, *(request(100 + seq, prompt=prompt, ttft=9.0) for seq, prompt in enumerate(prompts)))
    seen = view(ledger, cost, now=now)
    plan = create("headway").plan(seen)
    q = sum(plan.chunks.values())
    X = sum(tokens * tokens / 2 for tokens in plan.chunks.values())
    envelope = cost.envelope(q, len(paces), ledger.context_tokens, X)
    assert envelope <= max(seen.slack_s, cost.envelope(0, len(paces), ledger.context_tokens, 0)) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_free_prefill_is_no_division_by_zero(seed: int) -> None:
    """A young fit may hold that prompt tokens cost nothing: then they all go."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1 if seed else 0.001))
    pending(ledger, request(1, prompt=700, ttft=9.0))
    plan = create("headway").plan(view(ledger, CostCoefficients(g=0.01, a=0.0, b=0.0), now=0.01 * seed))
    assert sum(plan.chunks.values()) in (0, 16, 700)
