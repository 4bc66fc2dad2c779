"""Typed columns out of a file of JSON lines; a bad value is reported with its line and key.

Two ways to the same table: Polars parses all lines at once; when it meets anything out of the ordinary, the
file is read again line by line, which is slow but knows which line, key and value to name. The slow way
decides what is an error.

Polars leaves out keys that it was not told of. They are found by counting: the file has as many keys as the known
columns have values, or it is read for its schema first, which takes as long as reading it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import polars as pl

from headway.errors import InputError
from headway.trace.json_values import parse
from headway.trace.source import Source

#: Kind of a key -> (what a value must be, in words; type of the column).
KINDS: dict[str, tuple[str, pl.DataType]] = {
    "int": ("a whole number", pl.Int64()),
    "float": ("a number", pl.Float64()),
    "str": ("a string", pl.String()),
    "ids": ("a list of whole numbers from 0 to 2^64-1", pl.List(pl.UInt64())),
}
#: How a number, a boolean, an object or a list looks that Polars made a string of.
_NO_STRING = r"^(-?[0-9]|true$|false$|\{|\[)"


def objects(source: Source, *, may_be_cut: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of every line; a line that is no JSON object is an `InputError`.

    `may_be_cut` skips a last line without an end of line that is no JSON: its writer was killed.
    """
    for number, text in source.lines():
        try:
            value = parse(source, number, text)
        except InputError:
            if may_be_cut and not text.endswith("\n"):
                return
            raise
        if not isinstance(value, dict):
            raise InputError.at(source.path, number, None, value, "a JSON object")
        yield number, value


def read_jsonl(
    source: Source,
    required: Mapping[str, str],
    optional: Mapping[str, str],
    *,
    skip_first: bool = False,
    may_be_cut: bool = False,
) -> pl.DataFrame:
    """Return the keys as columns (key -> kind of `KINDS`), with line numbers in column `line`.

    Optional keys may be absent or null; an unknown key is an error. `skip_first` leaves out a header line;
    `may_be_cut` is that of `objects`.
    """
    known = {**required, **optional}
    frame = _all_at_once(source, required, known, skip_first)
    return frame if frame is not None else _line_by_line(source, required, known, skip_first, may_be_cut)


def _all_at_once(
    source: Source, required: Mapping[str, str], known: Mapping[str, str], skip_first: bool
) -> pl.DataFrame | None:
    """Return the table, or None when anything about the file calls for a closer look."""
    header = source.first_object().keys() if skip_first else set()
    marks = _marks(source, skip_first)
    found: Mapping[str, pl.DataType] = {name: KINDS[kind][1] for name, kind in known.items()}
    try:
        frame = pl.read_ndjson(source.path, schema=found)
        if marks.escapes or marks.nulls or marks.keys != _values(frame, skip_first):
            found = pl.scan_ndjson(source.path, infer_schema_length=None).collect_schema()
            if found.keys() - known.keys() - header:
                return None
            schema = {name: KINDS[known[name]][1] if name in known else kind for name, kind in found.items()}
            if any(not _agrees(known[name], kind) for name, kind in found.items() if name in known):
                return None
            frame = pl.read_ndjson(source.path, schema=schema)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return None
    if frame.height != marks.lines:
        return None  # empty lines, which would shift the line numbers
    frame = frame.with_row_index("line", offset=1).with_columns(pl.col("line").cast(pl.Int64))
    if skip_first:
        frame = frame.slice(1)
    only_header = [name for name in found if name in header and name not in known]
    if any(frame[name].null_count() < frame.height for name in only_header):
        return None
    frame = frame.with_columns(
        pl.lit(None, dtype=KINDS[kind][1]).alias(name) for name, kind in known.items() if name not in found
    ).select("line", *known)
    for name, kind in known.items():
        column = frame[name]
        if name in required and column.null_count():
            return None
        # Polars turns whatever it finds among strings into a string.
        if kind == "str" and column.str.contains(_NO_STRING).any():
            return None
        if kind == "ids" and column.list.eval(pl.element().is_null()).list.any().any():
            return None
    return frame


def _agrees(kind: str, found: pl.DataType) -> bool:
    """Tell whether a column that Polars found to be `found` can hold only values of `kind`."""
    if found == pl.Null:
        return True
    if kind == "float":
        return found in (pl.Int64, pl.Float64)
    if kind == "ids":
        return isinstance(found, pl.List)  # wrong elements stop the strict parse
    return found == KINDS[kind][1]


class _Marks(NamedTuple):
    """What the bytes of a file of JSON lines show without being parsed."""

    lines: int
    keys: int  # colons that follow a quote, below the header
    nulls: bool  # whether a null may be in it
    escapes: bool  # whether a string may hold a quote


def _marks(source: Source, skip_first: bool) -> _Marks:
    lines = keys = 0
    nulls = escapes = False
    block = b"\n"
    with source.path.open("rb") as file:
        if skip_first:
            while not file.readline().strip():
                lines += 1
            lines += 1
        while piece := file.read(1 << 22):
            block = piece + file.readline()  # whole lines, so that no mark lies across two blocks
            lines += block.count(b"\n")
            keys += block.count(b'":')
            nulls = nulls or b"null" in block
            escapes = escapes or b"\\" in block
    return _Marks(lines + (block[-1:] != b"\n"), keys, nulls, escapes)


def _values(frame: pl.DataFrame, skip_first: bool) -> int:
    """Return how many values the columns hold, those of the header line left out."""
    rows = frame.slice(1) if skip_first else frame
    return sum(rows.height - count for count in rows.null_count().row(0))


def _line_by_line(
    source: Source, required: Mapping[str, str], known: Mapping[str, str], skip_first: bool, may_be_cut: bool
) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {name: [] for name in ("line", *known)}
    for count, (number, row) in enumerate(objects(source, may_be_cut=may_be_cut)):
        if skip_first and count == 0:
            continue
        if unknown := row.keys() - known.keys():
            key = min(unknown)
            raise InputError.at(source.path, number, key, row[key], f"only the keys {', '.join(known)}")
        columns["line"].append(number)
        for name, kind in known.items():
            value = row.get(name)
            if value is None:
                if name in required:
                    raise InputError.at(source.path, number, name, value, KINDS[kind][0])
            elif not _is(kind, value):
                raise InputError.at(source.path, number, name, value, KINDS[kind][0])
            columns[name].append(value)
    schema = {"line": pl.Int64(), **{name: KINDS[kind][1] for name, kind in known.items()}}
    return pl.DataFrame(columns, schema=schema)


def _is(kind: str, value: object) -> bool:
    if kind == "int":
        return type(value) is int and abs(value) < 2**63
    if kind == "float":
        return type(value) in (int, float)
    if kind == "str":
        return type(value) is str
    return type(value) is list and all(type(item) is int and 0 <= item < 2**64 for item in value)
