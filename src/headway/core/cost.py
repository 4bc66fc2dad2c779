"""The learned price of one engine step.

    tau(q, n, K, X) = g + a q + b n + k K + x X        (docs/design.md, section 3)

q prefill tokens, n decoding requests, K context tokens read by the decodes, X = sum over prefill chunks of
chunk * (context before it + chunk / 2), the token pairs that the attention of the prefill touches. Learned by
recursive least squares with exponential forgetting (the normal equations are kept, so the fit is exact and five
numbers can be held at zero when the data would make them negative). The envelope at 1 - eps is split conformal and
watched for drift (core/envelope.py).
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headway.core.envelope import SPANS, Drift, Envelope
from headway.core.stretch import Line, Stretches

#: Scale of q, n, K, X that makes the normal equations well conditioned (typical sizes, not limits).
_SCALE = np.array([1.0, 100.0, 10.0, 10_000.0, 100_000.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One executed step: what was in it and how long it took."""

    q: int  # prefill tokens
    n: int  # decoding requests
    K: int  # context tokens read by the decodes
    X: float  # token pairs of the prefill chunks
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCoefficients:
    """Coefficients of tau in seconds: g a step, a a prefill token, b a decode, k a context token, x a token pair."""

    g: float
    a: float
    b: float
    k: float = 0.0
    x: float = 0.0

    def seconds(self, q: float, n: float, K: float, X: float) -> float:
        """Return tau(q, n, K, X)."""
        return self.g + self.a * q + self.b * n + self.k * K + self.x * X

    def work_s(self, tokens: float, context: float) -> float:
        """Return the seconds of prefill compute of `tokens` tokens that follow `context` computed ones."""
        return self.a * tokens + self.x * tokens * (context + tokens / 2)

    def tokens_within(self, seconds: float, context: float) -> int:
        """Return the largest chunk after `context` tokens whose `work_s` is at most `seconds` (0 if none)."""
        if seconds <= 0:
            return 0
        if self.a + self.x <= 0:
            return NO_LIMIT
        linear = self.a + self.x * context
        if self.x * seconds < 1e-6 * linear * linear:
            return int(seconds / linear + 1e-9)
        # Positive root of (x/2) t^2 + linear t - seconds = 0, in the form that does not cancel.
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.x * seconds)) + 1e-9)


#: Tokens that cost nothing fit without limit.
NO_LIMIT = 1 << 31

#: Only a starting point so that the first steps of an uncalibrated engine are sized at all.
UNKNOWN = CostCoefficients(g=0.02, a=0.0005, b=0.0003)


#: The regimes that are calibrated apart because they err differently, by whether the step carries prefill.
REGIMES = ("decode_only", "mixed")

#: Seven in eight of the last 16 steps longer than predicted by this, or of the last 64 shorter: the machine has
#: changed, and the fit would follow in about `memory` steps only. The mean is scaled by the quartile next to one.
_LONGER, _SHORTER = 1.1, 0.8

#: Beside the newest steps the fit remembers those of each regime for 1,500 of their own kind, at this weight: what
#: steps without prefill say nothing about must not be forgotten while there are only such.
_SLOW_FORGET, _SLOW_WEIGHT = math.exp(-1 / 1500), 0.02


