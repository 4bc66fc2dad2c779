"""Numbers of one run with their intervals: percentiles, attainment, goodput.

Percentiles are nearest rank (the smallest measured value with at least q * n values at or below it): every printed
percentile is a latency that a request really had, and +inf for a request that never got its token needs no
interpolation. All durations are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from headway.replay.bootstrap import block_length, block_weights, weighted_mean

Floats = NDArray[np.float64]

PERCENTILE_METHOD = "nearest rank"
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its confidence interval, and how both were made.

    `value` is None when there is nothing to measure; `low` and `high` are None when n is too small for an interval at
    this confidence. Units are those of the input.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    confidence: float = CONFIDENCE


def percentile(values: ArrayLike, quantile: float) -> float | None:
    """Return the nearest-rank percentile of `values` at 0 < `quantile` < 1; None when there are none."""
    ranked = np.sort(np.asarray(values, dtype=float))
    if not len(ranked):
        return None
    return float(ranked[_rank(len(ranked), quantile) - 1])


def percentile_estimate(
    values: ArrayLike, quantile: float, *, unserved: int = 0, confidence: float = CONFIDENCE
) -> Estimate:
    """Return a percentile with its distribution-free interval from order statistics.

    The interval (x_(l), x_(u)) covers the true percentile with at least `confidence` whatever the distribution, from
    the binomial law of the number of values below it (David and Nagaraja, Order Statistics, 7.1); it assumes
    independent requests, which a queue is not: `headway compare` resamples blocks instead. `unserved` requests
    without a value are counted as +inf (the adjusted percentile). The interval is None below the n at which order
    statistics can reach the confidence (P99 at 95 %: n = 368).
    """
    known = np.sort(np.asarray(values, dtype=float))
    n = len(known) + unserved
    note = ", unserved requests counted as +inf" if unserved else ""
    method = f"{PERCENTILE_METHOD}{note}; interval: order statistics (binomial)"
    if not n:
        return Estimate(value=None, low=None, high=None, n=0, method=method, confidence=confidence)
    ranked = np.concatenate([known, np.full(unserved, math.inf)])
    value = float(ranked[_rank(n, quantile) - 1])
    ranks = interval_ranks(n, quantile, confidence)
    if ranks is None:
        return Estimate(value=value, low=None, high=None, n=n, method=method, confidence=confidence)
    low, high = ranks
    return Estimate(
        value=value,
        low=float(ranked[low - 1]),
        high=float(ranked[high - 1]),
        n=n,
        method=method,
        confidence=confidence,
    )


def _rank(n: int, quantile: float) -> int:
    # 0.07 * 100 is 7.000000000000001 in floats, and must stay rank 7.
    return min(n, max(1, math.ceil(quantile * n - 1e-9)))


@lru_cache(maxsize=1024)
def interval_ranks(n: int, quantile: float, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Return the 1-based ranks (l, u) of the order-statistic interval, or None when n is too small.

    l is the largest rank with P(B <= l - 1) <= alpha / 2 and u the smallest with P(B >= u) <= alpha / 2, for
    B ~ Binomial(n, quantile): equal tails.
    """
    tail = (1.0 - confidence) / 2.0
    first, pmf = _binomial(n, quantile)
    below = np.cumsum(pmf)  # P(B <= first + i)
    above = np.cumsum(pmf[::-1])[::-1]  # P(B >= first + i)
    fits = np.flatnonzero(below <= tail)
    low = first + int(fits[-1]) + 1 if len(fits) else first
    fits = np.flatnonzero(above <= tail)
    high = first + int(fits[0]) if len(fits) else n + 1
    return (low, high) if low >= 1 and high <= n else None


def _binomial(n: int, p: float) -> tuple[int, Floats]:
    """Return (k0, P(B = k0 + i)) over the mean +- 12 standard deviations, outside which nothing counts."""
    reach = 12.0 * math.sqrt(n * p * (1 - p)) + 12.0
    first, last = max(0, math.floor(n * p - reach)), min(n, math.ceil(n * p + reach))
    k = np.arange(first, last)
    steps = np.log((n - k) / (k + 1.0)) + math.log(p / (1 - p))
    start = math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1)
    start += first * math.log(p) + (n - first) * math.log1p(-p)
    return first, np.exp(start + np.concatenate([[0.0], np.cumsum(steps)]))


