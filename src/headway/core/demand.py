"""Recent demand by density, so that a test can tell what a large request would crowd out.

The density of a request is its weight over its prefill work: attained requests per second of engine time. What is
kept is the work that ARRIVED (accepted or not) in a sliding window, so the answer does not depend on past verdicts.
"""

from __future__ import annotations

import bisect
from array import array
from collections import deque

import numpy as np


class DemandWindow:
    """Sliding window of (arrival, density, work).

    Args:
        window_s: length of the window in seconds.
        min_span_s: shortest span that rates are computed over (a cold start does not extrapolate from one burst).
        limit: most arrivals that are kept.
    """

    __slots__ = ("_arrivals", "_densities", "_works", "limit", "min_span_s", "start_s", "window_s")

    def __init__(self, *, window_s: float = 60.0, min_span_s: float = 10.0, limit: int = 4096) -> None:
        self.window_s = window_s
        self.min_span_s = min_span_s
        self.limit = limit
        self.start_s: float | None = None
        self._arrivals: deque[tuple[float, float, float]] = deque()
        self._densities = array("d")  # sorted, with the works in the same order
        self._works = array("d")

    def add(self, now_s: float, *, work_s: float, weight: float = 1.0) -> None:
        """Record an arrival of `work_s` seconds of prefill and forget what has left the window."""
        if self.start_s is None:
            self.start_s = now_s
        work_s = max(work_s, 1e-6)
        density = weight / work_s
        at = bisect.bisect_right(self._densities, density)
        self._densities.insert(at, density)
        self._works.insert(at, work_s)
        self._arrivals.append((now_s, density, work_s))
        while self._arrivals and (self._arrivals[0][0] < now_s - self.window_s or len(self._arrivals) > self.limit):
            _, old, old_work = self._arrivals.popleft()
            at = bisect.bisect_left(self._densities, old)
            while self._works[at] != old_work:
                at += 1
            del self._densities[at], self._works[at]

    def denser(self, now_s: float, density: float) -> float:
        """Return the demand denser than `density`: seconds of prefill work arriving a second (0 when unknown)."""
        if self.start_s is None or not self._arrivals:
            return 0.0
        span = min(self.window_s, max(now_s - self.start_s, self.min_span_s))
        if len(self._arrivals) >= self.limit:
            span = min(span, max(now_s - self._arrivals[0][0], 1e-3))
        at = bisect.bisect_right(self._densities, density)
        return float(np.frombuffer(self._works)[at:].sum()) / span

    def __len__(self) -> int:
        return len(self._arrivals)