class StepCost:
    """Online fit of tau: `mean` for throughput choices, `envelope` for promises.

    Args:
        prior: coefficients believed before any step is seen (a saved profile), or None for "unknown".
        eps: share of steps that may exceed the envelope.
        window: steps over which the envelope is calibrated; None: 256, or as many as this eps needs.
        memory: steps after which a step's weight in the fit has fallen to 1/e.
    """

    #: Steps with prefill that must have been seen before promises are made from the fit.
    READY_AFTER = 12

    def __init__(
        self,
        prior: CostCoefficients | None = None,
        *,
        eps: float = 0.05,
        window: int | None = None,
        memory: float = 300.0,
    ) -> None:
        if not 0 < eps < 1:
            raise ValueError(f"eps = {eps!r}: expected a share in (0, 1)")
        self.eps = eps
        self.mean = prior or UNKNOWN
        self._known = prior is not None
        self._forget = math.exp(-1.0 / memory)
        # The prior enters as pseudo-observations: a saved profile counts as 20 typical steps, a guess as nearly none.
        strength = 20.0 / self.mean.seconds(100, 10, 0, 0) ** 2 if prior is not None else 1e-3
        theta = np.array([self.mean.g, self.mean.a, self.mean.b, self.mean.k, self.mean.x]) * _SCALE
        self._gram = strength * np.eye(5)
        self._moment = strength * theta
        self._slow_gram = np.zeros((2, 5, 5))
        self._slow_moment = np.zeros((2, 5))
        window = window or max(256, math.ceil(1 / eps))
        self._envelopes = (Envelope(eps, window), Envelope(eps, window))
        self.stretches = Stretches(eps, window)
        self._recent: deque[tuple[float, bool]] = deque(maxlen=SPANS[-1])  # ratios of both regimes, whether mixed
        self._drifts: list[Drift] = []
        self.steps = 0
        self.prefill_steps = 0

    @property
    def ready(self) -> bool:
        """Whether the fit rests on a saved profile or on enough steps to promise anything."""
        return self._known or self.prefill_steps >= self.READY_AFTER

    @property
    def drifting(self) -> bool:
        """Whether the steps of a regime exceed their envelope more often than they may by chance."""
        decode_only, mixed = self._envelopes
        return decode_only.drifting or mixed.drifting

    @property
    def factor(self) -> float:
        """Envelope / mean of a step that carries prefill."""
        return self._envelopes[1].factor

    @property
    def lines(self) -> tuple[Line, ...]:
        """Envelopes of steps in a row (core/stretch.py); none while single ones leave theirs."""
        return () if self.drifting else self.stretches.lines

    def envelope(self, q: float, n: float, K: float, X: float) -> float:
        """Return the time a step stays under with probability 1 - eps, in seconds."""
        return self._envelopes[q > 0].factor * self.mean.seconds(q, n, K, X)

    def observe(self, step: Step) -> float:
        """Learn from one executed step; return measured / predicted (prediction of before this step).

        What it says about drift is in `drifts`.
        """
        predicted = self.mean.seconds(step.q, step.n, step.K, step.X)
        ratio = step.seconds / predicted if predicted > 0 else 1.0
        self.steps += 1
        self.prefill_steps += step.q > 0
        # A host stall is no news about the engine: the envelope sees it whole, the fit a clipped one.
        trusted = self.steps > 2 * self.READY_AFTER
        seconds = min(step.seconds, 2.0 * predicted) if trusted else step.seconds
        row = np.array([1.0, step.q, step.n, step.K, step.X]) / _SCALE
        # Relative errors matter, so a step weighs by the inverse square of its length.
        weight = 1.0 / max(seconds, 1e-4) ** 2
        squares, products = weight * np.outer(row, row), (weight * seconds) * row
        regime = int(step.q > 0)
        for gram, moment, forget in (
            (self._gram, self._moment, self._forget),
            (self._slow_gram[regime], self._slow_moment[regime], _SLOW_FORGET),
        ):
            gram *= forget
            moment *= forget
            gram += squares
            moment += products
        if self.steps <= 32 or self.steps % 8 == 0:
            self._solve()
        if trusted:
            self.stretches.add(step.seconds, predicted)
            self._judge(ratio, step.q > 0)
        return ratio

    def _judge(self, ratio: float, mixed: bool) -> None:
        """Calibrate the envelope on a step, and look whether it still holds."""
        envelope, recent = self._envelopes[mixed], self._recent
        before = envelope.factor
        over = envelope.add(ratio)
        recent.append((ratio, mixed))
        level = 1.0
        found = envelope.left_band() if over else None
        if found is not None:
            newest = sorted(each for each, _ in list(recent)[-SPANS[0] :])
            if len(newest) == SPANS[0] and newest[SPANS[0] // 8] > _LONGER:
                level = newest[SPANS[0] // 4]
                self._scale(level, SPANS[0])
            again = envelope.drifting
            envelope.tighten()
            if again:
                return  # said before
        else:
            if self.steps % 8 == 0 and len(recent) == SPANS[-1]:
                longest = sorted((each for each, _ in recent), reverse=True)
                if longest[SPANS[-1] // 8] < _SHORTER:
                    self._scale(longest[SPANS[-1] // 4], SPANS[-1])
            found = envelope.is_back()
            if found is None:
                return
            envelope.relax()
        exceeded, judged, limit = found
        self._drifts.append(
            Drift(
                regime=REGIMES[mixed],
                tightened=envelope.drifting,
                exceeded=exceeded,
                judged=judged,
                limit=limit,
                factor_before=before,
                factor=envelope.factor,
                level=level,
            )
        )

    def _scale(self, level: float, newest: int) -> None:
        """The last `newest` steps took `level` times what was predicted: so does the fit from now on."""
        self._moment *= level
        self._slow_moment *= level
        self._solve()
        self.stretches.clear()
        recent = list(self._recent)
        old, new = recent[: len(recent) - newest], recent[len(recent) - newest :]
        self._recent.clear()
        self._recent.extend([*old, *((ratio / level, mixed) for ratio, mixed in new)])
        for regime, envelope in enumerate(self._envelopes):
            envelope.scale(level, sum(mixed == bool(regime) for _, mixed in new))

    def drifts(self) -> list[Drift]:
        """Return and forget what was found since the last call, in order."""
        found, self._drifts = self._drifts, []
        return found

    def _solve(self) -> None:
        """Least squares with non-negative coefficients: drop the most negative one, solve again."""
        everything = self._gram + _SLOW_WEIGHT * (self._slow_gram[0] + self._slow_gram[1])
        moment = self._moment + _SLOW_WEIGHT * (self._slow_moment[0] + self._slow_moment[1])
        active = list(range(5))
        theta: NDArray[np.float64] = np.zeros(5)
        while active:
            idx = np.ix_(active, active)
            ridge = 1e-9 * np.trace(everything[idx]) * np.eye(len(active))
            solved = np.linalg.solve(everything[idx] + ridge, moment[active])
            worst = int(np.argmin(solved))
            if solved[worst] >= 0:
                theta[:] = 0.0
                theta[active] = solved
                break
            del active[worst]
        g, a, b, k, x = (theta / _SCALE).tolist()
        self.mean = CostCoefficients(g=g, a=a, b=b, k=k, x=x)

    def exceeded(self) -> tuple[int, int]:
        """Return (steps over their envelope, steps judged) of the recent past."""
        pairs = [envelope.exceeded for envelope in self._envelopes]
        return sum(p[0] for p in pairs), sum(p[1] for p in pairs)

    def regimes(self) -> dict[str, Envelope]:
        """Return the envelope of every regime (to be read)."""
        return dict(zip(REGIMES, self._envelopes, strict=True))

    def crowded(self, times: float) -> Self:
        """Return this cost, to be read only, as if there were `times` as many decodes with as much context each."""
        other = copy.copy(self)
        other.mean = replace(self.mean, b=self.mean.b * times, k=self.mean.k * times)
        return other

    @classmethod
    def fixed(
        cls, coefficients: CostCoefficients, *, factor: float = 1.0, eps: float = 0.05, lines: tuple[Line, ...] = ()
    ) -> Self:
        """Return a cost that is known and whose envelope is `factor` times the mean (tests, twin)."""
        cost = cls(coefficients, eps=eps)
        cost.stretches.fix(lines)
        for envelope in cost._envelopes:
            envelope.factor = factor
        return cost
