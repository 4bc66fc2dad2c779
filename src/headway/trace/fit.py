"""Fit a trace: the few numbers from which a trace of the same shape can be drawn, with nothing of its content.

- Gaps between arrivals: their quantiles, and how their ranks correlate over time, as w * phi^k at lag k (a
  slow part beside independent noise, both Gaussian after ranks): bursts come from both.
- Lengths: quantiles of input and output by class, joined by a Gaussian copula with their rank correlation.
- Sessions: turns a session, gaps and think times between turns, growth of the prompt from turn to turn.
- Shared prefixes: the share of a prompt that was seen before, and how many requests ago it was last seen.

A quantile table holds `POINTS` values, so smallest and largest values stay; no row of the source is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from headway.errors import InputError
from headway.trace.normal import quantile
from headway.trace.record import Trace

POINTS = 513
GROUPS = 10
_LAGS = (1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """A distribution as values at fixed probabilities, which lie closer towards both ends; in between it is linear."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: np.ndarray) -> Quantiles:
        """Return the quantiles of `values` (at least one)."""
        points = np.quantile(values, _grid(min(POINTS, max(2, len(values)))))
        return cls(values=tuple(points.tolist()))

    def at(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the values at `probabilities` (0..1)."""
        return np.interp(probabilities, _grid(len(self.values)), self.values)


def _grid(points: int) -> np.ndarray:
    """Return probabilities from 0 to 1, dense at the ends: tails decide burstiness and need more than even spacing."""
    return (1.0 - np.cos(np.linspace(0.0, np.pi, points))) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalModel:
    """Gaps between session starts in seconds; rank correlation `weight` * `decay`^k at lag k."""

    gaps: Quantiles
    weight: float  # 0..1
    decay: float  # 0..1


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Input and output tokens of one class: marginals and the correlation of their Gaussian copula."""

    slo_class: str | None
    share: float  # of the requests that open a session
    inputs: Quantiles
    outputs: Quantiles
    correlation: float  # -1..1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionModel:
    """How a session goes on after its first turn."""

    turns: Quantiles
    gaps_s: Quantiles  # between the arrivals of two turns
    think_s: Quantiles | None  # None: the source does not tell
    growth: Quantiles  # tokens of a prompt beyond that of the turn before
    outputs: Quantiles
    shared: Quantiles | None  # share of the blocks of the turn before that the prompt begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixModel:
    """Sharing between first turns of sessions, by the number of blocks of the prompt (long prompts share more)."""

    block_size: int  # tokens
    limits: tuple[int, ...]  # most blocks of a prompt of each size group but the last
    reused: tuple[float, ...]  # of a group: share of the requests that begin with a block seen before
    shared: tuple[Quantiles, ...]  # of those: share of their blocks that were seen before
    distance: Quantiles  # of all those: how many requests ago the last shared block was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceModel:
    """All that is kept of a fitted trace."""

    n: int
    rate: float  # requests/s
    arrivals: ArrivalModel
    lengths: tuple[LengthModel, ...]
    max_input: int
    sessions: SessionModel | None
    prefixes: PrefixModel | None


def fit(trace: Trace) -> TraceModel:
    """Return the model of `trace`; `InputError` when it is too short to show a shape."""
    if len(trace) < 20 or trace.span_s <= 0:
        raise InputError(
            f"{trace.source}: {len(trace)} requests over {trace.span_s:g} s: expected at least 20 over more than 0 s"
        )
    frame = trace.frame.with_row_index("row")
    follow = (pl.col("turn").fill_null(0) > 0) & pl.col("session_id").is_not_null()
    opening = frame.filter(~follow)
    if opening.height < 3:
        raise InputError(f"{trace.source}: {opening.height} sessions: expected at least three")
    return TraceModel(
        n=len(trace),
        rate=(len(trace) - 1) / trace.span_s,
        arrivals=_arrivals(opening["arrival_s"].to_numpy()),
        lengths=_lengths(opening),
        max_input=int(frame["input_tokens"].max()),  # type: ignore[arg-type]
        sessions=_sessions(frame, opening.height, trace.block_size),
        prefixes=_prefixes(frame, follow, trace.block_size),
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of the Gaussian copula that has the Spearman correlation of the two (2 sin(pi s / 6))."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    spearman = np.corrcoef(_ranks(first), _ranks(second))[0, 1]
    return float(2.0 * math.sin(math.pi * spearman / 6.0))


def _ranks(values: np.ndarray) -> np.ndarray:
    return pl.Series(values).rank("average").to_numpy()


def _arrivals(times: np.ndarray) -> ArrivalModel:
    gaps = np.diff(times)
    scores = quantile((_ranks(gaps) - 0.5) / len(gaps))
    near, far = (_autocorrelation(scores, lag) for lag in _LAGS)
    if near <= 0.01:
        return ArrivalModel(gaps=Quantiles.of(gaps), weight=0.0, decay=0.0)
    decay = min(0.999, max(0.0, far / near) ** (1.0 / (_LAGS[1] - _LAGS[0])))
    weight = min(1.0, near / decay) if decay > 0 else 0.0
    return ArrivalModel(gaps=Quantiles.of(gaps), weight=weight, decay=decay)


def _autocorrelation(values: np.ndarray, lag: int) -> float:
    if len(values) <= lag + 2 or values.std() == 0:
        return 0.0
    return float(np.corrcoef(values[:-lag], values[lag:])[0, 1])


def _lengths(opening: pl.DataFrame) -> tuple[LengthModel, ...]:
    models = []
    for (name,), rows in sorted(opening.group_by("slo_class"), key=lambda item: item[0][0] or ""):
        inputs, outputs = rows["input_tokens"].to_numpy(), rows["output_tokens"].to_numpy()
        models.append(
            LengthModel(
                slo_class=name,
                share=rows.height / opening.height,
                inputs=Quantiles.of(inputs),
                outputs=Quantiles.of(outputs),
                correlation=rank_correlation(inputs, outputs),
            )
        )
    return tuple(models)


def _sessions(frame: pl.DataFrame, openings: int, block_size: int | None) -> SessionModel | None:
    members = frame.filter(pl.col("session_id").is_not_null()).sort("session_id", "turn", "row")
    if not members.height:
        return None
    previous = pl.col("arrival_s", "input_tokens", "hash_ids").shift(1).over("session_id").name.prefix("previous_")
    turns = members.with_columns(previous).filter(pl.col("previous_arrival_s").is_not_null())
    sizes = members.group_by("session_id").len()["len"].to_numpy()
    lonely = max(0, openings - len(sizes))
    if not turns.height:
        return None
    think = turns["think_s"].drop_nulls().to_numpy()
    return SessionModel(
        turns=Quantiles.of(np.concatenate([sizes, np.ones(lonely)])),
        gaps_s=Quantiles.of((turns["arrival_s"] - turns["previous_arrival_s"]).to_numpy()),
        think_s=Quantiles.of(think) if len(think) else None,
        growth=Quantiles.of((turns["input_tokens"] - turns["previous_input_tokens"]).to_numpy()),
        outputs=Quantiles.of(turns["output_tokens"].to_numpy()),
        shared=_shared_with_previous(turns) if block_size else None,
    )


def _shared_with_previous(turns: pl.DataFrame) -> Quantiles | None:
    shares = []
    for ids, before in zip(turns["hash_ids"], turns["previous_hash_ids"], strict=True):
        if ids is None or before is None or not len(before):
            continue
        width = min(len(ids), len(before))
        same = ids.head(width).to_numpy() == before.head(width).to_numpy()
        shares.append((width if same.all() else int(same.argmin())) / len(before))
    return Quantiles.of(np.array(shares)) if shares else None


def _prefixes(frame: pl.DataFrame, follow: pl.Expr, block_size: int | None) -> PrefixModel | None:
    if block_size is None:
        return None
    blocks = frame.select("row", follow.alias("follow"), "hash_ids").filter(pl.col("hash_ids").list.len() > 0)
    rows = blocks.explode("hash_ids").with_columns(pl.col("row").cast(pl.Int64))
    # The row in which each block was last seen; blocks seen before are the leading ones, because ids are
    # chained.
    rows = rows.with_columns(pl.col("row").shift(1).over("hash_ids").alias("last"))
    per_request = (
        rows.filter(~pl.col("follow"))
        .group_by("row")
        .agg(
            pl.len().alias("blocks"),
            pl.col("last").is_not_null().sum().alias("hits"),
            pl.col("last").drop_nulls().last().alias("last"),
        )
    )
    sizes = per_request["blocks"].to_numpy()
    limits = np.unique(np.quantile(sizes, np.linspace(0, 1, GROUPS + 1)[1:-1], method="inverted_cdf"))
    group = np.searchsorted(limits, sizes, side="left")
    hits = per_request["hits"].to_numpy()
    reused, shared = [], []
    for index in range(len(limits) + 1):
        mine = (group == index) & (hits > 0)
        reused.append(float(mine.sum() / max(1, (group == index).sum())))
        shared.append(Quantiles.of(hits[mine] / sizes[mine]) if mine.any() else Quantiles(values=(0.0, 0.0)))
    ago = (per_request["row"] - per_request["last"]).drop_nulls().to_numpy()
    return PrefixModel(
        block_size=block_size,
        limits=tuple(int(limit) for limit in limits),
        reused=tuple(reused),
        shared=tuple(shared),
        distance=Quantiles.of(ago) if len(ago) else Quantiles(values=(1.0, 1.0)),
    )
