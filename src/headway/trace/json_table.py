"""Typed columns out of a file of JSON lines; a bad value is reported with its line and key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from headway.errors import InputError
from headway.trace.source import Source

#: Kind of a key -> (what a value must be, in words; type of the column).
KINDS: dict[str, tuple[str, pl.DataType]] = {
    "int": ("a whole number", pl.Int64()),
    "float": ("a number", pl.Float64()),
    "str": ("a string", pl.String()),
    "ids": ("a list of whole numbers from 0 to 2^64-1", pl.List(pl.UInt64())),
}


def objects(source: Source, *, may_be_cut: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of every line; a line that is no JSON object is an `InputError`.

    `may_be_cut` skips a last line without an end of line that is no JSON: its writer was killed.
    """
    for number, text in source.lines():
        try:
            value = json.loads(text)
        except ValueError as error:
            if may_be_cut and not text.endswith("\n"):
                return
            raise InputError(f"{source.path}:{number}: not valid JSON ({error})") from None
        if not isinstance(value, dict):
            raise InputError.at(source.path, number, None, value, "a JSON object")
        yield number, value


def read_jsonl(
    source: Source,
    required: Mapping[str, str],
    optional: Mapping[str, str],
    *,
    skip_first: bool = False,
    ignore_unknown: bool = False,
    may_be_cut: bool = False,
) -> pl.DataFrame:
    """Return the keys as columns (key -> kind of `KINDS`), with line numbers in column `line`.

    Optional keys may be absent or null. An unknown key is an error unless `ignore_unknown`. `may_be_cut` is
    that of `objects`.
    """
    known = {**required, **optional}
    columns: dict[str, list[Any]] = {name: [] for name in ("line", *known)}
    for count, (number, row) in enumerate(objects(source, may_be_cut=may_be_cut)):
        if skip_first and count == 0:
            continue
        if not ignore_unknown and (unknown := row.keys() - known.keys()):
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