def min_n(quantile: float, confidence: float = CONFIDENCE) -> int:
    """Return the smallest n at which `percentile_estimate` gives an interval."""
    tail = (1.0 - confidence) / 2.0
    return math.ceil(math.log(tail) / math.log(max(quantile, 1.0 - quantile)))


def wilson(successes: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson score interval of a share (Wilson 1927). `n` > 0 may be an effective, fractional one."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not leave 0 or 1 outside when nothing or everything succeeded.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def attainment_estimate(attained: int, offered: int, confidence: float = CONFIDENCE) -> Estimate:
    """Return the share of ALL offered requests that met every target, with its Wilson interval."""
    method = "share of offered requests; interval: Wilson score"
    if not offered:
        return Estimate(value=None, low=None, high=None, n=0, method=method, confidence=confidence)
    low, high = wilson(attained, offered, confidence)
    return Estimate(value=attained / offered, low=low, high=high, n=offered, method=method, confidence=confidence)


def span_s(frame: pl.DataFrame) -> float:
    """Return the seconds from the first scheduled arrival to the last event of a run (0 for an empty one)."""
    if frame.is_empty():
        return 0.0
    last = max(
        float(frame[column].max())  # type: ignore[arg-type]
        for column in ("scheduled_s", "end_s", "last_token_s")
        if frame[column].null_count() < frame.height
    )
    return last - float(frame["scheduled_s"].min())  # type: ignore[arg-type]


def goodput_estimate(
    frame: pl.DataFrame, *, seed: int = 0, draws: int = 2000, confidence: float = CONFIDENCE
) -> Estimate:
    """Return the requests per second that met every target, over `span_s`, with a moving-block bootstrap interval.

    `frame` holds `replay.record.SCHEMA`. The span is taken as fixed; what varies is which requests attained.
    """
    span = span_s(frame)
    if not span > 0:
        return Estimate(value=None, low=None, high=None, n=frame.height, method="no span", confidence=confidence)
    attained = frame.sort("scheduled_s", "index")["attained"].fill_null(False).to_numpy().astype(float)
    n = len(attained)
    length = block_length(attained)
    tail = (1.0 - confidence) / 2.0
    rate = n / span
    if attained.min() == attained.max():
        # Resampling equal values shows no spread; the binomial interval still does.
        low, high = wilson(attained.sum(), n, confidence)
        method = "attained / span; interval: Wilson score, all requests alike"
    else:
        weights = block_weights(n, length, draws, np.random.default_rng(seed))
        low, high = np.quantile(weighted_mean(weights, attained), [tail, 1.0 - tail])
        method = f"attained / span; interval: block bootstrap, {draws} draws, blocks of {length} requests"
    return Estimate(
        value=float(attained.sum()) / span,
        low=float(low) * rate,
        high=float(high) * rate,
        n=n,
        method=method,
        confidence=confidence,
    )


def student_t(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t at 0.5 <= `probability` < 1 (bisection on the exact integral's series).

    Here instead of scipy, which alone would take half of the size that the measuring part may have.
    """
    if degrees > 1e6:
        return NormalDist().inv_cdf(probability)
    target = 2.0 * (probability - 0.5)
    # P(|T| <= t) = integral of cos(u)^(degrees - 1) over 0..atan(t / sqrt(degrees)), normalised; Simpson's rule.
    scale = 2.0 / math.sqrt(math.pi) * math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))

    def inside(angle: float) -> float:
        grid = np.linspace(0.0, angle, 2001)
        y = np.cos(grid) ** (degrees - 1)
        weight = np.ones_like(y)
        weight[1:-1:2], weight[2:-1:2] = 4.0, 2.0
        return scale * float((weight * y).sum()) * angle / 2000 / 3.0

    low, high = 0.0, math.pi / 2 * (1 - 1e-12)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < target else (low, middle)
    return math.tan(high) * math.sqrt(degrees)
