"""The shipped demo trace: generated, seeded, the published shape of real traffic at the size of a tiny model.

Arrivals are a Gamma renewal process (coefficient of variation about 1.3: mild bursts, as in ServeGen, arXiv
2505.09999); lengths are clipped lognormals, as chat services show (Azure 2023: heavy-tailed prompts, shorter
outputs). The numbers are scaled to what two CPU cores can serve; no row comes from anyone's traffic.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from headway.errors import InputError
from headway.trace.record import SCHEMA, ReadReport, Trace
from headway.trace.selection import check_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A lognormal length in tokens: `median`, `sigma` of the natural logarithm, clipped to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, random: np.random.Generator, n: int) -> np.ndarray:
        """Return `n` whole lengths."""
        values = np.exp(random.normal(math.log(self.median), self.sigma, n))
        return np.clip(np.rint(values), self.low, self.high).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """One kind of request: its SLO class, its share of all requests (0..1), its lengths."""

    slo_class: str
    share: float
    inputs: Lengths
    outputs: Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of traffic: classes whose shares add up to 1, and the coefficient of variation of the gaps."""

    classes: tuple[TrafficClass, ...]
    gap_cv: float = 1.3  # standard deviation / mean of the time between arrivals; 1 is Poisson

    def __post_init__(self) -> None:
        total = sum(kind.share for kind in self.classes)
        if not math.isclose(total, 1.0):
            raise InputError(f"shares of the traffic classes add up to {total:g}: expected 1")
        if not (math.isfinite(self.gap_cv) and self.gap_cv > 0):
            raise InputError(f"gap_cv = {self.gap_cv!r}: expected a number above 0")


CHAT = TrafficClass(
    slo_class="chat",
    share=0.85,
    inputs=Lengths(median=60, sigma=0.8, low=8, high=400),
    outputs=Lengths(median=28, sigma=0.6, low=4, high=80),
)
DOCUMENT = TrafficClass(
    slo_class="document",
    share=0.15,
    inputs=Lengths(median=950, sigma=0.35, low=400, high=1800),
    outputs=Lengths(median=12, sigma=0.5, low=4, high=32),
)
SINGLE = TrafficClass(
    slo_class="default",
    share=1.0,
    inputs=Lengths(median=110, sigma=1.1, low=8, high=1800),
    outputs=Lengths(median=28, sigma=0.7, low=4, high=96),
)

#: Kind -> shape of `demo_trace`.
KINDS: dict[str, Shape] = {
    "mixed": Shape(classes=(CHAT, DOCUMENT)),
    "chat": Shape(classes=(TrafficClass(slo_class="chat", share=1.0, inputs=CHAT.inputs, outputs=CHAT.outputs),)),
    "documents": Shape(
        classes=(TrafficClass(slo_class="document", share=1.0, inputs=DOCUMENT.inputs, outputs=DOCUMENT.outputs),)
    ),
    "single": Shape(classes=(SINGLE,)),
}


def demo_trace(
    *,
    rate: float,
    seed: int,
    n: int | None = None,
    duration_s: float | None = None,
    kind: str = "mixed",
    shape: Shape | None = None,
) -> Trace:
    """Return a generated trace of `n` requests, or of all that arrive within `duration_s` seconds.

    `rate` is the mean of the arrivals in requests/s; `kind` is a name of `KINDS`; `shape` overrides it. The
    first request arrives at 0. The same arguments give the same bytes. A longer trace of the same seed begins
    with the shorter one. Raises `InputError` on settings that make no sense.
    """
    check_seed(seed)
    if shape is None:
        if kind not in KINDS:
            raise InputError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
        shape = KINDS[kind]
    if (n is None) == (duration_s is None):
        raise InputError("demo_trace: expected exactly one of n and duration_s")
    for name, value in (("rate", rate), ("n", n), ("duration_s", duration_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} = {value!r}: expected a number above 0")
    arrivals = _arrivals(shape.gap_cv, rate, seed, n, duration_s)
    count = len(arrivals)
    # One stream of random numbers a quantity, so that a longer trace repeats the shorter one.
    streams = [np.random.default_rng([seed, 1 + index]) for index in range(1 + 2 * len(shape.classes))]
    edges = np.cumsum([kind.share for kind in shape.classes])[:-1]
    which = np.searchsorted(edges, streams[0].random(count), side="right")
    inputs = [kind.inputs.draw(streams[1 + 2 * i], count) for i, kind in enumerate(shape.classes)]
    outputs = [kind.outputs.draw(streams[2 + 2 * i], count) for i, kind in enumerate(shape.classes)]
    frame = pl.DataFrame(
        {
            "arrival_s": arrivals,
            "input_tokens": np.choose(which, inputs),
            "output_tokens": np.choose(which, outputs),
            "slo_class": [shape.classes[index].slo_class for index in which],
        }
    )
    empty = [pl.lit(None, dtype=dtype).alias(name) for name, dtype in SCHEMA.items() if name not in frame.columns]
    frame = frame.with_columns(empty).select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    length = f"n={n}" if n is not None else f"duration_s={duration_s:g}"
    recipe = f"headway demo trace {shape!r} {length} rate={rate:g} seed={seed}"
    return Trace(
        frame=frame,
        format="synthetic",
        source=f"demo-{kind}-{length}-rate={rate:g}-seed={seed}",
        sha256=hashlib.sha256(recipe.encode()).hexdigest(),
        report=ReadReport(read=count, kept=count),
        history=(f"generated: {kind}, {length}, rate {rate:g}/s, gap CV {shape.gap_cv:g}, seed {seed}",),
    )


def _arrivals(cv: float, rate: float, seed: int, n: int | None, duration_s: float | None) -> np.ndarray:
    """Return arrivals of a Gamma renewal process from 0 on: gaps of mean 1/rate and deviation cv/rate."""
    random = np.random.default_rng([seed, 0])
    shape = 1.0 / cv**2
    scale = 1.0 / (rate * shape)
    if n is not None:
        return np.concatenate([[0.0], np.cumsum(random.gamma(shape, scale, n - 1))])
    arrivals = np.zeros(1)
    while duration_s is not None and arrivals[-1] < duration_s:
        gaps = random.gamma(shape, scale, 1024)
        arrivals = np.concatenate([arrivals, arrivals[-1] + np.cumsum(gaps)])
    return arrivals[arrivals < duration_s]
