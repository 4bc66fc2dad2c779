"""Capacity by rate search: the highest offered rate with attainment of at least a target (capacity@90, capacity@99).

`RateSearch` is pure: ask it for the next rate, run it somewhere, tell it how many of n requests attained. It assumes
that attainment falls with the rate, brackets the capacity geometrically, then bisects in the log of the rate. A rate
whose Wilson interval holds the target is measured again, a bounded number of times, because one noisy answer on the
wrong side would send a bisection astray; what stays open stays inside the reported interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.errors import InputError
from headway.replay.stats import CONFIDENCE, wilson


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """All that was measured at one rate (requests/s): attained of offered, over `runs` runs."""

    rate: float
    attained: int
    offered: int
    runs: int

    @property
    def attainment(self) -> float:
        """The share that attained."""
        return self.attained / self.offered

    def interval(self, confidence: float) -> tuple[float, float]:
        """The Wilson interval of the attainment."""
        return wilson(self.attained, self.offered, confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a search, rates in requests/s.

    `rate` is the highest rate measured with attainment at or above the target, and 0 when none was. The true capacity
    lies in `low`..`high` at the confidence of the search, one rate at a time: below `low` attainment is at the target
    for sure (0: nowhere), above `high` it is not (inf: nowhere found).
    """

    target: float
    rate: float
    low: float
    high: float
    confidence: float
    probes: tuple[Probe, ...]
    resolved: bool  # the bracket reached the resolution
    reason: str  # why the search stopped


@dataclass(slots=True, kw_only=True)
class RateSearch:
    """Ask/tell search for the highest rate with attainment >= `target`.

    Args: `start` the first rate tried, `resolution` the relative width at which a bracket is narrow enough, `repeats`
    the most runs of one rate, `budget` the most runs in all, `lowest` and `highest` the rates never left.
    """

    target: float
    start: float
    resolution: float = 0.05
    confidence: float = CONFIDENCE
    repeats: int = 3
    budget: int = 30
    lowest: float = 1e-3
    highest: float = 1e5
    _probes: dict[float, Probe] = field(default_factory=dict, init=False)
    _runs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        checks = (
            ("target", self.target, 0 < self.target < 1, "a share above 0 and below 1"),
            ("resolution", self.resolution, 0 < self.resolution < 1, "a share above 0 and below 1"),
            ("lowest", self.lowest, self.lowest > 0, "a rate above 0"),
            ("start", self.start, self.lowest <= self.start <= self.highest, "a rate from lowest to highest"),
            ("repeats", self.repeats, self.repeats >= 1, "1 or more"),
            ("budget", self.budget, self.budget >= 1, "1 or more"),
        )
        for name, value, good, expected in checks:
            if not good:
                raise InputError(f"rate search: {name} = {value!r}: expected {expected}")

    def ask(self) -> float | None:
        """Return the next rate to run, or None when the search is over."""
        if self._runs >= self.budget:
            return None
        if not self._probes:
            return self.start
        passing, failing = self._bracket()
        # The two ends of the bracket decide everything: settle an undecided one before going on.
        for rate in (passing, failing):
            if rate is not None and self._undecided(rate):
                return rate
        if passing is None:
            return None if failing <= self.lowest else max(self.lowest, failing / 2.0)
        if failing is None:
            return None if passing >= self.highest else min(self.highest, passing * 2.0)
        if failing / passing <= 1.0 + self.resolution:
            return None
        return math.sqrt(passing * failing)

    def tell(self, rate: float, attained: int, offered: int) -> None:
        """Record that `attained` of `offered` requests attained in one run at `rate`."""
        if not (offered > 0 and 0 <= attained <= offered):
            raise ValueError(f"attained {attained} of {offered}: expected 0 <= attained <= offered, offered > 0")
        known = self._probes.get(rate)
        self._probes[rate] = Probe(
            rate=rate,
            attained=attained + (known.attained if known else 0),
            offered=offered + (known.offered if known else 0),
            runs=1 + (known.runs if known else 0),
        )
        self._runs += 1

    def result(self) -> Capacity:
        """Return what is known so far; call it at any time."""
        probes = tuple(self._probes[rate] for rate in sorted(self._probes))
        passing, failing = self._bracket() if probes else (None, None)
        sure = [p.rate for p in probes if p.interval(self.confidence)[0] >= self.target]
        broken = [p.rate for p in probes if p.interval(self.confidence)[1] < self.target]
        high = min(broken, default=math.inf)
        # Noise can make a higher rate look surer than a lower one that failed for sure; the lower bound then yields.
        low = max((rate for rate in sure if rate < high), default=0.0)
        resolved = passing is not None and failing is not None and failing / passing <= 1.0 + self.resolution
        return Capacity(
            target=self.target,
            rate=passing or 0.0,
            low=low,
            high=high,
            confidence=self.confidence,
            probes=probes,
            resolved=resolved,
            reason=self._reason(passing, failing, resolved),
        )

    def _reason(self, passing: float | None, failing: float | None, resolved: bool) -> str:
        if resolved:
            return f"bracket of {self.resolution:.1%} reached"
        if self._runs >= self.budget:
            return f"budget of {self.budget} runs used up"
        if passing is None and failing is not None and failing <= self.lowest:
            return f"the target is missed even at {self.lowest:g} requests/s"
        if failing is None and passing is not None and passing >= self.highest:
            return f"the target is met even at {self.highest:g} requests/s"
        return "the search is not over"

    def _bracket(self) -> tuple[float | None, float | None]:
        """Return the lowest failing rate and the highest passing one below it (either may be None)."""
        rates = sorted(self._probes)
        failing = next((rate for rate in rates if self._probes[rate].attainment < self.target), None)
        below = [rate for rate in rates if failing is None or rate < failing]
        return (below[-1] if below else None), failing

    def _undecided(self, rate: float) -> bool:
        probe = self._probes[rate]
        low, high = probe.interval(self.confidence)
        return low < self.target <= high and probe.runs < self.repeats


def search(
    measure: Callable[[float, int], tuple[int, int]],
    *,
    target: float,
    start: float,
    resolution: float = 0.05,
    repeats: int = 3,
    budget: int = 30,
    confidence: float = CONFIDENCE,
    on_probe: Callable[[Probe], None] | None = None,
) -> Capacity:
    """Return the capacity at `target`, running `measure(rate, run number) -> (attained, offered)` as often as needed.

    `run number` counts from 0 over the whole search: use it as the seed. `on_probe` is told every pooled measurement.
    """
    state = RateSearch(
        target=target,
        start=start,
        resolution=resolution,
        repeats=repeats,
        budget=budget,
        confidence=confidence,
    )
    number = 0
    while (rate := state.ask()) is not None:
        state.tell(rate, *measure(rate, number))
        number += 1
        if on_probe is not None:
            on_probe(state._probes[rate])
    return state.result()
