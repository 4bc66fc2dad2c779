"""The envelope: exceedance near eps on exchangeable steps, and drift found and left behind."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core import CostCoefficients, Step, StepCost
from headway.core.envelope import ALARM, FACTOR_LIMIT, FRESH, SPANS, Envelope, tail

CPU = CostCoefficients(g=0.031, a=0.0014, b=0.0006)

Ratio = Callable[[random.Random], float]


def lognormal(sigma: float, level: float = 1.0) -> Ratio:
    """Steps that take `level` times their mean, with that scatter."""
    return lambda rng: level * math.exp(rng.gauss(0.0, sigma))


def feed(cost: StepCost, ratio: Ratio, *, seed: int) -> Iterator[bool]:
    """Let steps of random content run whose times are off by `ratio`; yield whether each exceeded its envelope."""
    rng = random.Random(seed)
    while True:
        q, n = rng.choice((0, rng.randint(1, 500))), rng.randint(1, 60)
        seconds = CPU.seconds(q, n, 0, 0) * ratio(rng)
        over = seconds > cost.envelope(q, n, 0, 0)
        cost.observe(Step(q=q, n=n, K=0, X=0.0, seconds=seconds))
        yield over


def share(cost: StepCost, ratio: Ratio, steps: int, *, seed: int) -> float:
    """Return the share of `steps` steps that exceeded their envelope."""
    return sum(itertools.islice(feed(cost, ratio, seed=seed), steps)) / steps


def test_the_band_by_hand() -> None:
    """One new step exceeds the largest of three with probability 1/4; both of two exceed it with 1/4 * 2/5."""
    assert tail(1, 1, 1, 3) == pytest.approx(1 / 4)
    assert tail(2, 2, 1, 3) == pytest.approx(1 / 10)
    assert tail(0, 5, 2, 9) == pytest.approx(1.0)


@settings(max_examples=30, deadline=None)
@given(calibrated=st.integers(8, 60), above=st.integers(1, 5), m=st.integers(1, 12), seed=st.integers(0, 99))
def test_the_band_is_that_of_exchangeable_steps(calibrated: int, above: int, m: int, seed: int) -> None:
    """Against 2,000 shuffles: the tail at the mean number of exceedances is the share of shuffles that reach it."""
    rng = random.Random(seed)
    count = max(1, round(m * above / (calibrated + 1)))
    hits = 0
    for _ in range(2000):
        ranks = rng.sample(range(calibrated + m), calibrated + m)
        limit = sorted(ranks[:calibrated])[-above]
        hits += sum(rank > limit for rank in ranks[calibrated:]) >= count
    assert hits / 2000 == pytest.approx(tail(count, m, above, calibrated), abs=0.06)


@pytest.mark.parametrize(("eps", "low", "high"), [(0.2, 0.15, 0.25), (0.05, 0.03, 0.07), (0.01, 0.002, 0.02)])
def test_exceedance_is_near_eps_on_steps_that_do_not_change(eps: float, low: float, high: float) -> None:
    """3,000 steps after 1,500, three seeds each; and nothing is taken for drift."""
    for seed in range(3):
        cost = StepCost(eps=eps)
        share(cost, lognormal(0.1), 1500, seed=seed)
        cost.drifts()
        assert low < share(cost, lognormal(0.1), 3000, seed=seed + 50) < high
        assert cost.drifts() == []


@pytest.mark.parametrize("eps", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("level", [1.4, 2.0, 4.0])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.2])
def test_a_slower_machine_is_covered_within_forty_steps(sigma: float, level: float, eps: float) -> None:
    """Everything takes 1.4 to 4 times as long from one step on: of steps 41 to 240, near eps exceed (ten runs)."""
    over = 0
    for seed in range(10):
        cost = StepCost(eps=eps)
        share(cost, lognormal(sigma), 800, seed=seed)
        cost.drifts()
        changed = feed(cost, lognormal(sigma, level), seed=seed + 100)
        sum(itertools.islice(changed, 40))
        over += sum(itertools.islice(changed, 200))
        found = cost.drifts()
        if level > math.exp(4 * sigma):  # else the envelope of before covers most of it
            assert found[0].tightened
            assert found[0].exceeded > found[0].limit
    assert over / 2000 <= eps + 0.05


def test_noisier_steps_are_covered_and_the_alarm_ends() -> None:
    """Scatter of 25 % instead of 5 %: tightened at once, and back in the band later, each said once a regime."""
    cost = StepCost(eps=0.05)
    share(cost, lognormal(0.05), 800, seed=1)
    cost.drifts()
    assert share(cost, lognormal(0.25), 100, seed=2) > 0.1
    assert share(cost, lognormal(0.25), 400, seed=3) < 0.1
    found = cost.drifts()
    assert sorted((d.regime, d.tightened) for d in found) == [
        ("decode_only", False),
        ("decode_only", True),
        ("mixed", False),
        ("mixed", True),
    ]
    assert all(d.factor > d.factor_before for d in found if d.tightened)
    assert not any(envelope.drifting for envelope in cost.regimes().values())


def test_a_faster_machine_is_followed_before_the_fit_forgets() -> None:
    """Everything takes 0.6 of the time: after 100 steps the mean is right, without waiting 1,500 steps."""
    cost = StepCost()
    share(cost, lognormal(0.05), 800, seed=1)
    share(cost, lognormal(0.05, 0.6), 100, seed=2)
    assert cost.mean.seconds(200, 20, 0, 0) / CPU.seconds(200, 20, 0, 0) == pytest.approx(0.6, rel=0.1)
    assert cost.drifts() == []  # nothing was at risk


def test_promises_never_get_wider_margins_back_while_it_drifts() -> None:
    """Tightening keeps the most recent steps only, and never lowers the factor."""
    envelope = Envelope(0.05, 256)
    for _ in range(100):
        envelope.add(1.3)
    envelope.tighten()
    for _ in range(SPANS[-1]):
        envelope.add(1.0)
        assert envelope.factor == 1.3
    assert envelope.is_back() is not None
    envelope.relax()
    assert envelope.factor == pytest.approx(1.3)  # the FRESH old steps are still in the window
    for _ in range(20 * FRESH):
        envelope.add(1.0)
    assert envelope.factor == 1.0


def test_steps_that_no_factor_covers_are_said_once() -> None:
    """One step in five takes five times as long: the factor is capped, the alarm stays on, one line says so."""
    cost = StepCost()
    share(cost, lognormal(0.02), 500, seed=1)
    cost.drifts()
    rng = random.Random(2)
    share(cost, lambda _: rng.choice((1.0, 1.0, 1.0, 1.0, 5.0)), 600, seed=3)
    assert cost.factor <= FACTOR_LIMIT
    found = [d for d in cost.drifts() if d.regime == "mixed"]
    assert [d.tightened for d in found] == [True]


def test_exact_steps_never_exceed_by_rounding() -> None:
    """A cost that is exact has an envelope of one, and a step of that length is not over it."""
    cost = StepCost.fixed(CPU)
    for q in range(1, 200):  # the ridge of the fit alone is off by about 1e-6
        cost.observe(Step(q=q, n=3, K=0, X=0.0, seconds=CPU.seconds(q, 3, 0, 0)))
    assert cost.exceeded()[0] == 0


def test_false_alarms_are_rarer_than_stated() -> None:
    """20,000 steps without change, at an eps that looks often: at most the stated share of them starts an alarm."""
    cost, alarms = StepCost(eps=0.1), 0
    for number, _ in enumerate(itertools.islice(feed(cost, lognormal(0.1), seed=4), 20_000)):
        found = cost.drifts()
        alarms += number > 1000 and sum(d.tightened for d in found)
    assert alarms <= ALARM * 20_000
