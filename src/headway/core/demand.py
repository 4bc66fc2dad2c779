"""Recent demand by density and deadline, so that a test can tell what a large request would crowd out.

The density of a request is its weight over its prefill work: attained requests per second of engine time. What is
kept is the work that ARRIVED (accepted or not) in a sliding window, so the answer does not depend on past verdicts.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections import deque
from typing import Self

import numpy as np


class DemandWindow:
    """Sliding window of (arrival, density, work, TTFT target).

    Args:
        window_s: length of the window in seconds.
        min_span_s: shortest span that rates are computed over (a cold start does not extrapolate from one burst).
        limit: most arrivals that are kept.
    """

    __slots__ = ("_arrivals", "_densities", "_ttfts", "_works", "limit", "min_span_s", "start_s", "window_s")

    def __init__(self, *, window_s: float = 60.0, min_span_s: float = 10.0, limit: int = 4096) -> None:
        self.window_s = window_s
        self.min_span_s = min_span_s
        self.limit = limit
        self.start_s: float | None = None
        self._arrivals: deque[tuple[float, float, float, float]] = deque()
        self._densities = array("d")  # sorted, with the works in the same order
        self._works = array("d")
        self._ttfts = array("d")

    def add(self, now_s: float, *, work_s: float, ttft_s: float | None, weight: float = 1.0) -> None:
        """Record an arrival of `work_s` seconds of prefill and forget what has left the window.

        `ttft_s` is its target. What has none (None) is served behind all that has one until its patience is nearly
        over: nobody has to go for it, so it is no demand.
        """
        if self.start_s is None:
            self.start_s = now_s
        if ttft_s is not None:
            work_s = max(work_s, 1e-6)
            density = weight / work_s
            at = bisect.bisect_right(self._densities, density)
            self._densities.insert(at, density)
            self._works.insert(at, work_s)
            self._ttfts.insert(at, ttft_s)
            self._arrivals.append((now_s, density, work_s, ttft_s))
        while self._arrivals and (self._arrivals[0][0] < now_s - self.window_s or len(self._arrivals) > self.limit):
            _, old, old_work, old_ttft = self._arrivals.popleft()
            at = bisect.bisect_left(self._densities, old)
            while self._works[at] != old_work or self._ttfts[at] != old_ttft:
                at += 1
            del self._densities[at], self._works[at], self._ttfts[at]

    def denser(self, now_s: float, density: float) -> float:
        """Return the demand denser than `density`: seconds of prefill work arriving a second (0 when unknown)."""
        if self.start_s is None or not self._arrivals:
            return 0.0
        at = bisect.bisect_right(self._densities, density)
        return float(np.add.reduce(np.frombuffer(self._works)[at:])) / self._span_s(now_s)

    def ahead_s(self, now_s: float, density: float, horizon_s: float) -> float:
        """Return the denser work, in seconds, that is expected to arrive AND be due within `horizon_s` from now.

        That is the interference of later arrivals with earlier deadlines: those of target t arrive during
        horizon - t seconds. Requests of the same or a longer target than the horizon do not count.
        """
        if self.start_s is None or not self._arrivals:
            return 0.0
        at = bisect.bisect_right(self._densities, density)
        window = np.maximum(horizon_s - np.frombuffer(self._ttfts)[at:], 0.0)
        return float(np.frombuffer(self._works)[at:] @ window) / self._span_s(now_s)

    def shorter(self, ttft_s: float | None) -> Self:
        """Return the part of the window whose target is shorter than `ttft_s`, to be read only."""
        part = type(self)(window_s=self.window_s, min_span_s=self.min_span_s, limit=self.limit)
        part.start_s, part._arrivals = self.start_s, self._arrivals
        chosen = np.frombuffer(self._ttfts) < (math.inf if ttft_s is None else ttft_s)
        for name in ("_densities", "_works", "_ttfts"):
            getattr(part, name).frombytes(np.frombuffer(getattr(self, name))[chosen].tobytes())
        return part

    def _span_s(self, now_s: float) -> float:
        """Seconds that the kept arrivals stand for."""
        assert self.start_s is not None
        span = min(self.window_s, max(now_s - self.start_s, self.min_span_s))
        if len(self._arrivals) >= self.limit:
            span = min(span, max(now_s - self._arrivals[0][0], 1e-3))
        return span

    def __len__(self) -> int:
        return len(self._arrivals)
