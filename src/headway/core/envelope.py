"""How far steps may exceed their mean: split conformal, and what happens when it stops being true.

The envelope at 1 - eps (Lei et al. 2018, section 2): of the last M ratios measured / predicted, each scored by the fit
of before its step, the ceil((M + 1)(1 - eps))-th smallest scales the mean. When steps are exchangeable, a coming step
exceeds it with probability a / (M + 1), a = M + 1 - rank, which is at most eps as soon as M >= 1 / eps - 1.

The drift test. Of m coming steps a beta-binomial(m, a, M + 1 - a) number exceed a factor that was calibrated on M
(Vovk 2012, proposition 2b): the band. At every exceedance the last 16 and the last 64 steps are counted, and a count
whose tail probability is at most ALARM / 2 = 5e-5 is drift. One look at steps that have not changed therefore says
"drift" with a probability of at most 1e-4, and looks are only at exceedances, a share eps of the steps.

Then promises tighten at once: the window is cut to the most recent steps, the factor may not fall below what it was,
and the mean is scaled when seven in eight recent steps are longer (`StepCost`). That ends when the last 64 steps exceed
no more often than they do half of the time.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

#: Steps that the drift test counts exceedances in.
SPANS = (16, 64)

#: Probability that one look at steps without drift finds drift.
ALARM = 1e-4

#: Steps that the envelope is calibrated on right after drift was found.
FRESH = 16

#: Largest envelope / mean. When single steps err by more than this, no step size can be promised, and sizing every
#: step for the worst stall would refuse nearly everybody; the measured exceedance shows that promises are at risk.
FACTOR_LIMIT = 2.0

#: Envelope / mean until enough steps are seen.
FACTOR_UNKNOWN = 1.25

#: A ratio that is over the factor by less is rounding of the fit, not a step over its envelope.
_ROUNDING = 1.0 + 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The exceedance of one regime left its band (`tightened`) or came back into it."""

    regime: str
    tightened: bool
    exceeded: int  # of `judged` recent steps
    judged: int
    limit: int  # exceedances of as many steps that are still within the band
    factor_before: float
    factor: float
    level: float  # what the mean was scaled by


@lru_cache(maxsize=65_536)
def tail(count: int, m: int, above: int, calibrated: int) -> float:
    """Return the probability that at least `count` of `m` steps exceed the `above`-th largest of `calibrated` steps.

    The survival function of the beta-binomial(m, above, calibrated + 1 - above).
    """
    a, b = above, calibrated + 1 - above
    base = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    def log_probability(k: int) -> float:
        choose = math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1)
        return choose + math.lgamma(k + a) + math.lgamma(m - k + b) - math.lgamma(m + a + b) - base

    return min(1.0, math.fsum(math.exp(log_probability(k)) for k in range(count, m + 1)))


class Envelope:
    """Envelope / mean of one kind of step.

    Attributes:
        factor: envelope / mean.
        drifting: the exceedance left its band and is not back yet.
    """

    __slots__ = ("_exceeded", "_floor", "_judged_since", "_ratios", "_sorted", "drifting", "eps", "factor", "window")

    def __init__(self, eps: float, window: int) -> None:
        self.eps = eps
        self.window = window
        self.factor = FACTOR_UNKNOWN
        self.drifting = False
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []
        self._exceeded: deque[bool] = deque(maxlen=4 * window)
        self._judged_since = 0  # steps judged since the drift test started over
        self._floor = 1.0

    def add(self, ratio: float) -> bool:
        """Judge a step by the present factor, then learn from it; return whether it exceeded its envelope."""
        over = ratio > self.factor * _ROUNDING
        self._exceeded.append(over)
        self._judged_since += 1
        self._ratios.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self._ratios) > self.window:
            del self._sorted[bisect.bisect_left(self._sorted, self._ratios.popleft())]
        self._update()
        return over

    def left_band(self) -> tuple[int, int, int] | None:
        """Return (exceeded, judged, limit) when the newest exceedance is one too many, else None."""
        for span in SPANS:
            m = min(span, self._judged_since)
            count = self._newest(m)
            if self._tail(count, m) <= ALARM / len(SPANS):
                limit = next(c for c in range(count) if self._tail(c + 1, m) <= ALARM / len(SPANS))
                return count, m, limit
        return None

    def is_back(self) -> tuple[int, int, int] | None:
        """Return (exceeded, judged, limit) when a drifting envelope has held for long enough, else None."""
        m = SPANS[-1]
        if not self.drifting or self._judged_since < m:
            return None
        count = self._newest(m)
        if count and self._tail(count, m) < 0.5:
            return None
        return count, m, next(c for c in range(count, m + 1) if c == m or self._tail(c + 1, m) < 0.5)

    def tighten(self) -> None:
        """Trust the most recent steps only, and none of the margin that there was is given up."""
        self.drifting = True
        self._floor = self.factor
        self._judged_since = 0
        self._keep(list(self._ratios)[-FRESH:])

    def relax(self) -> None:
        """The envelope holds again: the margin is that of its window."""
        self.drifting = False
        self._floor = 1.0
        self._update()

    def scale(self, level: float, newest: int) -> None:
        """The mean was scaled by `level` because the last `newest` of these steps err by that.

        What came before was measured against a mean that was right then.
        """
        ratios = list(self._ratios)
        old = max(0, len(ratios) - newest)
        self._keep(ratios[:old] + [ratio / level for ratio in ratios[old:]])

    @property
    def exceeded(self) -> tuple[int, int]:
        """(steps over their envelope, steps judged) of the recent past."""
        return sum(self._exceeded), len(self._exceeded)

    def _keep(self, ratios: Sequence[float]) -> None:
        self._ratios = deque(ratios)
        self._sorted = sorted(ratios)
        self._update()

    def _update(self) -> None:
        m = len(self._sorted)
        rank = math.ceil((m + 1) * (1 - self.eps))
        if rank <= m:
            factor = self._sorted[rank - 1]
        elif m >= 8:  # too few for this eps: the largest seen is the best statement there is
            factor = self._sorted[-1]
        else:
            return
        self.factor = min(max(factor, self._floor), FACTOR_LIMIT)

    def _newest(self, m: int) -> int:
        return sum(islice(reversed(self._exceeded), m))

    def _tail(self, count: int, m: int) -> float:
        calibrated = max(len(self._sorted), 1)
        rank = math.ceil((calibrated + 1) * (1 - self.eps))
        return tail(count, m, max(1, calibrated + 1 - rank), calibrated)
