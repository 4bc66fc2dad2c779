"""The walk over the coming steps, against loops and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from _build import request
from headway.core import CostCoefficients, Ledger, loops
from headway.core.loops import decode_counts
from headway.core.walk import MAX_STEPS, Walk, capacity, capacity_naive, guaranteed, work_s, worst_slot

costs = st.builds(
    CostCoefficients,
    g=st.sampled_from([0.0, 0.005, 0.03]),
    a=st.just(0.001),
    b=st.sampled_from([0.0, 0.0005, 0.004]),
    k=st.sampled_from([0.0, 1e-6]),
    x=st.sampled_from([0.0, 1e-6]),
)
works = st.lists(st.sampled_from([0.0, 0.003, 0.02, 0.021, 0.1, 0.4]), max_size=12)
outputs = st.lists(st.integers(0, 30), max_size=12)


def lengths(
    *,
    steps: int,
    pace_s: float,
    blocking_s: float,
    slack_s: float,
    floor_s: float,
    base_s: np.ndarray,
    until_s: float,
    factor: float = 1.0,
) -> np.ndarray:
    """`loops.lengths`."""
    return loops.lengths(steps, pace_s, blocking_s, slack_s, floor_s, base_s, until_s, factor)


def counts(left: list[int], steps: int) -> np.ndarray:
    """Return the decodes of step 1, 2, ... for decodes with these many tokens left."""
    return decode_counts(np.array(left, dtype=np.int64), steps)


def test_outputs_left_and_decode_counts_by_hand() -> None:
    """A decode with m tokens left runs in steps 1 to m."""
    ledger = Ledger()
    for seq, output in enumerate((2, 3, 5)):
        one = request(seq, output=output)
        ledger.arrive(one)
        ledger.accept(one, None)
        ledger.token(one.id, 0.0)
    left = ledger.outputs_left()
    assert left.tolist() == [1, 2, 4]
    assert decode_counts(left, 5).tolist() == [3, 2, 1, 1, 0]
    assert decode_counts(Ledger().outputs_left(), 2).tolist() == [0, 0]


@given(outputs, st.integers(1, 40))
def test_decode_counts_agree_with_counting(left: list[int], steps: int) -> None:
    """At each step, those with as many tokens left."""
    assert counts(left, steps).tolist() == [sum(m >= j for m in left) for j in range(1, steps + 1)]


def test_work_of_many_is_the_work_of_each() -> None:
    """The vector form agrees with the cost of one."""
    cost = CostCoefficients(g=0.0, a=0.001, b=0.0, x=1e-6)
    tokens, context = np.array([10.0, 0.0, 300.0]), np.array([0.0, 50.0, 70.0])
    each = [cost.work_s(t, c) for t, c in zip(tokens, context, strict=True)]
    assert work_s(cost, tokens, context).tolist() == pytest.approx(each)


walked = {"pace_s": 0.1, "blocking_s": 0.25, "floor_s": 0.03}


def test_with_nothing_decoding_a_step_is_the_blocking_allowance() -> None:
    """Until the first prefill is done: 0.5 s of work at 0.24 s a step takes three steps, then the pace holds."""
    found = lengths(steps=5, slack_s=math.inf, base_s=np.full(5, 0.01), until_s=0.5, **walked)
    assert found.tolist() == pytest.approx([0.25, 0.25, 0.25, 0.1, 0.1])


def test_banked_slack_is_spent_first() -> None:
    """0.4 s of slack allow 0.25 s, leave 0.4 - 0.25 + 0.1 = 0.25 s, allow 0.25 s again, and then the pace."""
    found = lengths(steps=5, slack_s=0.4, base_s=np.full(5, 0.01), until_s=math.inf, **walked)
    assert found.tolist() == pytest.approx([0.25, 0.25, 0.1, 0.1, 0.1])


def test_a_late_decode_gets_decode_only_steps() -> None:
    """70 ms late: 10 ms steps win 90 ms each; 20 ms of slack carry nothing worth it, 110 ms do."""
    found = lengths(steps=4, slack_s=-0.07, base_s=np.full(4, 0.01), until_s=math.inf, **walked)
    assert found.tolist() == pytest.approx([0.01, 0.01, 0.11, 0.1])


def test_a_prefill_that_joins_has_no_slack_to_lend() -> None:
    """From the step after the first completion on the tightest pace rules."""
    found = lengths(steps=4, slack_s=10.0, base_s=np.full(4, 0.01), until_s=0.2, **walked)
    assert found.tolist() == pytest.approx([0.25, 0.1, 0.1, 0.1])


@given(
    cost=costs,
    left=outputs,
    each=works,
    factor=st.sampled_from([1.0, 1.2]),
    slack=st.sampled_from([-0.05, 0.04, 0.1, 0.7, math.inf]),
    reserved=st.sampled_from([0, 5000]),
)
def test_capacity_agrees_with_the_loop(
    cost: CostCoefficients, left: list[int], each: list[float], factor: float, slack: float, reserved: int
) -> None:
    """The vectorised walk does step for step the work that the loop over steps and requests does."""
    steps, backlog = 25, np.cumsum(np.array(each, dtype=np.float64))
    decodes = counts(left, steps)
    walk = capacity(
        cost,
        pace_s=0.1,
        blocking_s=0.25,
        slack_s=slack,
        factor=factor,
        min_chunk=16,
        decodes=decodes,
        reserved_tokens=reserved,
        backlog=backlog,
    )
    base = cost.g + cost.k * reserved
    per_step = lengths(
        steps=steps,
        pace_s=0.1,
        blocking_s=0.25,
        slack_s=slack,
        floor_s=factor * (base + cost.b * float(decodes[0]) + cost.work_s(16, 0)),
        base_s=factor * (base + cost.b * decodes),
        until_s=factor * float(backlog[0]) if len(backlog) else math.inf,
        factor=factor,
    )
    naive = capacity_naive(
        cost, lengths_s=per_step.tolist(), factor=factor, left=left, reserved_tokens=reserved, backlog=backlog.tolist()
    )
    assert walk.cumulative.tolist() == pytest.approx(naive)
    # Work on average, time at the envelope.
    assert walk.ends_s.tolist() == pytest.approx(np.cumsum(per_step).tolist())


def test_finish_is_the_end_of_the_step_that_reaches_the_backlog() -> None:
    """40 ms of work a step of 50 ms: 0.08 s are done after two, 0.09 s after three, 1 s never within four."""
    cost = CostCoefficients(g=0.010, a=0.001, b=0.0)
    walk = capacity(
        cost,
        pace_s=0.05,
        blocking_s=0.25,
        slack_s=0.05,
        factor=1.0,
        min_chunk=1,
        decodes=np.ones(4),
        reserved_tokens=0,
        backlog=np.array([0.08]),
    )
    assert walk.finish_s(np.array([0.0, 0.08, 0.09, 1.0])).tolist() == pytest.approx([0.05, 0.1, 0.15, math.inf])


slots = st.fixed_dictionaries(
    {
        "step_s": st.sampled_from([0.05, 0.1, 0.3]),
        "factor": st.sampled_from([1.0, 1.3]),
        "waste_s": st.sampled_from([0.0, 0.001, 0.016]),
        "step_tokens": st.sampled_from([10, 60, 10_000]),
    }
)


@given(cost=costs, left=outputs, each=works.filter(bool), slot=slots, reserved=st.sampled_from([0, 5000]))
def test_the_guaranteed_walk_accepts_what_the_closed_form_accepts(
    cost: CostCoefficients, left: list[int], each: list[float], slot: dict, reserved: int
) -> None:
    """It counts on no more decodes than everything accepted, so it is never later."""
    backlog = np.cumsum(np.array(each))
    worst = worst_slot(cost, served=len(left) + len(each), reserved_tokens=reserved, **slot)
    walk = guaranteed(
        cost,
        worst,
        factor=slot["factor"],
        decodes=counts(left, MAX_STEPS),
        reserved_tokens=reserved,
        backlog=backlog,
    )
    closed = worst.finish_s(backlog)
    late = walk.finish_s(backlog) > closed + 1e-9
    assert not (late & (closed < MAX_STEPS * worst.length_s)).any()


@given(
    cost=costs,
    left=outputs,
    each=works.filter(bool),
    slot=slots,
    ticks=st.lists(st.integers(-5, 120), min_size=1, max_size=12).map(sorted),
)
def test_a_backlog_is_done_in_time_where_it_is_within_the_work_done_by_then(
    cost: CostCoefficients, left: list[int], each: list[float], slot: dict, ticks: list[int]
) -> None:
    """`done_by_s` is the inverse of `finish_s`: looking up times says the same as comparing finishing times."""
    times = [0.0337 * tick + 0.00113 for tick in ticks]  # never at the end of a step, where the last bit decides
    worst = worst_slot(cost, served=len(left) + len(each), reserved_tokens=0, **slot)
    backlog, at = np.cumsum(np.array(each)), np.array(times)
    known = {"factor": slot["factor"], "decodes": counts(left, 60), "reserved_tokens": 0}
    for capacity_s in (worst, guaranteed(cost, worst, backlog=backlog, **known)):
        done = capacity_s.done_by_s(at)
        for time, work in zip(times, done, strict=True):
            in_time = capacity_s.finish_s(backlog) <= time
            assert (in_time == (backlog <= work + 1e-9)).all()
            assert capacity_s.done_s(time) == work
        assert [capacity_s.end_s(float(each)) for each in backlog] == capacity_s.finish_s(backlog).tolist()


@given(
    cost=costs,
    left=outputs,
    each=works.filter(bool),
    slot=slots,
    at=st.integers(0, 11),
    ticks=st.lists(st.integers(-5, 120), min_size=12, max_size=12).map(sorted),
    steps=st.sampled_from([1, 2, 60]),
)
def test_a_glance_at_the_steps_says_what_finishing_times_say(
    cost: CostCoefficients, left: list[int], each: list[float], slot: dict, at: int, ticks: list[int], steps: int
) -> None:
    """Who is in time, before the candidate and in all, and when the candidate is done: as from `finish_s`."""
    backlog = np.cumsum(np.array(each))
    at, start = min(at, len(backlog) - 1), 1000.0
    dues = np.array([start + 0.0337 * tick + 0.00113 for tick in ticks])[: len(backlog) - 1]
    worst = worst_slot(cost, served=len(left) + len(each), reserved_tokens=0, **slot)
    walk = guaranteed(
        cost, worst, factor=slot["factor"], decodes=counts(left, steps), reserved_tokens=0, backlog=backlog
    )
    finish = start + walk.finish_s(backlog)
    in_time = np.delete(finish, at) <= dues
    seen = walk.glance(backlog, at, dues, start)
    assert start + seen.end_s == finish[at]
    assert seen.ahead == in_time[:at].all()
    assert seen.all == (in_time.all() and math.isfinite(finish[at]))


def test_what_is_in_time_by_a_hair_is_not_seen_at_a_glance() -> None:
    """A deadline within a microsecond of the end of the step counts as missed: then `finish_s` is asked."""
    walk = Walk(np.array([1.0, 2.0]), np.array([0.1, 0.2]))
    for hair, seen in ((0.0, False), (2e-6, True), (-1e-3, False)):
        assert walk.glance(np.array([0.5, 1.5]), 0, np.array([50.2 + hair]), 50.0) == (0.1, True, seen)
        assert walk.glance(np.array([0.5, 1.5]), 1, np.array([50.1 + hair]), 50.0) == (0.2, seen, seen)


@given(cost=costs, left=outputs, each=works.filter(bool), slot=slots, more=st.sampled_from([0.001, 0.05]))
def test_more_work_ahead_is_never_done_sooner(
    cost: CostCoefficients, left: list[int], each: list[float], slot: dict, more: float
) -> None:
    """In the guaranteed walk and in the closed form, one more request ahead delays or leaves everything."""
    worst = worst_slot(cost, served=len(left) + len(each) + 1, reserved_tokens=0, **slot)
    before = np.cumsum(np.array(each))
    after = np.concatenate(([more], before + more))
    decodes = counts(left, 400)
    known = {"factor": slot["factor"], "decodes": decodes, "reserved_tokens": 0}
    without = guaranteed(cost, worst, backlog=before, **known).finish_s(before)
    assert (without <= guaranteed(cost, worst, backlog=after, **known).finish_s(after)[1:]).all()
    assert (worst.finish_s(before) <= worst.finish_s(after)[1:]).all()
    assert (without[:-1] <= without[1:]).all()


@given(cost=costs, left=outputs, each=works.filter(bool))
def test_the_expected_walk_is_never_later_than_the_closed_form(
    cost: CostCoefficients, left: list[int], each: list[float]
) -> None:
    """With slack of at least the pace and a blocking allowance of at least the pace."""
    backlog = np.cumsum(np.array(each))
    worst = worst_slot(
        cost,
        step_s=0.1,
        factor=1.0,
        served=len(left) + len(each),
        reserved_tokens=0,
        waste_s=0.0,
        step_tokens=10**6,
    )
    walk = capacity(
        cost,
        pace_s=0.1,
        blocking_s=0.1,
        slack_s=0.1,
        factor=1.0,
        min_chunk=1,
        decodes=counts(left, MAX_STEPS),
        reserved_tokens=0,
        backlog=backlog,
    )
    closed = worst.finish_s(backlog)
    late = walk.finish_s(backlog) > closed + 1e-9
    assert not (late & (closed < MAX_STEPS * worst.length_s)).any()


def test_the_closed_form_by_hand() -> None:
    """Steps of 100 ms, 20 ms fixed, 10 decodes of 1 ms: 70 ms a step; 0.15 s takes three and one more."""
    cost = CostCoefficients(g=0.020, a=0.001, b=0.001)
    worst = worst_slot(cost, step_s=0.1, factor=1.0, served=10, reserved_tokens=0, waste_s=0.0, step_tokens=10_000)
    assert (worst.length_s, worst.uniform) == (0.1, False)
    assert worst.room_s == pytest.approx(0.07)
    assert worst.finish_s(np.array([0.07, 0.15])).tolist() == pytest.approx([0.2, 0.4])


def test_a_small_token_budget_shortens_the_slot() -> None:
    """30 prompt tokens of 1 ms fill no 100 ms step: a full step is 20 + 10 + 30 ms and carries 30 ms."""
    cost = CostCoefficients(g=0.020, a=0.001, b=0.001)
    worst = worst_slot(cost, step_s=0.1, factor=1.0, served=10, reserved_tokens=0, waste_s=0.0, step_tokens=30)
    assert worst.uniform
    assert (worst.length_s, worst.room_s) == (pytest.approx(0.06), pytest.approx(0.03))


def test_nothing_fits_a_step_is_never() -> None:
    """A step that decodes fill, or that rounding wastes, has no finite bound."""
    cost = CostCoefficients(g=0.020, a=0.001, b=0.001)
    for served, waste in ((100, 0.0), (0, 0.2)):
        worst = worst_slot(
            cost, step_s=0.1, factor=1.0, served=served, reserved_tokens=0, waste_s=waste, step_tokens=10_000
        )
        backlog = np.array([0.05])
        walk = guaranteed(
            cost, worst, factor=1.0, decodes=np.full(10, float(served)), reserved_tokens=0, backlog=backlog
        )
        assert worst.finish_s(backlog).tolist() == [math.inf]
        assert walk.finish_s(backlog).tolist() == [math.inf]
        assert walk.done_by_s(np.array([-0.5, 0.0, 0.25, 60.0])).tolist() == [-math.inf, -math.inf, 0.0, 0.0]
        assert walk.glance(backlog, 0, np.array([]), 0.0) == (math.inf, True, False)


def test_lengths_settle_at_the_factor_times_the_pace() -> None:
    """A step of length f s takes s on average, so f s is the length that neither gains nor loses slack."""
    out = lengths(
        steps=40,
        pace_s=0.1,
        blocking_s=1.0,
        slack_s=0.1,
        floor_s=0.02,
        base_s=np.full(40, 0.01),
        until_s=0.0,
        factor=1.25,
    )
    assert out[0] == pytest.approx(0.1)
    assert out[-1] == pytest.approx(0.125)
    assert np.all(np.diff(out) >= -1e-12)
