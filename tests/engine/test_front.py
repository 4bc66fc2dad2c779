"""The time from the engine to the socket."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.front import Front


@given(st.lists(st.floats(-1, 10), max_size=60), st.integers(1, 20))
def test_the_estimate_is_the_nearest_rank_of_the_last_ones(fronts: list[float], window: int) -> None:
    """Sorting the window from scratch is the oracle; negative ones count as 0."""
    front = Front(share=0.9, window=window, least=1)
    for seconds in fronts:
        front.add(seconds)
    kept = sorted(max(0.0, seconds) for seconds in fronts[-window:])
    assert front.seconds == (kept[math.ceil(0.9 * len(kept)) - 1] if kept else None)


def test_a_few_are_no_estimate() -> None:
    """Seven of eight say nothing yet."""
    front = Front(least=8)
    for _ in range(7):
        front.add(0.02)
    assert front.seconds is None
    front.add(0.02)
    assert front.seconds == 0.02


@pytest.mark.parametrize(("share", "least"), [(0.0, 1), (1.1, 1), (0.5, 0), (0.5, 200)])
def test_a_setting_that_makes_no_sense_is_an_error(share: float, least: int) -> None:
    """It names the key."""
    with pytest.raises(ValueError, match=r"(share|least) ="):
        Front(share=share, least=least)
