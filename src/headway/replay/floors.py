"""What resampling cannot see: requests that all ended alike, and a run that ended a little later."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.replay.metrics import Metric
from headway.replay.sampling import Rows
from headway.replay.stats import wilson

#: Runs whose arrivals take the same time up to this share of it follow the same schedule.
SAME_SCHEDULE = 1e-3


def share_floor(metric: Metric, points: Sequence[float | None], counts: Sequence[int]) -> float:
    """Return the standard error of a share (or a difference of two) that resampling cannot see; 0 for other metrics.

    When every request of an arm ended alike, all draws are equal, yet the true share is not known to be 0 or 1. Half
    of the Wilson interval (Newcombe 1998 for a difference) stands in.
    """
    if metric.kind != "share":
        return 0.0
    return math.sqrt(
        sum(_wilson_width(p, n) ** 2 for p, n in zip(points, counts, strict=True) if p in (0.0, 1.0) and n)
    )


def rate_floor(arms: Sequence[NDArray[np.float64]], sides: Sequence[Rows] = ()) -> float:
    """Return the standard error of the log of a rate (or of the ratio of two) that resampling cannot see.

    `arms` holds what each request adds to the rate. Two parts: where all requests of an arm attained, that of the
    share; and between two `sides` in an open loop, where the schedule sets how long a run lasts, the difference that
    only the end of the last answer makes.
    """
    total = sum(_wilson_width(1.0, len(each)) ** 2 for each in arms if len(each) and (each > 0).all())
    if len(sides) == 2:
        seconds = [float(side.seconds.sum()) for side in sides]
        windows = [side.window_s for side in sides]
        if min(*seconds, *windows) > 0 and abs(math.log(windows[1] / windows[0])) < SAME_SCHEDULE:
            total += (math.log(seconds[1] / seconds[0]) / 1.96) ** 2
    return math.sqrt(total)


def _wilson_width(share: float, n: int) -> float:
    low, high = wilson(share * n, n)
    return (high - low) / 1.96
