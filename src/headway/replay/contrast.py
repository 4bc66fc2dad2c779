"""A number or a difference of two, known from a point estimate and bootstrap draws: interval and smallest effect."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.replay.stats import student_t

Floats = NDArray[np.float64]

#: The minimal detectable effect is the true change that would be called in this share of repetitions.
POWER = 0.80
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What the resampling knows about one number.

    `point` and `draws` (sorted, no NaN) are on the working scale: "log" (the log of a ratio; read out as a relative
    change, 0.05 = 5 % more) or "plain". `widen` >= 1 is the ratio of the whole standard error, with the spread
    between repeats, to the one inside runs; `degrees` are those of the Student t factor. `floor_se` is the standard
    error where equal draws show none. Nothing is read out below `least` or above `most` (a share stays in 0..1).
    """

    point: float
    draws: Floats
    scale: Literal["log", "plain"]
    widen: float = 1.0
    degrees: float = math.inf
    floor_se: float = 0.0
    least: float = -math.inf
    most: float = math.inf

    @property
    def value(self) -> float:
        """The point estimate as read out."""
        return self._out(self.point)

    @property
    def standard_error(self) -> float:
        """The whole standard error on the working scale, from the middle 95 % of the draws; inf if they are."""
        return max(_spread(self.draws) * self.widen, self.floor_se)

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """Return the interval as read out: bootstrap percentiles, widened about the point; None without draws."""
        if not len(self.draws) or math.isnan(self.point):
            return None
        tail = (1.0 - confidence) / 2.0
        stretch = self.widen * self._factor(1.0 - tail)
        low = self._stretched(_nearest(self.draws, tail), stretch)
        high = self._stretched(_nearest(self.draws, 1.0 - tail), stretch)
        # Draws that are equal, or differ by rounding alone, show less than the floor.
        half = self.floor_se * student_t(1.0 - tail, self.degrees) if self.floor_se else 0.0
        return self._out(min(low, self.point - half)), self._out(max(high, self.point + half))

    def detectable(self, confidence: float) -> float | None:
        """Return the minimal detectable effect, as read out: a true change of this size is called at 80 %."""
        if not len(self.draws) or not math.isfinite(self.standard_error):
            return None
        t = student_t(0.5 + confidence / 2.0, self.degrees)
        return self._out((t + _NORMAL.inv_cdf(POWER)) * self.standard_error)

    def _factor(self, probability: float) -> float:
        return student_t(probability, self.degrees) / _NORMAL.inv_cdf(probability)

    def _stretched(self, bound: float, stretch: float) -> float:
        if math.isinf(bound) or math.isinf(self.point):
            return bound
        return self.point + stretch * (bound - self.point)

    def _out(self, working: float) -> float:
        if self.scale == "plain":
            return min(max(working, self.least), self.most)
        return math.expm1(working) if working < 700 else math.inf


def contrast(
    point: float,
    within: Floats,
    *,
    scale: Literal["log", "plain"],
    blocks: float,
    clustered: Floats | None = None,
    repeats: int = 1,
    floor_se: float = 0.0,
    least: float = -math.inf,
    most: float = math.inf,
) -> Contrast:
    """Return the contrast from draws that resample inside repeats and, with `clustered`, over repeats as well.

    Resampling m repeats and then blocks inside them has the variance (m - 1) / m * S + W, where S is the variance of
    the mean of the repeats (noise inside them included) and W the one inside. So S = (V_clustered - W) m / (m - 1),
    and what exceeds W is the spread between repeats. `blocks` is the effective number of independent blocks inside;
    degrees of freedom by Satterthwaite from m - 1 and blocks - 1.
    """
    draws = np.sort(within[~np.isnan(within)])
    blocks = max(2.0, blocks)
    degrees = blocks - 1.0
    # A bootstrap over m independent pieces has only (m - 1) / m of the variance.
    inner = _spread(draws) ** 2 * blocks / degrees
    widen = math.sqrt(blocks / degrees)
    if clustered is not None and repeats >= 3 and math.isfinite(inner):
        outer = _spread(np.sort(clustered[~np.isnan(clustered)])) ** 2
        seen = _spread(draws) ** 2
        between = max(0.0, (outer - seen) * repeats / (repeats - 1) - inner) if math.isfinite(outer) else 0.0
        total = inner + between
        if total > 0.0:
            degrees = total**2 / (inner**2 / degrees + between**2 / (repeats - 1))
        if seen > 0.0:
            widen = math.sqrt(total / seen)
        floor_se = max(floor_se, math.sqrt(between))
    return Contrast(
        point=point,
        draws=draws,
        scale=scale,
        widen=widen,
        degrees=degrees,
        floor_se=floor_se,
        least=least,
        most=most,
    )


def _spread(draws: Floats) -> float:
    """Return the standard error of sorted draws from their middle 95 %, which a few wild draws cannot move."""
    if not len(draws):
        return math.nan
    low, high = _nearest(draws, 0.025), _nearest(draws, 0.975)
    return 0.0 if low == high else (high - low) / (2.0 * _NORMAL.inv_cdf(0.975))


def _nearest(ranked: Floats, quantile: float) -> float:
    return float(ranked[min(len(ranked) - 1, max(0, math.ceil(quantile * len(ranked) - 1e-9) - 1))])
