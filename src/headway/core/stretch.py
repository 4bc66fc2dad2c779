"""How long stretches of steps take: envelopes with a rate and a burst, which sums of steps stay under.

A promise that waits for forty steps does not meet forty slow ones: errors of single steps average out, as far as they
are not those of a host that is slow for a while. So beside the envelope of a step there are envelopes of stretches.
Whatever steps follow each other, they take at most

    rate * (sum of their means) + burst        seconds

the burstiness constraint (sigma, rho) of Cruz (1991, "A calculus for network delay, part I", section II). For a rate,

    excess_j = max(0, excess_(j-1) + seconds_j - rate * mean_j)

is the most by which a stretch that ends with step j took longer than `rate` times its mean (the recursion of Lindley
1952). The burst is the ceil((M + 1)(1 - eps))-th smallest of the last M excesses, the largest while there are too few:
about a share of eps of the steps ends a stretch that exceeds it. Excesses follow each other, so they are not
exchangeable: the share is measured, not proved. A rate says nothing as long as its excess is over what its burst was
before the step.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import NamedTuple

#: Rates that are watched. Low ones suit long stretches, high ones short ones; the least of all bounds counts.
RATES = (1.02, 1.05, 1.1, 1.2)

#: Steps that must have been seen before a burst is told: a slow spell lasts for tens of steps.
LEAST_STEPS = 256


class Line(NamedTuple):
    """Steps in a row take at most `rate` times their mean and `burst_s` seconds more."""

    rate: float
    burst_s: float


class _Rate:
    """Excesses of one rate: those of the last steps, and the same in order."""

    __slots__ = ("burst_s", "excess_s", "over_s", "rate", "recent", "sorted")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.excess_s = 0.0
        self.burst_s = math.inf
        self.over_s = -math.inf  # of the newest excess, over the burst of before it
        self.recent: deque[float] = deque()
        self.sorted: list[float] = []

    @property
    def holds(self) -> bool:
        """Whether the burst is known and the newest excess is within what it was before."""
        return self.over_s <= 0 and self.burst_s < math.inf


class Stretches:
    """Envelopes of stretches, learned step by step.

    Args:
        eps: share of steps at whose end a stretch may be over.
        window: steps that a burst is calibrated on.
    """

    __slots__ = ("_exceeded", "_given", "_rates", "eps", "over_s", "window")

    def __init__(self, eps: float, window: int) -> None:
        self.eps = eps
        self.window = window
        self.over_s = 0.0  # by how much a stretch that ends with the newest step exceeds an envelope that held so far
        self._rates = [_Rate(rate) for rate in RATES]
        self._exceeded: deque[bool] = deque(maxlen=4 * window)
        self._given: tuple[Line, ...] | None = None

    def add(self, seconds: float, mean_s: float) -> None:
        """Learn from one step that took `seconds`; its mean was `mean_s`."""
        over_s, any_over, judged = 0.0, False, False
        for each in self._rates:
            held = each.holds
            each.excess_s = max(0.0, each.excess_s + seconds - each.rate * mean_s)
            each.over_s = each.excess_s - each.burst_s
            judged = judged or each.burst_s < math.inf
            any_over = any_over or each.over_s > 0
            if held:
                over_s = max(over_s, each.over_s)
            each.recent.append(each.excess_s)
            bisect.insort(each.sorted, each.excess_s)
            if len(each.recent) > self.window:
                del each.sorted[bisect.bisect_left(each.sorted, each.recent.popleft())]
            m = len(each.sorted)
            if m >= min(LEAST_STEPS, self.window):
                each.burst_s = each.sorted[min(m, math.ceil((m + 1) * (1 - self.eps))) - 1]
        self.over_s = over_s
        if judged:
            self._exceeded.append(any_over)
        if self._rates:
            self._given = None

    def clear(self) -> None:
        """The mean has changed: what was measured against the old one says nothing about the new one."""
        self._rates = [_Rate(rate) for rate in RATES]
        self._given = None

    def fix(self, lines: tuple[Line, ...]) -> None:
        """These are known (tests, twin); nothing is learned."""
        self._rates = []
        self._given = lines

    @property
    def known(self) -> tuple[Line, ...]:
        """The envelopes that were measured, whether they hold at the moment or not."""
        if not self._rates:
            return self.lines
        return tuple([Line(each.rate, each.burst_s) for each in self._rates if each.burst_s < math.inf])

    @property
    def lines(self) -> tuple[Line, ...]:
        """The envelopes that hold at the moment."""
        if self._given is None:
            self._given = tuple([Line(each.rate, each.burst_s) for each in self._rates if each.holds])
        return self._given

    @property
    def exceeded(self) -> tuple[int, int]:
        """(steps at whose end a stretch was over the burst of any rate, steps judged) of the recent past."""
        return sum(self._exceeded), len(self._exceeded)
