"""The shape of a trace in numbers: rates, burstiness, lengths, shared prefixes, sessions, and what to be wary of.

Percentiles are nearest-rank (the smallest value with at least that share of the values at or below it), so
each is a value that occurs. Burstiness is told twice: the coefficient of variation of the gaps between
arrivals (standard deviation / mean; 1 for a Poisson process) and the index of dispersion of counts (variance
/ mean of the number of arrivals in 1-second bins; 1 for a Poisson process).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from headway.trace.record import Trace

PERCENTILE_METHOD = "nearest rank"
#: Seconds below which a trace has no span.
MIN_SPAN_S = 1e-9
#: A head is the first tenth of the requests, at most this many.
HEAD_REQUESTS = 1000
#: Warn when the head arrives at less than this share of the mean rate.
HEAD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Nearest-rank percentiles of `n` values."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Prefix sharing as a cache without end would see it: a block hits when an earlier request had the same id."""

    block_size: int  # tokens
    blocks: int
    hit_blocks: int
    hit_block_share: float  # of blocks
    hit_token_share: float  # of all input tokens
    requests_with_hit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Conversations of a trace."""

    sessions: int
    requests: int  # of all requests, those in a session
    turns: Percentiles  # turns of a session
    think_s: Percentiles | None  # None: the trace does not tell when answers ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """What `headway trace inspect` prints."""

    n: int
    span_s: float
    rate: float | None  # requests/s: (n - 1) / span
    peak_1s: int  # most arrivals in one 1-second bin
    peak_10s: int
    longest_silence_s: float
    gap_cv: float | None  # None: fewer than three arrivals, or all at once
    dispersion: float | None  # index of dispersion of counts, 1-second bins
    distinct_arrivals: int
    input_tokens: Percentiles
    output_tokens: Percentiles
    context_tokens: Percentiles  # input + output
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    classes: dict[str, int]
    prefixes: Prefixes | None
    sessions: Sessions | None
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def shape(trace: Trace) -> TraceShape:
    """Return the shape of `trace`, which has at least one request."""
    frame, n, span = trace.frame, len(trace), trace.span_s
    arrivals = frame["arrival_s"].to_numpy()
    gaps = np.diff(arrivals)
    inputs, outputs = frame["input_tokens"].to_numpy(), frame["output_tokens"].to_numpy()
    # Arrivals within a nanosecond come at once: no clock tells them apart, and a rate over no time is none.
    span = span if span >= MIN_SPAN_S else 0.0
    rate = (n - 1) / span if span > 0 else None
    distinct = frame["arrival_s"].n_unique()
    return TraceShape(
        n=n,
        span_s=span,
        rate=rate,
        peak_1s=_peak(arrivals, 1.0),
        peak_10s=_peak(arrivals, 10.0),
        longest_silence_s=float(gaps.max()) if n > 1 else 0.0,
        gap_cv=gap_cv(arrivals),
        dispersion=dispersion(arrivals),
        distinct_arrivals=distinct,
        input_tokens=percentiles(inputs),
        output_tokens=percentiles(outputs),
        context_tokens=percentiles(inputs.astype(np.int64) + outputs),
        input_tokens_per_s=float(inputs.sum(dtype=np.int64)) / span if span > 0 else None,
        output_tokens_per_s=float(outputs.sum(dtype=np.int64)) / span if span > 0 else None,
        classes=_classes(frame),
        prefixes=prefixes(trace),
        sessions=_sessions(frame),
        warnings=tuple(_warnings(arrivals, rate, distinct)),
    )


def percentiles(values: np.ndarray) -> Percentiles:
    """Return the percentiles of `values` (at least one)."""
    p50, p90, p99 = np.percentile(values, [50, 90, 99], method="inverted_cdf")
    return Percentiles(
        n=len(values),
        mean=float(values.mean()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=float(values.max()),
    )


def gap_cv(arrivals: np.ndarray) -> float | None:
    """Return standard deviation / mean of the gaps between arrivals; None when there are too few or all at once."""
    gaps = np.diff(arrivals)
    if len(gaps) < 2 or gaps.mean() <= 0:
        return None
    return float(gaps.std() / gaps.mean())


def dispersion(arrivals: np.ndarray, bin_s: float = 1.0) -> float | None:
    """Return variance / mean of the counts in the whole bins of `bin_s` seconds; None below two bins.

    Bins start at the first arrival; the last one, which the trace fills only in part, is left out.
    """
    bins = int(arrivals[-1] // bin_s) if len(arrivals) else 0
    if bins < 2:
        return None
    counts = _counts(arrivals, bin_s)
    counts = counts[:-1]  # the bin of the last arrival is the partial one
    # Empty bins count too, without being held: a trace of months has many.
    mean = counts.sum() / bins
    return float(((counts.astype(np.float64) ** 2).sum() / bins - mean**2) / mean) if mean > 0 else None


def prefixes(trace: Trace) -> Prefixes | None:
    """Return the prefix sharing of a trace with hash ids, else None."""
    if trace.block_size is None:
        return None
    ids = trace.frame.select("input_tokens", "hash_ids").filter(pl.col("hash_ids").list.len() > 0)
    # Ids are chained, so the blocks of a request that were seen before are its leading ones. Seen in the same
    # request does not count: there each id occurs once.
    seen = ~ids["hash_ids"].explode().is_first_distinct().to_numpy()
    ends = np.cumsum(ids["hash_ids"].list.len().to_numpy().astype(np.int64))
    up_to = np.concatenate([[0], np.cumsum(seen)])
    hits = np.diff(up_to[np.concatenate([[0], ends])])
    tokens = np.minimum(hits * trace.block_size, ids["input_tokens"].to_numpy().astype(np.int64))
    blocks, hit = len(seen), int(hits.sum())
    total = int(trace.frame["input_tokens"].cast(pl.Int64).sum())
    return Prefixes(
        block_size=trace.block_size,
        blocks=blocks,
        hit_blocks=hit,
        hit_block_share=hit / blocks if blocks else 0.0,
        hit_token_share=int(tokens.sum()) / total,
        requests_with_hit=int((hits > 0).sum()),
    )


def _counts(arrivals: np.ndarray, bin_s: float) -> np.ndarray:
    """Return the counts of the bins that are not empty, in the order of time."""
    which = np.floor_divide(arrivals, bin_s)
    edges = np.flatnonzero(np.diff(which)) + 1
    return np.diff(np.concatenate([[0], edges, [len(which)]]))


def _peak(arrivals: np.ndarray, bin_s: float) -> int:
    return int(_counts(arrivals, bin_s).max())


def _classes(frame: pl.DataFrame) -> dict[str, int]:
    named = frame.filter(pl.col("slo_class").is_not_null())
    if not named.height:
        return {}
    counts = named.group_by("slo_class").len().sort("slo_class")
    return dict(zip(counts["slo_class"].to_list(), counts["len"].to_list(), strict=True))


def _sessions(frame: pl.DataFrame) -> Sessions | None:
    members = frame.filter(pl.col("session_id").is_not_null())
    if not members.height:
        return None
    turns = members.group_by("session_id").len()["len"].to_numpy()
    think = members["think_s"].drop_nulls().to_numpy()
    return Sessions(
        sessions=len(turns),
        requests=members.height,
        turns=percentiles(turns),
        think_s=percentiles(think) if len(think) else None,
    )


def _warnings(arrivals: np.ndarray, rate: float | None, distinct: int) -> list[str]:
    warnings = []
    n = len(arrivals)
    head = min(HEAD_REQUESTS, n // 10)
    if rate is not None and head >= 10 and arrivals[head - 1] > 0:
        head_rate = (head - 1) / arrivals[head - 1]
        if head_rate < rate * HEAD_SHARE:
            warnings.append(
                f"the first {head:,} requests arrive at {head_rate:.3g}/s, {rate / head_rate:.3g} times below the "
                "mean: a slice from the start is not like the trace, so cut a window with --start"
            )
    if n >= 30 and distinct * 3 <= n:
        warnings.append(
            f"only {distinct:,} distinct arrival times for {n:,} requests: the source rounds its clock, so replayed as "
            "it is the trace is a train of bursts (spread it with --spread)"
        )
    return warnings
