"""The rate search against scripted servers with a known capacity."""

import math

import numpy as np
import pytest

from headway.errors import InputError
from headway.replay.capacity import RateSearch, search


def sharp(capacity, n=1000):
    """Return a server that attains everything up to `capacity` and nothing above."""
    return lambda rate, _: (n if rate <= capacity else 0, n)


@pytest.mark.parametrize("capacity", [0.37, 10.0, 777.0])
@pytest.mark.parametrize("start", [1.0, 50.0])
def test_a_sharp_capacity_is_found_within_the_resolution(capacity, start):
    """Whatever the start, the answer is at most 5 % under the truth and never above it."""
    found = search(sharp(capacity), target=0.9, start=start)
    assert found.resolved
    assert found.rate <= capacity < found.rate * 1.05
    assert found.low <= capacity <= found.high


def test_the_first_rates_are_the_start_and_its_doubles():
    """Asked and told by hand: 4, 8 passes, 16 fails, then the geometric middle of 8 and 16."""
    state = RateSearch(target=0.9, start=4.0)
    asked = []
    for attained in (1000, 1000, 0):
        asked.append(state.ask())
        state.tell(asked[-1], attained, 1000)
    assert [4.0, 8.0, 16.0, math.sqrt(8 * 16)] == [*asked, state.ask()]


def test_an_undecided_rate_is_measured_again_but_not_for_ever():
    """91 of 100 says nothing about 0.9: the same rate is asked three times, then the search goes on."""
    state = RateSearch(target=0.9, start=4.0, repeats=3)
    for _ in range(3):
        assert state.ask() == 4.0
        state.tell(4.0, 91, 100)
    assert state.ask() == 8.0
    assert state.result().probes[0].offered == 300


def test_a_server_that_never_attains_has_capacity_zero():
    """Nothing attained down to the lowest rate: rate 0, not resolved, and the reason says so."""
    state = RateSearch(target=0.9, start=1.0, lowest=0.25)
    while (rate := state.ask()) is not None:
        state.tell(rate, 0, 1000)
    found = state.result()
    assert (found.rate, found.low, found.high, found.resolved) == (0.0, 0.0, 0.25, False)
    assert "missed even at 0.25" in found.reason


def test_a_server_that_always_attains_has_no_upper_bound():
    """Everything attained up to the highest rate: the capacity is open above."""
    state = RateSearch(target=0.9, start=1.0, highest=8.0)
    while (rate := state.ask()) is not None:
        state.tell(rate, 1000, 1000)
    assert (8.0, 8.0, math.inf) == (state.result().rate, state.result().low, state.result().high)


def test_the_budget_is_kept():
    """Five runs are five runs, and the result says that they were used up."""
    found = search(sharp(777.0), target=0.9, start=1.0, budget=5)
    assert sum(probe.runs for probe in found.probes) == 5
    assert found.reason == "budget of 5 runs used up"


@pytest.mark.parametrize("target", [0.9, 0.99])
def test_a_noisy_monotone_server_is_found_and_its_interval_holds(target):
    """Over 60 scripted servers, 400 requests a run: median error within 5 %, interval right in at least 85 %."""
    errors, held = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        true = rng.uniform(3, 300)

        def measure(rate, _, rng=rng, true=true):
            odds = 8 * math.log(rate / true) - math.log(target / (1 - target))
            return int(rng.binomial(400, 1 / (1 + math.exp(odds)))), 400

        found = search(measure, target=target, start=10.0)
        errors.append(found.rate / true - 1)
        held.append(found.low <= true <= found.high)
    assert abs(np.median(errors)) < 0.05
    assert np.mean(held) >= 0.85


@pytest.mark.parametrize("bad", [{"target": 1.0}, {"start": 0.0}, {"resolution": 0.0}, {"repeats": 0}])
def test_settings_that_make_no_sense_are_named(bad):
    """The error names the setting, its value and what was expected."""
    (name,) = bad
    with pytest.raises(InputError, match=f"rate search: {name} = "):
        RateSearch(**{"target": 0.9, "start": 1.0, **bad})
