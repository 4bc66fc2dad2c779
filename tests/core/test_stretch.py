"""Envelopes of steps in a row: bursts that are measured, and that no stretch exceeds more often than they say."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import CostCoefficients, Line, Step, StepCost, Stretches
from headway.core.stretch import LEAST_STEPS, RATES
from headway.core.walk import Slot


def fed(steps: list[tuple[float, float]], *, eps: float = 0.05, window: int = 1000) -> Stretches:
    """Return what was learned from (seconds, mean) of steps."""
    stretches = Stretches(eps, window)
    for seconds, mean in steps:
        stretches.add(seconds, mean)
    return stretches


def test_nothing_is_told_before_enough_was_seen() -> None:
    """255 steps tell no burst, 256 do; a window of fewer steps tells one when it is full."""
    steps = [(1.0, 1.0)] * LEAST_STEPS
    assert fed(steps[:-1]).lines == ()
    assert [line.rate for line in fed(steps).lines] == list(RATES)
    assert fed(steps[:10], window=10).lines != ()


def test_a_burst_is_what_slow_steps_take_beyond_the_rate() -> None:
    """Three steps of 1.5 s among such of 1 s: 3 * 0.3 s beyond 1.2 times their mean, 3 * 0.48 s beyond 1.02 times."""
    steps = [(1.0, 1.0)] * 300 + [(1.5, 1.0)] * 3 + [(1.0, 1.0)] * 300
    found = {line.rate: line.burst_s for line in fed(steps, eps=0.001).known}
    assert found[1.2] == pytest.approx(0.9)
    assert found[1.02] == pytest.approx(1.44)


def test_a_burst_leaves_with_its_window() -> None:
    """What is older than the window does not count any more."""
    stretches = fed([(1.5, 1.0)] * 3 + [(1.0, 1.0)] * 400, eps=0.001, window=300)
    assert all(line.burst_s == 0 for line in stretches.known)


def test_a_rate_that_is_over_its_burst_says_nothing_until_it_is_back() -> None:
    """With eps = 0.1 a slow spell is over the burst of what came before; when it is made up for, all is as it was."""
    stretches = fed([(1.0, 1.0)] * 300, eps=0.1)
    assert len(stretches.lines) == len(RATES)
    stretches.add(1.5, 1.0)
    assert stretches.lines == ()
    assert stretches.over_s == pytest.approx(0.5 - 0.02)
    assert stretches.exceeded == (1, 301 - LEAST_STEPS)
    stretches.add(0.4, 1.0)
    assert len(stretches.lines) == len(RATES)
    assert stretches.over_s == 0


def test_a_spell_that_grows_is_not_counted_on_even_where_the_burst_grows_with_it() -> None:
    """With an eps of 0.001 the burst is the largest excess, the newest included: that one does not hold yet."""
    stretches = fed([(1.0, 1.0)] * 300, eps=0.001)
    for _ in range(3):
        stretches.add(1.5, 1.0)
        assert stretches.lines == ()
    stretches.add(1.0, 1.0)
    assert len(stretches.lines) == len(RATES)
    assert max(line.burst_s for line in stretches.lines) == pytest.approx(3 * 0.48)


def test_known_envelopes_are_not_learned_over() -> None:
    """An engine whose envelopes are given keeps them, whatever its steps take."""
    stretches = Stretches(0.05, 100)
    stretches.fix((Line(1.1, 0.2),))
    stretches.add(9.0, 1.0)
    assert stretches.lines == stretches.known == (Line(1.1, 0.2),)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 2)), min_size=1, max_size=60))
def test_no_stretch_exceeds_its_rate_by_more_than_the_largest_excess(steps: list[tuple[float, float]]) -> None:
    """Brute force over all stretches: the largest of (seconds - rate * mean) is the burst that covers every step."""
    found = fed(steps, eps=1e-9, window=len(steps)).known
    for line in found:
        sums = [0.0, *itertools.accumulate(seconds - line.rate * mean for seconds, mean in steps)]
        worst = max(0.0, *(b - a for a, b in itertools.combinations(sums, 2)))
        assert line.burst_s == pytest.approx(worst, abs=1e-9)


def test_stretches_are_exceeded_about_as_often_as_they_say() -> None:
    """Steps that scatter independently by 10 %: bursts of eps = 0.05 are exceeded after about that share of them."""
    rng = random.Random(5)
    stretches = Stretches(0.05, 1000)
    for _ in range(1000):
        stretches.add(math.exp(rng.gauss(0, 0.1)), 1.0)
    over = 0
    for _ in range(4000):
        stretches.add(math.exp(rng.gauss(0, 0.1)), 1.0)
        over += stretches.over_s > 0
    # The first line that is exceeded counts, of four.
    assert 0.03 < over / 4000 < 0.2


def test_a_cost_learns_them_and_forgets_them_when_its_mean_jumps() -> None:
    """Steps that take a third longer from some moment on: the mean is scaled, what was measured against it is void."""
    cost = StepCost(CostCoefficients(g=0.02, a=1e-4, b=1e-4), eps=0.01)
    rng = random.Random(1)

    def step(level: float) -> None:
        q = rng.randint(50, 100)
        cost.observe(Step(q=q, n=4, K=0, X=0.0, seconds=level * rng.uniform(0.99, 1.01) * (0.0204 + 1e-4 * q)))

    for _ in range(400):
        step(1.0)
    assert len(cost.lines) == len(RATES)
    assert all(line.burst_s < 0.03 for line in cost.lines)
    for _ in range(40):
        step(1.33)
    assert cost.lines == ()


def test_none_counts_while_single_steps_leave_their_envelope() -> None:
    """Promises tighten at once: with drift every step is counted at its own envelope."""
    cost = StepCost.fixed(CostCoefficients(g=0.02, a=1e-4, b=1e-4), factor=1.3, lines=(Line(1.1, 0.1),))
    assert cost.lines == (Line(1.1, 0.1),)
    cost.regimes()["mixed"].drifting = True
    assert cost.lines == ()


@given(
    st.floats(0.01, 5),
    st.lists(st.tuples(st.floats(0.5, 1.0), st.floats(0, 2)), max_size=3),
    st.floats(0, 20),
)
def test_when_steps_are_over_and_how_many_are_over_by_then_agree(
    length: float, lines: list[tuple[float, float]], time: float
) -> None:
    """`within_s` inverts `latest_s`, and `done_by_s` tells exactly what `finish_s` has done by a time."""
    slot = Slot(step_s=0.1, length_s=length, room_s=1.0, uniform=True, lines=tuple(lines))
    inside = slot.within_s(time)
    assert float(slot.latest_s(np.array([inside]))[0]) == pytest.approx(time, abs=1e-9)
    assert slot.latest_s(np.array([time]))[0] <= time
    for work in (0.5, 1.0, 2.5, 7.0):
        done = slot.finish_s(np.array([work]))[0]
        assert slot.done_by_s(np.array([done + 1e-6]))[0] >= work - 1e-6
        assert slot.done_by_s(np.array([done - 1e-6]))[0] < work
