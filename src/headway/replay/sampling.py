"""Resample both arms of one load level: every metric of both arms from the same draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from headway.replay import arms as arms_
from headway.replay import metrics as metrics_
from headway.replay.arms import Level
from headway.replay.bootstrap import (
    block_length,
    block_weights,
    keep_shares,
    weighted_mean,
    weighted_percentiles,
)
from headway.replay.metrics import Metric
from headway.replay.stats import span_s

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
#: (class or None for all, rows of each arm that belong to it)
Section = tuple[str | None, tuple[Mask, Mask]]
#: (class, metric name, arm 0 or 1) -> the statistic in every draw
Drawn = dict[tuple[str | None, str, int], Floats]

#: Largest number of weights held at once: draws are made in pieces of this size (4 bytes each).
_WEIGHTS_AT_ONCE = 20_000_000


class Rows:
    """The rows of one arm at one level, pooled over repeats, with what resampling needs."""

    def __init__(self, frames: Sequence[pl.DataFrame]) -> None:
        self.frame = pl.concat(frames)
        self.repeat = np.repeat(np.arange(len(frames)), [frame.height for frame in frames])
        self.sizes = [frame.height for frame in frames]
        names = arms_.classes(frames)
        column = self.frame["slo_class"].fill_null("default")
        self.members = {name: (column == name).to_numpy() for name in names}
        self.codes = np.searchsorted(names, column.to_numpy())
        # Seconds of the run that stand behind each row, so that rates survive the resampling of repeats.
        self.seconds = np.repeat([span_s(frame) / frame.height for frame in frames], self.sizes)
        # First to last scheduled arrival, all repeats together.
        self.window_s = sum(float(frame["scheduled_s"].max() - frame["scheduled_s"].min()) for frame in frames)

    def values(self, metric: Metric) -> Floats:
        """Return `metrics.values` over all rows."""
        return metrics_.values(metric, self.frame)

    def weights(self, draws: int, block: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return weights of shape (draws, rows), every repeat resampled on its own."""
        parts = []
        for repeat, size in enumerate(self.sizes):
            part = block_weights(size, min(block, size), draws, rng)
            parts.append(keep_shares(part, self.codes[self.repeat == repeat]))
        return np.concatenate(parts, axis=1)


def _block(series: Sequence[Sequence[Floats]]) -> int:
    """Return the longest over columns of the median over repeats of the block length."""
    return max(int(np.median([block_length(each) for each in column])) for column in series)


def block_lengths(level: Level) -> tuple[int, int]:
    """Return the block length of each arm, from TTFT and TPOT; an unserved request ranks last.

    Paired rows are drawn together, so both arms share one length: the longest memory of either and of their
    difference.
    """

    def read(frame: pl.DataFrame, column: str) -> Floats:
        return frame[column].fill_null(math.inf).to_numpy()

    columns = ("ttft_s", "tpot_s")
    own = [
        _block([[read(frame, column) for frame in frames] for column in columns])
        for frames in (level.base, level.other)
    ]
    if not level.paired:
        return own[0], own[1]
    pairs = list(zip(level.base, level.other, strict=True))
    change = _block([[_rank_change(read(a, c), read(b, c)) for a, b in pairs] for c in columns])
    longest = max(*own, change)
    return longest, longest


def _rank_change(base: Floats, other: Floats) -> Floats:
    """Return other - base in ranks of both together: unserved requests stay finite, tails lose their weight."""
    ranks = np.argsort(np.argsort(np.concatenate([base, other]), kind="stable"), kind="stable").astype(float)
    return ranks[len(base) :] - ranks[: len(base)]


def sections(base: Rows, other: Rows) -> list[Section]:
    """Return the whole and, with more than one class, every class."""
    found: list[Section] = [(None, (np.ones(len(base.codes), bool), np.ones(len(other.codes), bool)))]
    if len(base.members) > 1:
        found += [(name, (base.members[name], other.members[name])) for name in base.members]
    return found


def draw(
    level: Level,
    sides: tuple[Rows, Rows],
    parts: Sequence[Section],
    wanted: Sequence[Metric],
    lengths: tuple[int, int],
    draws: int,
    rng: np.random.Generator,
) -> tuple[Drawn, Drawn | None]:
    """Return all draws resampled inside repeats, and over repeats as well where each arm has three or more."""
    inner: dict = {}
    outer: dict = {}
    clustered = min(len(side.sizes) for side in sides) >= 3
    for weights in _pieces(level, *sides, lengths, draws, rng):
        _collect(inner, weights, sides, parts, wanted)
        if clustered:
            _collect(outer, _resample_repeats(weights, sides, level.paired, rng), sides, parts, wanted)
    joined = tuple({key: np.concatenate(pieces) for key, pieces in into.items()} for into in (inner, outer))
    return joined[0], joined[1] if clustered else None


def _pieces(
    level: Level, base: Rows, other: Rows, blocks: tuple[int, int], draws: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    step = max(1, min(draws, _WEIGHTS_AT_ONCE // max(len(base.codes), len(other.codes))))
    for first in range(0, draws, step):
        size = min(step, draws - first)
        left = base.weights(size, blocks[0], rng)
        yield left, (left if level.paired else other.weights(size, blocks[1], rng))


def _resample_repeats(
    weights: tuple[NDArray[np.float32], NDArray[np.float32]],
    sides: tuple[Rows, Rows],
    paired: bool,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    def one(weight: NDArray[np.float32], side: Rows) -> NDArray[np.float32]:
        m = len(side.sizes)
        times = rng.multinomial(m, [1.0 / m] * m, size=len(weight)).astype(np.float32)
        return weight * times[:, side.repeat]

    left = one(weights[0], sides[0])
    return left, (left if paired else one(weights[1], sides[1]))


def _collect(
    into: dict[tuple, list[Floats]],
    weights: tuple[NDArray[np.float32], NDArray[np.float32]],
    sides: tuple[Rows, Rows],
    sections: Sequence[tuple[str | None, tuple[NDArray, NDArray]]],
    wanted: Sequence[Metric],
) -> None:
    """Append the statistic of every draw for (section, metric, arm)."""
    percentiles: dict[tuple[str, bool], list[Metric]] = {}
    for metric in wanted:
        if metric.kind == "percentile":
            percentiles.setdefault((metric.column, metric.adjusted), []).append(metric)
    for name, masks in sections:
        for arm, side in enumerate(sides):
            mask = masks[arm]
            weight = weights[arm] if mask.all() else weights[arm][:, mask]
            for group in percentiles.values():
                drawn = weighted_percentiles(
                    weight, side.values(group[0])[mask], [metric.quantile or 0.5 for metric in group]
                )
                for column, metric in enumerate(group):
                    into.setdefault((name, metric.name, arm), []).append(drawn[:, column])
            for metric in wanted:
                if metric.kind == "percentile":
                    continue
                drawn = weighted_mean(weight, side.values(metric)[mask])
                if metric.kind == "rate":
                    # Only the whole run has a span: a class's rate is its share of it.
                    share = mask.sum() / len(mask)
                    drawn = drawn * share / weighted_mean(weights[arm], side.seconds)
                into.setdefault((name, metric.name, arm), []).append(drawn)
