"""Moving-block bootstrap over requests in order of arrival, vectorised.

Latencies of neighbouring requests depend on each other (they wait in the same queue), so resampling single requests
gives intervals that are far too narrow. Blocks of consecutive requests keep the dependence inside a block. A resample
is stored as weights (how often each request was drawn), so all metrics of both arms are computed from the same draws
and their joint distribution is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = NDArray[np.float32]

#: Fewest blocks that a resample may consist of; longer blocks than n / 8 leave nothing to resample.
MIN_BLOCKS = 8


def block_length(series: Floats) -> int:
    """Return the block length for a circular block bootstrap of `series` (one value a request, arrival order).

    Politis and White (2004) with the correction of Patton, Politis and White (2009): flat-top lag window, bandwidth
    from the first run of insignificant autocorrelations. The series is ranked first, because latencies have tails
    that make plain autocorrelations useless. Result in 1..ceil(n / 8).
    """
    n = len(series)
    if n < 4 * MIN_BLOCKS:
        return 1
    ranks = np.argsort(np.argsort(series, kind="stable"), kind="stable").astype(float)
    if np.all(series == series[0]):
        return 1
    return _politis_white(ranks)


def _politis_white(series: Floats) -> int:
    n = len(series)
    longest = math.ceil(n / MIN_BLOCKS)
    run = max(5, math.ceil(math.sqrt(math.log10(n))))
    lags = min(n - 1, 2 * (math.ceil(math.sqrt(n)) + run))
    centred = series - series.mean()
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance = np.fft.irfft(spectrum * spectrum.conj(), size)[: lags + 1] / n
    if covariance[0] <= 0:
        return 1
    small = np.abs(covariance[1:] / covariance[0]) < 2.0 * math.sqrt(math.log10(n) / n)
    # The first lag after which `run` autocorrelations in a row are insignificant.
    quiet = np.convolve(small, np.ones(run), mode="valid") == run
    found = int(np.argmax(quiet)) if quiet.any() else lags // 2
    bandwidth = min(2 * max(found, 1), lags)
    lag = np.arange(1, bandwidth + 1)
    window = np.clip(2.0 * (1.0 - lag / bandwidth), 0.0, 1.0)
    weighted = window * covariance[1 : bandwidth + 1]
    spectral = covariance[0] + 2.0 * weighted.sum()
    slope = 2.0 * (lag * weighted).sum()
    if spectral <= 0:
        return longest
    optimum = (2.0 * slope**2 / (4.0 / 3.0 * spectral**2)) ** (1.0 / 3.0) * n ** (1.0 / 3.0)
    return int(min(max(1, math.ceil(optimum)), longest))


def block_weights(n: int, length: int, draws: int, rng: np.random.Generator) -> Weights:
    """Return weights, shape (draws, n): how often each of `n` requests was drawn.

    Circular blocks of `length` consecutive requests (Politis and Romano 1992), ceil(n / length) of them a draw.
    """
    blocks = math.ceil(n / length)
    starts = rng.integers(0, n, size=(draws, blocks))
    weights = np.empty((draws, n), dtype=np.float32)
    step = max(1, 500_000 // n)  # small pieces stay in the processor's cache
    for first in range(0, draws, step):
        piece = starts[first : first + step]
        flat = (piece + np.arange(len(piece))[:, None] * n).ravel()
        counts = np.bincount(flat, minlength=len(piece) * n).reshape(len(piece), n)
        # Request i is covered by the blocks that start at i-length+1 .. i, wrapped around.
        running = np.cumsum(np.concatenate([counts[:, n - length :], counts], axis=1), axis=1)
        weights[first : first + step] = running[:, length:] - running[:, :-length]
    return weights


def effective_blocks(influence: Sequence[Floats], length: int) -> float:
    """Return how many independent blocks a statistic rests on, from the influence of every request (0 on average).

    `influence` holds one series a repeat. Their sums over blocks of `length` are weighed as by Kish: (sum |s|)^2 /
    sum s^2. A P99 that one burst decides rests on one block, however many requests there are, and resampling cannot
    see how that burst would have gone another time; few blocks mean few degrees of freedom and a wide interval. The
    form with |s| was chosen by measured coverage (bench/gate_false_alarms.py): s^2 in its place is far too wide.
    """
    sums = np.abs(np.concatenate([np.add.reduceat(each, np.arange(0, len(each), length)) for each in influence]))
    square = float((sums**2).sum())
    return float(sums.sum()) ** 2 / square if square > 0 else float(len(sums))


def keep_shares(weights: Weights, strata: NDArray[np.integer]) -> Weights:
    """Scale `weights` in place so that every stratum keeps its share of the requests in every draw; return them.

    Post-stratification: blocks are drawn over all classes together, because a burst hits all of them at once, and
    the class mix is then put back to what it was. A draw that lost a stratum altogether keeps its weights.
    """
    if len(strata) and strata.min() == strata.max():
        return weights
    for stratum in np.unique(strata):
        members = strata == stratum
        drawn = weights[:, members].sum(axis=1, keepdims=True)
        scale = np.divide(np.float32(members.sum()), drawn, out=np.ones_like(drawn), where=drawn > 0)
        weights[:, members] *= scale
    return weights


def weighted_percentiles(weights: Weights, values: Floats, quantiles: Sequence[float]) -> Floats:
    """Return the nearest-rank percentiles of every draw, shape (draws, len(quantiles)).

    `values` may hold NaN (no value: left out) and +inf (counted, at the end). A draw without values gives NaN.
    """
    known = np.flatnonzero(~np.isnan(values))
    result = np.full((len(weights), len(quantiles)), np.nan)
    if not len(known):
        return result
    order = known[np.argsort(values[known], kind="stable")]
    ranked = values[order]
    step = max(1, 250_000 // len(order))
    for first in range(0, len(weights), step):
        running = np.cumsum(np.take(weights[first : first + step], order, axis=1), axis=1)
        total = running[:, -1]
        for column, quantile in enumerate(quantiles):
            # The tolerance absorbs rounding of float32 sums; it is far below the weight of one request.
            target = total * np.float32(quantile) * np.float32(1 - 1e-6)
            place = (running >= target[:, None]).argmax(axis=1)
            result[first : first + step, column] = np.where(total > 0, ranked[place], np.nan)
    return result


def weighted_mean(weights: Weights, values: Floats) -> Floats:
    """Return the weighted mean of `values` (no NaN) in every draw, shape (draws,)."""
    total = weights.sum(axis=1, dtype=np.float64)
    return np.divide(weights @ values.astype(np.float32), total, out=np.full(len(weights), np.nan), where=total > 0)
