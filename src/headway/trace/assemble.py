"""The last step of every reader: rows of a source become a `Trace`.

Here the rules that hold for all formats live: no negative or backward time, lengths in range, zero lengths
counted, times counted from the first arrival, and no row lost without a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

from headway.errors import InputError
from headway.trace.record import SCHEMA, ReadReport, Trace
from headway.trace.source import Source

ZeroOutput = Literal["drop", "one"]
ZERO_OUTPUT: tuple[str, ...] = ("drop", "one")
MAX_TOKENS = 2**31 - 1
#: Longest trace, seconds (317 years); more is a mistake in units or a broken value.
MAX_SPAN_S = 1e10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a reader found.

    `frame` has `arrival_s` (any origin), `input_tokens` and `output_tokens`, further columns of `SCHEMA`
    where the source tells, and `line` (number in the source, for errors; 0 where lines mean nothing).
    `dropped` counts rows that the reader left out, by reason; they are not in `frame`. `keys` names the
    source's own word for a column, for errors.
    """

    frame: pl.DataFrame
    block_size: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    unsorted: bool = False  # rows may come in another order than their arrivals (logs written at completion)
    notes: tuple[str, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)


def assemble(source: Source, format_name: str, rows: Rows, *, zero_output: str = "drop") -> Trace:
    """Return the trace of `rows`; raise `InputError` for values that no request can have."""
    if zero_output not in ZERO_OUTPUT:
        raise InputError(f"zero_output = {zero_output!r}: expected one of {', '.join(ZERO_OUTPUT)}")
    frame, dropped, notes = rows.frame, dict(rows.dropped), list(rows.notes)
    read = frame.height + sum(dropped.values())
    _check(source, rows)
    frame, dropped, notes = _zero_lengths(frame, dropped, notes, zero_output)
    if rows.unsorted:
        frame = frame.sort("arrival_s", maintain_order=True)
    if not frame.height:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise InputError(f"{source.path}: no request is left of {read} rows ({reasons or 'no rows'})")
    frame = frame.with_columns(pl.col("arrival_s") - pl.col("arrival_s").first())
    missing = [pl.lit(None, dtype=kind).alias(name) for name, kind in SCHEMA.items() if name not in frame.columns]
    frame = frame.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
    has_ids = frame["hash_ids"].null_count() < frame.height
    return Trace(
        frame=frame,
        format=format_name,
        source=source.name,
        sha256=source.sha256(),
        report=ReadReport(read=read, kept=frame.height, dropped=dropped),
        block_size=rows.block_size if has_ids else None,
        history=tuple(notes),
    )


def _zero_lengths(
    frame: pl.DataFrame, dropped: dict[str, int], notes: list[str], zero_output: str
) -> tuple[pl.DataFrame, dict[str, int], list[str]]:
    """Drop empty prompts and, by choice, requests that generated nothing: they failed upstream."""
    empty = frame["input_tokens"] == 0
    if count := int(empty.sum()):
        dropped["zero input tokens"] = dropped.get("zero input tokens", 0) + count
        frame = frame.filter(~empty)
    failed = frame["output_tokens"] == 0
    if count := int(failed.sum()):
        if zero_output == "drop":
            dropped["zero output tokens"] = dropped.get("zero output tokens", 0) + count
            frame = frame.filter(~failed)
        else:
            notes.append(f"{count} requests with zero output tokens kept with one")
            frame = frame.with_columns(pl.col("output_tokens").clip(lower_bound=1))
    return frame, dropped, notes


def _check(source: Source, rows: Rows) -> None:
    frame = rows.frame
    _refuse(source, rows, "arrival_s", ~frame["arrival_s"].is_finite().fill_null(False), "a finite time")
    for name in ("input_tokens", "output_tokens"):
        bad = ((frame[name] < 0) | (frame[name] > MAX_TOKENS)).fill_null(True)
        _refuse(source, rows, name, bad, f"a whole number from 0 to {MAX_TOKENS}")
    if not rows.unsorted and frame.height > 1:
        back = (frame["arrival_s"].diff() < 0).fill_null(False)
        _refuse(source, rows, "arrival_s", back, "a time that is not before the row above")
    if frame.height:
        far = (frame["arrival_s"] - frame["arrival_s"].min()) > MAX_SPAN_S
        _refuse(source, rows, "arrival_s", far, f"a time at most {MAX_SPAN_S:g} s after the first")
    if "turn" in frame.columns:
        _refuse(source, rows, "turn", (frame["turn"] < 0).fill_null(False), "0 or more")
    if "think_s" in frame.columns:
        bad = ~frame["think_s"].is_between(0, MAX_SPAN_S).fill_null(True)
        _refuse(source, rows, "think_s", bad, f"0 to {MAX_SPAN_S:g} seconds")


def _refuse(source: Source, rows: Rows, name: str, bad: pl.Series, expected: str) -> None:
    if not bad.any():
        return
    index = int(bad.arg_max() or 0)
    line = int(rows.frame["line"][index]) or None
    value: Any = rows.frame[name][index]
    raise InputError.at(source.path, line, rows.keys.get(name, name), value, expected)
