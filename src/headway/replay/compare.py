"""Compare two arms of runs: paired where the trace is the same, block bootstrap, a verdict for each metric.

Method, as printed: moving blocks of consecutive arrivals are resampled inside every repeat (both arms with the same
draws where rows are paired), class shares are kept, and with three or more repeats an arm the spread between repeats
is added by a cluster bootstrap. Latencies and rates are compared by the log of their ratio, shares by their
difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.replay import arms as arms_
from headway.replay import metrics as metrics_
from headway.replay.arms import Arm, Level
from headway.replay.bootstrap import effective_blocks
from headway.replay.contrast import Contrast, contrast
from headway.replay.floors import rate_floor, share_floor
from headway.replay.metrics import Metric
from headway.replay.noise import NoiseFloor
from headway.replay.sampling import Rows, block_lengths, draw, sections
from headway.replay.stats import CONFIDENCE, min_n, percentile

Floats = NDArray[np.float64]

BETTER, WORSE = "better", "worse"
NO_DIFFERENCE = "no difference at this n"
CANNOT_TELL = "cannot tell at this n"

DRAWS = 2000


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


def _compare_level(
    level: Level,
    wanted: Sequence[Metric],
    draws: int,
    seed: int,
    confidence: float,
    floors: Mapping[str, float] | None,
) -> LevelResult:
    base, other = Rows(level.base), Rows(level.other)
    notes = list(level.notes)
    wanted = [metric for metric in wanted if _told(metric, base, other, notes)]
    lengths = block_lengths(level)
    repeats = min(len(base.sizes), len(other.sizes))
    notes += _repeat_notes(repeats)
    parts = sections(base, other)
    rng = np.random.default_rng(seed)
    inner, outer = draw(level, (base, other), parts, wanted, lengths, draws, rng)
    changes = []
    for name, masks in parts:
        for metric in wanted:
            drawn = (inner[name, metric.name, 0], inner[name, metric.name, 1])
            over = (outer[name, metric.name, 0], outer[name, metric.name, 1]) if outer else None
            changes.append(
                _change(
                    metric,
                    name,
                    (base, other),
                    masks,
                    drawn,
                    over,
                    level.paired,
                    lengths,
                    repeats,
                    confidence,
                    floors,
                )
            )
    notes += _survivor_notes(changes)
    return LevelResult(level=level, blocks=lengths, changes=tuple(changes), notes=tuple(notes))


def _told(metric: Metric, base: Rows, other: Rows, notes: list[str]) -> bool:
    """Say whether a server-told metric can be compared at all; note why not."""
    if metric.column not in ("queue", "compute"):
        return True
    silent = [
        name for name, side in (("baseline", base), ("candidate", other)) if side.frame["queue_s"].is_null().all()
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


def _change(
    metric: Metric,
    name: str | None,
    sides: tuple[Rows, Rows],
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
        each = sides[arm].values(metric)[masks[arm]]
        made.append(_own(metric, points[arm], each, drawn[arm], outer, own[arm], repeats))
    relative = difference = None
    if points[0] is not None and points[1] is not None:
        common = {"blocks": blocks, "repeats": repeats}
        floor_se = share_floor(metric, points, counts)
        log_floor = floor_se / points[0] if points[0] > 0 and math.isfinite(points[0]) else 0.0
        if metric.kind == "rate" and min(points) > 0:
            log_floor = rate_floor([side.values(metric)[mask] for side, mask in zip(sides, masks, strict=True)], sides)
            floor_se = log_floor * min(points)
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
                floor_se=log_floor,
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
    each: Floats,
    drawn: Floats,
    clustered: Floats | None,
    blocks: float,
    repeats: int,
) -> Contrast | None:
    """Return the contrast of one arm's value with nothing: its own interval."""
    if point is None:
        return None
    floor = share_floor(metric, [point], [int((~np.isnan(each)).sum())])
    if metric.kind == "rate":
        floor = point * rate_floor([each])
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
