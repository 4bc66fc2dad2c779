"""Draw a trace from a fitted model: seeded, the same model and seed give the same bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import polars as pl

from headway.errors import InputError
from headway.trace.fit import ArrivalModel, LengthModel, SessionModel, TraceModel, fit
from headway.trace.normal import cdf
from headway.trace.record import SCHEMA, ReadReport, Trace
from headway.trace.selection import check_seed

DONOR_REACH = 4096  # requests


def synthesize(trace: Trace, *, n: int | None = None, rate: float | None = None, seed: int = 0) -> Trace:
    """Return a trace of the shape of `trace` that holds no row of it.

    `n` requests (None: as many as the source) at a mean of `rate` requests/s (None: that of the source).
    Raises `InputError` when the source is too short to show a shape.
    """
    for name, value in (("n", n), ("rate", rate)):
        if value is not None and not value > 0:
            raise InputError(f"{name} = {value!r}: expected a number above 0")
    return draw(fit(trace), source=trace.source, n=n, rate=rate, seed=seed)


def draw(model: TraceModel, *, source: str, n: int | None = None, rate: float | None = None, seed: int = 0) -> Trace:
    """Return a trace drawn from `model`; `source` names where the model came from."""
    count, mean_rate = n or model.n, rate or model.rate
    check_seed(seed)
    random = np.random.default_rng(seed)
    turns = _turns(model.sessions, count, random)
    openings = len(turns)
    starts = _starts(model.arrivals, openings, random)
    classes, inputs, outputs = _lengths(model.lengths, openings, random)
    requests = _Requests(
        session=np.repeat(np.arange(openings), turns),
        turn=np.concatenate([np.arange(size) for size in turns]),
        arrival_s=np.repeat(starts, turns),
        think_s=np.full(count, np.nan),
        input_tokens=np.repeat(inputs, turns),
        output_tokens=np.repeat(outputs, turns),
    )
    if model.sessions is not None:
        _follow_ups(requests, model.sessions, model.max_input, random)
    order = np.argsort(requests.arrival_s, kind="stable")
    arrival = requests.arrival_s[order] - requests.arrival_s.min()
    # The mean rate is set exactly; heavy-tailed gaps would otherwise leave it to a few draws.
    stretch = (count - 1) / mean_rate / arrival[-1] if count > 1 and arrival[-1] > 0 else 1.0
    with_sessions = model.sessions is not None
    several = turns[requests.session] > 1
    in_session = several[order] if with_sessions else np.zeros(count, dtype=bool)
    think = requests.think_s[order] * stretch
    frame = pl.DataFrame(
        {
            "arrival_s": arrival * stretch,
            "input_tokens": requests.input_tokens[order],
            "output_tokens": requests.output_tokens[order],
            "slo_class": pl.Series([classes[s] for s in requests.session[order]], dtype=pl.String),
            "session_id": pl.Series(
                [f"s{s}" if many else None for s, many in zip(requests.session[order], in_session, strict=True)],
                dtype=pl.String,
            ),
            "turn": pl.Series(
                [int(t) if many else None for t, many in zip(requests.turn[order], in_session, strict=True)],
                dtype=pl.Int32,
            ),
            "think_s": pl.Series([None if np.isnan(t) else float(t) for t in think], dtype=pl.Float64),
            "hash_ids": pl.Series(_hash_ids(requests, order, model, random), dtype=pl.List(pl.UInt64)),
        }
    ).select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
    has_ids = frame["hash_ids"].null_count() < frame.height
    text = f"{model!r} n={count} rate={mean_rate!r} seed={seed}"
    return Trace(
        frame=frame,
        format="synthetic",
        source=f"synthetic-of-{source}",
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        report=ReadReport(read=count, kept=count),
        block_size=model.prefixes.block_size if has_ids and model.prefixes else None,
        history=(f"drawn from the shape of {source}: {count} requests, rate {mean_rate:.6g}/s, seed {seed}",),
    )


@dataclass(slots=True)
class _Requests:
    """Columns of the requests being drawn, session after session."""

    session: np.ndarray
    turn: np.ndarray
    arrival_s: np.ndarray
    think_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray


def _turns(model: SessionModel | None, count: int, random: np.random.Generator) -> np.ndarray:
    """Return turns of each session, `count` in all."""
    if model is None:
        return np.ones(count, dtype=np.int64)
    sizes: list[int] = []
    left = count
    while left > 0:
        size = max(1, int(np.rint(model.turns.at(random.random(1))[0])))
        sizes.append(min(size, left))
        left -= sizes[-1]
    return np.array(sizes, dtype=np.int64)


def _starts(model: ArrivalModel, count: int, random: np.random.Generator) -> np.ndarray:
    """Return the starts of `count` sessions: gaps of the fitted marginal whose ranks drift slowly."""
    shocks = random.normal(size=count) * np.sqrt(1.0 - model.decay**2)
    shocks[:1] = random.normal(size=min(1, count))
    slow = np.array(list(accumulate(shocks.tolist(), lambda last, shock: model.decay * last + shock)))
    scores = np.sqrt(model.weight) * slow + np.sqrt(1.0 - model.weight) * random.normal(size=count)
    gaps = model.gaps.at(cdf(scores))
    return np.concatenate([[0.0], np.cumsum(gaps[1:])])


def _lengths(
    models: tuple[LengthModel, ...], count: int, random: np.random.Generator
) -> tuple[list[str | None], np.ndarray, np.ndarray]:
    edges = np.cumsum([model.share for model in models])[:-1]
    which = np.searchsorted(edges, random.random(count), side="right")
    first, noise = random.normal(size=(2, count))
    inputs, outputs = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for index, model in enumerate(models):
        mine = which == index
        second = model.correlation * first[mine] + np.sqrt(1 - model.correlation**2) * noise[mine]
        inputs[mine] = _whole(model.inputs.at(cdf(first[mine])))
        outputs[mine] = _whole(model.outputs.at(cdf(second)))
    return [models[index].slo_class for index in which], inputs, outputs


def _follow_ups(requests: _Requests, model: SessionModel, max_input: int, random: np.random.Generator) -> None:
    """Fill in arrivals, think times and lengths of the turns after the first of each session."""
    later = np.flatnonzero(requests.turn > 0)
    rank, growth_rank, output_rank = random.random((3, len(later)))
    gaps = model.gaps_s.at(rank)
    growth = model.growth.at(growth_rank)
    outputs = _whole(model.outputs.at(output_rank))
    # The same rank for gap and pause: a long gap is mostly a long pause.
    think = None if model.think_s is None else np.minimum(np.maximum(model.think_s.at(rank), 0.0), gaps)
    for position, row in enumerate(later):
        requests.arrival_s[row] = requests.arrival_s[row - 1] + gaps[position]
        prompt = requests.input_tokens[row - 1] + growth[position]
        requests.input_tokens[row] = min(max_input, max(1, round(float(prompt))))
        requests.output_tokens[row] = outputs[position]
        if think is not None:
            requests.think_s[row] = think[position]


def _hash_ids(
    requests: _Requests, order: np.ndarray, model: TraceModel, random: np.random.Generator
) -> list[list[int] | None]:
    """Return the ids of the requests in the order of arrival; new blocks are numbered from 0."""
    prefixes = model.prefixes
    if prefixes is None:
        return [None] * len(order)
    shared_turn = model.sessions.shared if model.sessions is not None else None
    chance, share, distance = random.random((3, len(order)))
    blocks = -(-requests.input_tokens[order] // prefixes.block_size)
    group = np.searchsorted(np.array(prefixes.limits), blocks, side="left")
    shares = np.zeros(len(order))
    for index, shared in enumerate(prefixes.shared):
        shares[group == index] = shared.at(share[group == index])
    reuses = chance < np.array(prefixes.reused)[group]
    turn_shares = np.zeros(len(order)) if shared_turn is None else shared_turn.at(share)
    distances = np.maximum(1, np.rint(prefixes.distance.at(distance))).astype(np.int64)
    drawn: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    fresh = 0
    for position, row in enumerate(order):
        session = int(requests.session[row])
        donor: list[int] = []
        wanted = 0
        if requests.turn[row] > 0 and shared_turn is not None:
            donor = latest.get(session, [])
            wanted = round(float(turn_shares[position]) * len(donor))
        elif reuses[position] and position:
            wanted = max(1, round(float(shares[position]) * int(blocks[position])))
            donor = drawn[_donor(blocks[:position], int(distances[position]), wanted)]
        ids = donor[: min(wanted, int(blocks[position]))]
        new = int(blocks[position]) - len(ids)
        ids = [*ids, *range(fresh, fresh + new)]
        fresh += new
        drawn.append(ids)
        latest[session] = ids
    return list(drawn)


def _donor(blocks: np.ndarray, distance: int, wanted: int) -> int:
    """Return the request nearest to `distance` ago with at least `wanted` blocks, or the longest in reach."""
    end = max(1, len(blocks) - distance + 1)
    begin = max(0, end - DONOR_REACH)
    fitting = np.flatnonzero(blocks[begin:end] >= wanted)
    if len(fitting):
        return begin + int(fitting[-1])
    later = np.flatnonzero(blocks[end:] >= wanted)
    if len(later):
        return end + int(later[0])
    return begin + int(np.argmax(blocks[begin:end]))


def _whole(values: np.ndarray) -> np.ndarray:
    return np.maximum(1, np.rint(values)).astype(np.int64)
