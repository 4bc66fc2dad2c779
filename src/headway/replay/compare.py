"""Compare two arms of runs: paired where the trace is the same, block bootstrap, a verdict for each metric.

Method, as printed: moving blocks of consecutive arrivals are resampled inside every repeat (both arms with the same
draws where rows are paired), class shares are kept, and with three or more repeats an arm the spread between repeats
is added by a cluster bootstrap. Latencies and rates are compared by the log of their ratio, shares by their
difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from headway.replay import arms as arms_
from headway.replay import metrics as metrics_
from headway.replay.arms import Arm, Level
from headway.replay.bootstrap import (
    block_length,
    block_weights,
    effective_blocks,
    keep_shares,
    weighted_mean,
    weighted_percentiles,
)
from headway.replay.contrast import Contrast, contrast
from headway.replay.metrics import Metric
from headway.replay.noise import NoiseFloor
from headway.replay.stats import CONFIDENCE, min_n, percentile, span_s, wilson

Floats = NDArray[np.float64]

BETTER, WORSE = "better", "worse"
NO_DIFFERENCE = "no difference at this n"
CANNOT_TELL = "cannot tell at this n"

DRAWS = 2000
#: Largest number of weights held at once: draws are made in pieces of this size (4 bytes each).
_WEIGHTS_AT_ONCE = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One metric of one arm: its value, how many requests have it, out of how many offered."""

    value: float | None
    n: int
    offered: int
    contrast: Contrast | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric, one class (None: all requests), both arms.

    `relative` reads out other / base - 1, `difference` other - base; either is None where it is undefined.
    `confidence` is the one behind the verdict. `floor` is the noise floor on the working scale, if one was given.
    """

    metric: Metric
    slo_class: str | None
    base: Side
    other: Side
    relative: Contrast | None
    difference: Contrast | None
    confidence: float
    too_small: str | None = None  # why the sample cannot carry an interval
    floor: float | None = None

    @property
    def main(self) -> Contrast | None:
        """The contrast that the verdict uses: the difference for shares, the relative change for the rest."""
        return self.difference if self.metric.kind == "share" else self.relative

    @property
    def verdict(self) -> str:
        """Better, worse, no difference at this n, or cannot tell at this n."""
        main = self.main
        bounds = main.interval(self.confidence) if main is not None and self.too_small is None else None
        if main is None or bounds is None:
            return CANNOT_TELL
        low, high = bounds
        if low <= 0.0 <= high or self.under_floor:
            return NO_DIFFERENCE
        return BETTER if (high < 0.0) == self.metric.lower_is_better else WORSE

    @property
    def under_floor(self) -> bool:
        """Whether a noise floor was given and the change does not exceed it."""
        return self.floor is not None and self.main is not None and abs(self.main.point) <= self.floor


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """All changes at one load level."""

    level: Level
    blocks: tuple[int, int]  # block length of each arm, requests
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def together(self) -> str:
        """The verdict on P99 TTFT and P99 TPOT together."""
        verdicts = {
            change.metric.name: change.verdict
            for change in self.changes
            if change.slo_class is None and change.metric.name in metrics_.PRIMARY
        }
        found = set(verdicts.values())
        if {BETTER, WORSE} <= found:
            traded = [next(name for name, v in verdicts.items() if v == which) for which in (BETTER, WORSE)]
            return f"traded: {traded[0]} better, {traded[1]} worse"
        for verdict in (WORSE, BETTER):
            if verdict in found:
                return verdict
        return CANNOT_TELL if CANNOT_TELL in found or not found else NO_DIFFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything about one arm against the baseline."""

    base: Arm
    other: Arm
    levels: tuple[LevelResult, ...]
    draws: int
    seed: int


def compare(
    base: Arm,
    other: Arm,
    *,
    names: Sequence[str] = metrics_.DEFAULT,
    draws: int = DRAWS,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    floor: NoiseFloor | None = None,
) -> Comparison:
    """Return the comparison of `other` with the baseline `base`, level by level and class by class.

    `names` are metric names (`metrics.known()`). With a noise `floor` nothing under it is called, and a metric that
    it does not know is not called at all. The verdicts on P99 TTFT and P99 TPOT are taken together, each at
    1 - (1 - confidence) / 2 (Bonferroni); every other interval stands alone at `confidence`. Raises `InputError` as
    `arms.levels` does and for an unknown metric.
    """
    wanted = [metrics_.parse(name) for name in dict.fromkeys(names)]
    results = tuple(
        _compare_level(
            level,
            wanted,
            draws,
            seed + number,
            confidence,
            floor.working(len(level.base), len(level.other)) if floor is not None else None,
        )
        for number, level in enumerate(arms_.levels(base, other))
    )
    return Comparison(base=base, other=other, levels=results, draws=draws, seed=seed)


class _Side:
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

    def values(self, metric: Metric) -> Floats:
        return metrics_.values(metric, self.frame)

    def weights(self, draws: int, block: int, rng: np.random.Generator) -> NDArray[np.float32]:
        parts = []
        for repeat, size in enumerate(self.sizes):
            part = block_weights(size, min(block, size), draws, rng)
            parts.append(keep_shares(part, self.codes[self.repeat == repeat]))
        return np.concatenate(parts, axis=1)


