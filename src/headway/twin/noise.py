"""How real steps scatter around their price: multiplicative noise from a generator that is passed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core import Line
from headway.errors import InputError

Floats = NDArray[np.float64]

_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseModel:
    """Distribution of measured / predicted of a step: lognormal with median 1, now and then a host stall.

    A busy host is slow for a while, so a part of the logarithm wanders: an AR(1) process over steps with standard
    deviation `drift` and correlation exp(-lag / drift_steps). What disturbs a host for milliseconds averages out within
    a long step: one of L > `ref_s` has 1 + (factor - 1) (keep + (1 - keep) sqrt(ref_s / L)) instead of the factor.

    Attributes:
        sigma: standard deviation of the natural logarithm, without the part that wanders.
        drift: that of the part that wanders.
        drift_steps: steps after which its correlation has fallen to 1/e.
        stall_share: share of steps that stall.
        stall_factor: how much longer a stalled step takes.
        keep: share of the scatter that a step of any length has.
        ref_s: length up to which a step has all of it, seconds.
        cap: largest factor (None: unbounded). With the envelope factor here every step stays under its envelope,
            which is an assumption of the admission guarantee.
    """

    sigma: float = 0.0
    stall_share: float = 0.0
    stall_factor: float = 1.5
    cap: float | None = None
    drift: float = 0.0
    drift_steps: float = 20.0
    keep: float = 1.0
    ref_s: float = 0.05

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and 0 <= self.sigma <= 2):
            raise InputError(f"noise: sigma = {self.sigma!r}: expected a number in [0, 2]")
        if not 0 <= self.stall_share < 1:
            raise InputError(f"noise: stall_share = {self.stall_share!r}: expected a share in [0, 1)")
        if not (math.isfinite(self.stall_factor) and self.stall_factor >= 1):
            raise InputError(f"noise: stall_factor = {self.stall_factor!r}: expected a number of at least 1")
        if self.cap is not None and not self.cap > 0:
            raise InputError(f"noise: cap = {self.cap!r}: expected a number above 0")
        if not (math.isfinite(self.drift) and 0 <= self.drift <= 2):
            raise InputError(f"noise: drift = {self.drift!r}: expected a number in [0, 2]")
        if not (math.isfinite(self.drift_steps) and self.drift_steps > 0):
            raise InputError(f"noise: drift_steps = {self.drift_steps!r}: expected a number above 0")
        if not 0 <= self.keep <= 1:
            raise InputError(f"noise: keep = {self.keep!r}: expected a share in [0, 1]")
        if not (math.isfinite(self.ref_s) and self.ref_s > 0):
            raise InputError(f"noise: ref_s = {self.ref_s!r}: expected a number of seconds above 0")

    def mean(self, prices_s: Floats) -> Floats:
        """Return the expected factor of steps of these prices (shape of it), `cap` not counted: a little over 1."""
        short = math.exp((self.sigma**2 + self.drift**2) / 2) * (1 + self.stall_share * (self.stall_factor - 1))
        return 1.0 + (short - 1.0) * self.part(prices_s)

    def part(self, prices_s: Floats) -> Floats:
        """Return the share of the scatter that steps of these prices have (shape of it)."""
        return self.keep + (1.0 - self.keep) * np.sqrt(self.ref_s / np.maximum(prices_s, self.ref_s))


class Noise:
    """A stream of step factors. Taking them one by one or many at once gives the same stream.

    Args:
        model: their distribution.
        generator: of random numbers.
        lines: envelopes of steps in a row, whose factors are made smaller where they would exceed one.
    """

    __slots__ = ("_ahead", "_at", "_block", "_excess", "_generator", "_lines", "_list", "_slow", "model")

    def __init__(self, model: NoiseModel, generator: np.random.Generator, lines: Sequence[Line] = ()) -> None:
        self.model = model
        self._generator = generator
        self._lines = tuple(lines)
        self._excess = [0.0] * len(self._lines)  # as in core/stretch.py
        self._ahead: list[list[float]] = []  # after each step that was peeked at
        self._block: Floats = np.empty(0)
        self._list: list[float] = []
        self._at = 0
        self._slow: float | None = None  # the part that wanders, in standard deviations; None before the first step

    def next(self, price_s: float = 0.0) -> float:
        """Return the factor of one step whose price is known."""
        if self._at >= len(self._list):
            self._fill(1)
        self._at += 1
        factor, model = self._list[self._at - 1], self.model
        if not (model.keep == 1 or price_s <= model.ref_s):
            factor = 1.0 + (factor - 1.0) * (model.keep + (1.0 - model.keep) * math.sqrt(model.ref_s / price_s))
        if self._lines:
            factor, self._excess = self._within(factor, price_s, self._excess)
        return factor

    def peek(self, prices_s: Floats) -> Floats:
        """Return the factors of the next steps without taking them, given their prices (shape of it)."""
        n = len(prices_s)
        if self._at + n > len(self._list):
            self._fill(n)
        factors, model = self._block[self._at : self._at + n], self.model
        if model.keep != 1:
            # The same operations as for one step, each correctly rounded: the streams are equal to the last bit.
            factors = np.where(prices_s <= model.ref_s, factors, 1.0 + (factors - 1.0) * model.part(prices_s))
        if not self._lines:
            return factors
        limited, excess, self._ahead = [], self._excess, []
        for factor, price in zip(factors.tolist(), prices_s.tolist(), strict=True):
            factor, excess = self._within(factor, price, excess)
            limited.append(factor)
            self._ahead.append(excess)
        return np.array(limited)

    def skip(self, n: int) -> None:
        """Take `n` factors that were peeked at."""
        self._at += n
        if self._lines and n:
            self._excess = self._ahead[n - 1]

    def _within(self, factor: float, price_s: float, excess: list[float]) -> tuple[float, list[float]]:
        """Return the factor under which no line is exceeded, at most `factor`, and the excesses behind the step."""
        if price_s <= 0:
            return factor, excess
        for line, before in zip(self._lines, excess, strict=True):
            factor = min(factor, line.rate + (line.burst_s - before) / price_s)
        seconds = factor * price_s
        after = [max(0.0, e + seconds - line.rate * price_s) for line, e in zip(self._lines, excess, strict=True)]
        return factor, after

    def _fill(self, n: int) -> None:
        model, parts = self.model, [self._block[self._at :]]
        have = len(parts[0])
        while have < n:
            # The same draws a block, in this order: the stream does not depend on how it is consumed.
            logarithm = model.sigma * self._generator.standard_normal(_BLOCK)
            stalled = self._generator.random(_BLOCK) < model.stall_share
            if model.drift:
                logarithm = logarithm + model.drift * self._wander()
            factors = np.exp(logarithm)
            factors = np.where(stalled, factors * model.stall_factor, factors)
            if model.cap is not None:
                factors = np.minimum(factors, model.cap)
            parts.append(factors)
            have += _BLOCK
        self._block = np.concatenate(parts)
        self._list = self._block.tolist()
        self._at = 0

    def _wander(self) -> Floats:
        """Return a block of the AR(1) process, unit variance."""
        keep = math.exp(-1.0 / self.model.drift_steps)
        fresh = math.sqrt(1.0 - keep * keep)
        draws = self._generator.standard_normal(_BLOCK).tolist()
        slow = draws[0] if self._slow is None else keep * self._slow + fresh * draws[0]
        found = [slow]
        for draw in draws[1:]:
            slow = keep * slow + fresh * draw
            found.append(slow)
        self._slow = slow
        return np.array(found)
