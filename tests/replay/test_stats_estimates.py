"""Percentiles, intervals and rates of one run."""

import math

import numpy as np
import polars as pl
import pytest
from compare_runs import frame
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from headway.replay import stats


def test_a_percentile_is_a_measured_value():
    """Nearest rank of 1..100: P99 is 99, P50 is 50, and 0.07 * 100 does not round up to rank 8."""
    values = np.arange(1, 101)
    assert [stats.percentile(values, q) for q in (0.07, 0.5, 0.99)] == [7, 50, 99]
    assert stats.percentile([], 0.5) is None


def test_order_interval_of_ten_values_is_the_textbook_one():
    """The 95 % interval of a median of ten is (x2, x9): P(2 <= B <= 8) = 0.979 for B ~ Bin(10, 1/2)."""
    assert stats.interval_ranks(10, 0.5) == (2, 9)


@pytest.mark.parametrize(("quantile", "n"), [(0.5, 6), (0.9, 36), (0.99, 368)])
def test_interval_is_none_below_the_smallest_n(quantile, n):
    """q^n must fall under 2.5 % before the largest value can bound the percentile from above."""
    assert stats.min_n(quantile) == n
    assert stats.interval_ranks(n, quantile) is not None
    assert stats.interval_ranks(n - 1, quantile) is None
    assert stats.percentile_estimate(np.arange(n - 1), quantile).low is None


@given(st.integers(10, 3000), st.floats(0.02, 0.98))
@settings(deadline=None)
def test_order_interval_covers_by_the_binomial_law(n, quantile):
    """P(l <= B < u) is at least 95 %, and one rank less on either side would break its tail (scipy's binomial)."""
    binom = reference.binom
    ranks = stats.interval_ranks(n, quantile)
    if ranks is None:
        assert quantile**n > 0.025 or (1 - quantile) ** n > 0.025
        return
    low, high = ranks
    assert binom.cdf(low - 1, n, quantile) <= 0.025 + 1e-9 < binom.cdf(low, n, quantile) + 2e-9
    assert binom.sf(high - 1, n, quantile) <= 0.025 + 1e-9 < binom.sf(high - 2, n, quantile) + 2e-9


def test_unserved_requests_make_the_adjusted_percentile_infinite():
    """90 answers at 100 ms and 10 refusals at once: P95 of the served is 100 ms, adjusted it is infinite."""
    served = np.full(90, 0.1)
    assert stats.percentile_estimate(served, 0.95).value == 0.1
    assert stats.percentile_estimate(served, 0.95, unserved=10).value == math.inf


def test_wilson_matches_the_published_case():
    """Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662; all of n stays at 1 on one side."""
    assert stats.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = stats.wilson(10, 10)
    assert high == 1.0
    assert 0.7 < low < 0.75


@pytest.mark.parametrize("degrees", [1.0, 2.0, 3.7, 10.0, 250.0])
def test_student_t_matches_the_tables(degrees):
    """The quantile agrees with scipy to seven digits, at 97.5 % and 99 %."""
    t = reference.t
    assert stats.student_t(0.975, degrees) == pytest.approx(t.ppf(0.975, degrees), rel=1e-7)
    assert stats.student_t(0.99, degrees) == pytest.approx(t.ppf(0.99, degrees), rel=1e-7)


def test_goodput_counts_attained_over_the_whole_span():
    """Ten requests, one each 100 ms, half of them late: span 0.9 + 0.12 s to the last token, 5 attained."""
    ttft = [0.1, 2.0] * 4 + [2.0, 0.1]
    found = stats.goodput_estimate(frame(ttft))
    span = max(0.1 * i + t + 0.02 for i, t in enumerate(ttft))
    assert found.value == pytest.approx(5 / span)
    assert found.low <= found.value <= found.high


def test_goodput_interval_is_the_same_for_the_same_seed():
    """Same frame and seed: same interval; another seed may differ."""
    table = frame(np.where(np.arange(200) % 3 == 0, 2.0, 0.1))
    assert stats.goodput_estimate(table, seed=5) == stats.goodput_estimate(table, seed=5)


def test_attainment_of_nothing_is_unknown():
    """No offered request: no share, no interval."""
    found = stats.attainment_estimate(0, 0)
    assert (found.value, found.low, found.high) == (None, None, None)


def test_a_run_in_which_nothing_happened_has_no_span():
    """An empty frame has span 0 and no goodput."""
    empty = frame([0.1]).clear()
    assert stats.span_s(empty) == 0.0
    assert stats.goodput_estimate(empty).value is None
    assert isinstance(empty, pl.DataFrame)