def _block(series: Sequence[Sequence[Floats]]) -> int:
    """Return the longest over columns of the median over repeats of the block length."""
    return max(int(np.median([block_length(each) for each in column])) for column in series)


def _blocks(level: Level) -> tuple[int, int]:
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


def _compare_level(
    level: Level,
    wanted: Sequence[Metric],
    draws: int,
    seed: int,
    confidence: float,
    floors: Mapping[str, float] | None,
) -> LevelResult:
    base, other = _Side(level.base), _Side(level.other)
    notes = list(level.notes)
    wanted = [metric for metric in wanted if _told(metric, base, other, notes)]
    blocks = _blocks(level)
    repeats = min(len(base.sizes), len(other.sizes))
    notes += _repeat_notes(repeats)
    sections: list[tuple[str | None, tuple[NDArray, NDArray]]] = [
        (None, (np.ones(len(base.codes), bool), np.ones(len(other.codes), bool)))
    ]
    if len(base.members) > 1:
        sections += [(name, (base.members[name], other.members[name])) for name in base.members]

    inner: dict[tuple, list[Floats]] = {}
    outer: dict[tuple, list[Floats]] = {}
    rng = np.random.default_rng(seed)
    for weights in _pieces(level, base, other, blocks, draws, rng):
        _collect(inner, weights, (base, other), sections, wanted)
        if repeats >= 3:
            _collect(
                outer,
                _resample_repeats(weights, (base, other), level.paired, rng),
                (base, other),
                sections,
                wanted,
            )

    changes = []
    for name, masks in sections:
        for metric in wanted:
            key = (name, metric.name)
            drawn = tuple(np.concatenate(inner[(*key, arm)]) for arm in (0, 1))
            clustered = tuple(np.concatenate(outer[(*key, arm)]) for arm in (0, 1)) if outer else None
            changes.append(
                _change(
                    metric,
                    name,
                    (base, other),
                    masks,
                    drawn,
                    clustered,
                    level.paired,
                    blocks,
                    repeats,
                    confidence,
                    floors,
                )
            )
    notes += _survivor_notes(changes)
    return LevelResult(level=level, blocks=blocks, changes=tuple(changes), notes=tuple(notes))


def _told(metric: Metric, base: _Side, other: _Side, notes: list[str]) -> bool:
    """Say whether a server-told metric can be compared at all; note why not."""
    if metric.column not in ("queue", "compute"):
        return True
    silent = [
        name
        for name, side in (("baseline", base), ("candidate", other))
        if side.frame["queue_s"].is_null().all()
    ]
    if (
        silent
        and (note := f"queue and compute time left out: not told by the server of the {' and '.join(silent)}")
        not in notes
    ):
        notes.append(note)
    return not silent


def _repeat_notes(repeats: int) -> list[str]:
    if repeats >= 3:
        return [f"{repeats} repeats an arm or more: the spread between repeats is in the intervals"]
    return [
        f"{repeats} repeat(s) an arm: intervals cover the noise inside a run only; "
        "three repeats, or a noise floor from --aa, cover the machine's too"
    ]


