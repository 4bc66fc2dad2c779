"""Targets of a class."""

from __future__ import annotations

import math

import pytest

from headway.core import Slo


@pytest.mark.parametrize("key", ["ttft_s", "tpot_s", "tbt_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 86_400.1])
def test_a_target_is_seconds_up_to_a_day(key: str, value: float) -> None:
    """Zero, negative, NaN, infinite and more than a day are unit mistakes; the message names the key and the value."""
    with pytest.raises(ValueError, match=key) as caught:
        Slo(**{key: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_is_positive_and_finite(weight: float) -> None:
    """A class of no value, or of infinite value, makes densities meaningless."""
    with pytest.raises(ValueError, match="weight"):
        Slo(weight=weight)


def test_an_unknown_rule_names_the_known_ones() -> None:
    """What happens on a miss is one of three words."""
    with pytest.raises(ValueError, match="reject, defer, best_effort"):
        Slo(on_miss="shrug")  # type: ignore[arg-type]


def test_pace_is_the_tighter_of_tpot_and_tbt() -> None:
    """Steps are sized by the tightest pace; a class without decode target has none."""
    assert Slo(tpot_s=0.05, tbt_s=0.2).pace_s == 0.05
    assert Slo(tpot_s=0.2, tbt_s=0.05).pace_s == 0.05
    assert Slo(tbt_s=0.2).pace_s == 0.2
    assert math.inf == Slo(ttft_s=1.0).pace_s


def test_the_longest_target_is_a_day() -> None:
    """The limit itself is allowed."""
    assert Slo(ttft_s=86_400.0).ttft_s == 86_400.0
