"""Headway's own trace file: JSON lines whose keys are the columns of a trace (`headway.trace.record.SCHEMA`).

An optional first line is the header: `{"headway_trace": 1, "block_size": 16, "history": ["..."]}`. It is
needed when rows carry `hash_ids`. Keys that are null may be left out; a key that is not a column is an error.

`"recorded": true` in the header marks a live recording (`headway.trace.recorder`): rows lie in the order of
completion, rows with `dropped` count requests without lengths, and a last line without its end was cut short
by a kill.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from headway.errors import InputError
from headway.trace.assemble import Rows
from headway.trace.blocks import check_counts
from headway.trace.json_table import read_jsonl
from headway.trace.record import SCHEMA, Trace
from headway.trace.source import Source

VERSION = 1
CUT_LINE = "line cut short by a kill"
REQUIRED = {"arrival_s": "float", "input_tokens": "int", "output_tokens": "int"}
OPTIONAL = {"slo_class": "str", "session_id": "str", "turn": "int", "think_s": "float", "hash_ids": "ids"}
_HEADER_KEYS = {"headway_trace", "block_size", "history", "recorded"}


def fits(source: Source) -> bool:
    """Tell whether the first line is our header or a row with our three required keys."""
    first = source.first_object()
    return "headway_trace" in first or first.keys() >= REQUIRED.keys()


def read(source: Source) -> Rows:
    """Read the file; rows must be in the order of arrival."""
    first = source.first_object()
    header = first if "headway_trace" in first else {}
    if header:
        _check_header(source, header)
    dropped: dict[str, int] = {}
    if header.get("recorded"):
        frame, dropped = _recorded(source)
    else:
        frame = read_jsonl(source, REQUIRED, OPTIONAL, skip_first=bool(header))
    block_size = header.get("block_size")
    with_ids = frame["hash_ids"].is_not_null()
    if with_ids.any() and block_size is None:
        line = int(frame["line"][int(with_ids.arg_max() or 0)])
        raise InputError.at(
            source.path, line, "hash_ids", frame.filter(with_ids)["hash_ids"][0].to_list()[:3],
            'a first line with the block size, such as {"headway_trace": 1, "block_size": 16}',
        )  # fmt: skip
    if block_size is not None:
        check_counts(source, frame, block_size)
    return Rows(
        frame=frame,
        block_size=block_size,
        dropped=dropped,
        unsorted=bool(header.get("recorded")),
        notes=tuple(header.get("history", ())),
    )


def _recorded(source: Source) -> tuple[pl.DataFrame, dict[str, int]]:
    """Return the rows of a live recording, and the requests without lengths by reason."""
    lengths = ("input_tokens", "output_tokens")
    required = {"arrival_s": REQUIRED["arrival_s"]}
    optional = {**{name: REQUIRED[name] for name in lengths}, **OPTIONAL, "dropped": "str"}
    table = read_jsonl(source, required, optional, skip_first=True, may_be_cut=True)
    reasons = table["dropped"].drop_nulls().value_counts().sort("dropped")
    dropped = dict(zip(reasons["dropped"].to_list(), reasons["count"].to_list(), strict=True))
    if table.height < sum(1 for _ in source.lines()) - 1:
        dropped[CUT_LINE] = 1
    frame = table.filter(pl.col("dropped").is_null()).drop("dropped")
    for name in lengths:
        if (bad := frame[name].is_null()).any():
            line = int(frame["line"][int(bad.arg_max() or 0)])
            raise InputError.at(source.path, line, name, None, "a whole number")
    return frame, dropped


def write(trace: Trace, path: str | Path) -> None:
    """Write `trace` to `path`; the same trace gives the same bytes, and reading them gives the same table."""
    header: dict[str, Any] = {"headway_trace": VERSION}
    if trace.block_size is not None:
        header["block_size"] = trace.block_size
    if trace.history:
        header["history"] = list(trace.history)
    filled = [name for name in SCHEMA if trace.frame[name].null_count() < trace.frame.height]
    try:
        with Path(path).open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            trace.frame.select(filled).write_ndjson(file)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _check_header(source: Source, header: dict[str, Any]) -> None:
    if type(header["headway_trace"]) is not int or header["headway_trace"] != VERSION:
        raise InputError.at(source.path, 1, "headway_trace", header["headway_trace"], f"version {VERSION}")
    if unknown := header.keys() - _HEADER_KEYS:
        key = min(unknown)
        raise InputError.at(source.path, 1, key, header[key], f"only the keys {', '.join(sorted(_HEADER_KEYS))}")
    size = header.get("block_size")
    if size is not None and (type(size) is not int or size < 1):
        raise InputError.at(source.path, 1, "block_size", size, "a whole number of tokens, 1 or more")
    if type(header.get("recorded", False)) is not bool:
        raise InputError.at(source.path, 1, "recorded", header["recorded"], "true or false")
    history = header.get("history", [])
    if not isinstance(history, list) or not all(isinstance(item, str) for item in history):
        raise InputError.at(source.path, 1, "history", history, "a list of strings")
