"""How long a first token takes from the engine's step to the client's socket: detokenise, IPC, HTTP."""

from __future__ import annotations

import bisect
import math
from collections import deque


class Front:
    """Nearest-rank quantile of the recent fronts, so that deadlines leave as much room as is really needed.

    Args:
        share: quantile.
        window: fronts that are remembered.
        least: fronts that must have been seen before there is an estimate.
    """

    __slots__ = ("_order", "_sorted", "least", "share", "window")

    def __init__(self, *, share: float = 0.9, window: int = 128, least: int = 8) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share = {share!r}: expected a share in (0, 1]")
        if not 1 <= least <= window:
            raise ValueError(f"least = {least!r}: expected a number from 1 to the window, {window!r}")
        self.share = share
        self.window = window
        self.least = least
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Remember one front in seconds; a clock that stepped back counts as 0."""
        seconds = max(0.0, seconds)
        self._order.append(seconds)
        bisect.insort(self._sorted, seconds)
        if len(self._order) > self.window:
            del self._sorted[bisect.bisect_left(self._sorted, self._order.popleft())]

    @property
    def seconds(self) -> float | None:
        """The estimate in seconds; None when too few were seen."""
        if len(self._sorted) < self.least:
            return None
        return self._sorted[math.ceil(self.share * len(self._sorted)) - 1]