def _pieces(
    level: Level, base: _Side, other: _Side, blocks: tuple[int, int], draws: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    step = max(1, min(draws, _WEIGHTS_AT_ONCE // max(len(base.codes), len(other.codes))))
    for first in range(0, draws, step):
        size = min(step, draws - first)
        left = base.weights(size, blocks[0], rng)
        yield left, (left if level.paired else other.weights(size, blocks[1], rng))


def _resample_repeats(
    weights: tuple[NDArray[np.float32], NDArray[np.float32]],
    sides: tuple[_Side, _Side],
    paired: bool,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    def one(weight: NDArray[np.float32], side: _Side) -> NDArray[np.float32]:
        m = len(side.sizes)
        times = rng.multinomial(m, [1.0 / m] * m, size=len(weight)).astype(np.float32)
        return weight * times[:, side.repeat]

    left = one(weights[0], sides[0])
    return left, (left if paired else one(weights[1], sides[1]))


def _collect(
    into: dict[tuple, list[Floats]],
    weights: tuple[NDArray[np.float32], NDArray[np.float32]],
    sides: tuple[_Side, _Side],
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


def _change(
    metric: Metric,
    name: str | None,
    sides: tuple[_Side, _Side],
    masks: tuple[NDArray, NDArray],
    drawn: tuple[Floats, Floats],
    clustered: tuple[Floats, Floats] | None,
    paired: bool,
    lengths: tuple[int, int],
    repeats: int,
    confidence: float,
    floors: Mapping[str, float] | None,
) -> Change:
    points, counts, offered, influences = [], [], [], []
    for side, mask in zip(sides, masks, strict=True):
        each = np.where(mask, side.values(metric), np.nan)
        known = each[~np.isnan(each)]
        points.append(_point(metric, known, float(side.seconds.sum())))
        counts.append(len(known))
        offered.append(int(mask.sum()))
        influences.append(_influence(metric, each, points[-1]))
    needed = min_n(metric.quantile, confidence) if metric.quantile else 1
    too_small = None
    if min(counts) < needed:
        too_small = f"n = {min(counts)}, at least {needed} needed"
    own = [
        effective_blocks(np.split(influence, np.cumsum(side.sizes)[:-1]), length)
        for influence, side, length in zip(influences, sides, lengths, strict=True)
    ]
    if paired:
        change = influences[1] - influences[0]
        blocks = effective_blocks(np.split(change, np.cumsum(sides[0].sizes)[:-1]), lengths[0])
    else:
        blocks = min(own)
    made = []
    for arm in (0, 1):
        outer = clustered[arm] if clustered else None
        made.append(_own(metric, points[arm], counts[arm], drawn[arm], outer, own[arm], repeats))
    relative = difference = None
    if points[0] is not None and points[1] is not None:
        common = {"blocks": blocks, "repeats": repeats}
        floor_se = _share_floor(metric, points, counts)
        difference = contrast(
            _minus(points[1], points[0]),
            _subtract(drawn[1], drawn[0]),
            scale="plain",
            clustered=_subtract(clustered[1], clustered[0]) if clustered else None,
            floor_se=floor_se,
            **common,
        )
        if points[0] > 0:
            relative = contrast(
                _log(points[1]) - _log(points[0]) if points[0] != points[1] else 0.0,
                _log_ratio(drawn[1], drawn[0]),
                scale="log",
                clustered=_log_ratio(clustered[1], clustered[0]) if clustered else None,
                floor_se=floor_se / points[0] if math.isfinite(points[0]) else 0.0,
                **common,
            )
    floor = None
    if floors is not None:
        floor = floors.get(metric.name if name is None else f"{name}:{metric.name}", math.inf)
    primary = name is None and metric.name in metrics_.PRIMARY
    return Change(
        metric=metric,
        slo_class=name,
        base=Side(value=points[0], n=counts[0], offered=offered[0], contrast=made[0]),
        other=Side(value=points[1], n=counts[1], offered=offered[1], contrast=made[1]),
        relative=relative,
        difference=difference,
        confidence=1.0 - (1.0 - confidence) / 2.0 if primary else confidence,
        too_small=too_small,
        floor=floor,
    )


def _influence(metric: Metric, each: Floats, point: float | None) -> Floats:
    """Return what each request adds to the error of the metric, up to a factor; 0 where it has no value."""
    known = ~np.isnan(each)
    if point is None:
        return np.zeros(len(each))
    effect = (each >= point).astype(float) if metric.kind == "percentile" else each
    return np.where(known, effect - effect[known].mean(), 0.0)


def _point(metric: Metric, known: Floats, seconds: float) -> float | None:
    if not len(known):
        return None
    if metric.quantile is not None:
        return percentile(known, metric.quantile)
    if metric.kind == "share":
        return float(known.mean())
    return float(known.sum()) / seconds if seconds > 0 else None


def _own(
    metric: Metric,
    point: float | None,
    n: int,
    drawn: Floats,
    clustered: Floats | None,
    blocks: float,
    repeats: int,
) -> Contrast | None:
    """Return the contrast of one arm's value with nothing: its own interval."""
    if point is None:
        return None
    floor = _share_floor(metric, [point], [n])
    return contrast(
        point,
        drawn,
        scale="plain",
        blocks=blocks,
        clustered=clustered,
        repeats=repeats,
        floor_se=floor,
        least=0.0,
        most=1.0 if metric.kind == "share" else math.inf,
    )


def _share_floor(metric: Metric, points: Sequence[float | None], counts: Sequence[int]) -> float:
    """Return the standard error of a share (or a difference of two) that resampling cannot see.

    When every request of an arm ended alike, all draws are equal, yet the true share is not known to be 0 or 1. Half
    of the Wilson interval (Newcombe 1998 for a difference) stands in.
    """
    if metric.kind != "share":
        return 0.0
    total = 0.0
    for point, n in zip(points, counts, strict=True):
        if point in (0.0, 1.0) and n:
            low, high = wilson(point * n, n)
            total += ((high - low) / 1.96) ** 2
    return math.sqrt(total)


def _minus(one: float, two: float) -> float:
    return 0.0 if one == two else one - two  # inf - inf: both arms left that many requests unserved


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _subtract(one: Floats, two: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.where(one == two, 0.0, one - two)


def _log_ratio(one: Floats, two: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.log(one) - np.log(two)
    return np.where(one == two, 0.0, ratio)


def _survivor_notes(changes: Sequence[Change]) -> list[str]:
    """Return a warning where the arms served different shares, so that plain percentiles compare survivors."""
    notes = []
    for change in changes:
        if change.metric.name not in ("refused", "failed") or change.verdict not in (BETTER, WORSE):
            continue
        where = f"class {change.slo_class}: " if change.slo_class else ""
        notes.append(
            f"{where}{change.metric.name} {change.base.value:.1%} against {change.other.value:.1%}: plain percentiles "
            "compare different requests; judge by attainment, or by p99_ttft_adjusted (unserved = +inf)"
        )
    return notes
