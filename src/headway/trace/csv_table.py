"""Typed columns out of a CSV file, checked as a whole; a bad value is reported with its line."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence

import polars as pl

from headway.errors import InputError
from headway.trace.source import Source

LINE = "line"


def read_csv(source: Source, columns: Sequence[str], *, optional: Sequence[str] = ()) -> pl.DataFrame:
    """Return the named columns as text, stripped, with their line numbers in column `line`.

    Columns are taken by name, never by position. Empty lines are skipped; a row with too few or too many
    fields is an error. Raises `InputError`.
    """
    header = source.csv_header()
    for name in columns:
        if name not in header:
            raise InputError.at(source.path, 1, "header", ",".join(header), f"a column {name!r}")
    wanted = [*columns, *(name for name in optional if name in header)]
    try:
        frame = pl.read_csv(source.path, infer_schema=False, columns=wanted)
    except pl.exceptions.PolarsError as error:
        raise _ragged(source, len(header), str(error)) from None
    frame = frame.with_row_index(LINE, offset=2).with_columns(pl.col(LINE).cast(pl.Int64))
    # Polars shows an empty line as a row of nulls, which keeps the count of lines right.
    frame = frame.filter(~pl.all_horizontal(pl.col(name).is_null() for name in wanted))
    return frame.with_columns(pl.col(name).str.strip_chars() for name in wanted)


def to_number(
    source: Source, frame: pl.DataFrame, name: str, kind: pl.DataType | type[pl.DataType], expected: str
) -> pl.Series:
    """Return column `name` as numbers of type `kind`; an unreadable value is an `InputError`."""
    return converted(source, frame, name, frame[name].cast(kind, strict=False), expected)


def converted(
    source: Source,
    frame: pl.DataFrame,
    name: str,
    values: pl.Series,
    expected: str,
    *,
    allow_empty: bool = False,
) -> pl.Series:
    """Return `values`, the conversion of column `name`; a null that was no empty field is an error."""
    bad = values.is_null()
    if allow_empty:
        bad = bad & frame[name].is_not_null()
    if bad.any():
        index = int(bad.arg_max() or 0)
        if frame[name][index] is None and (short := _short(source, int(frame[LINE][index]), name)):
            raise short
        raise InputError.at(source.path, int(frame[LINE][index]), name, frame[name][index], expected)
    return values


def _short(source: Source, line: int, name: str) -> InputError | None:
    """Return the error of a row that ends before column `name`; None when its field is there and empty."""
    header = source.csv_header()
    with source.path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        try:
            row = next(itertools.islice(csv.reader(file), line - 1, None), [])
        except csv.Error:
            return None
    if len(row) > header.index(name):
        return None
    return InputError(
        f"{source.path}:{line}: column {name!r} is missing: the row has {len(row)} of {len(header)} expected fields"
    )


def _ragged(source: Source, width: int, why: str) -> InputError:
    """Find the row that stopped the fast reader. Slow, but only on the way out."""
    with source.path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        for row in reader:
            if row and len(row) != width:
                return InputError.at(source.path, reader.line_num, None, ",".join(row), f"{width} fields")
    return InputError(f"{source.path}: not a CSV table: {why.splitlines()[0]}")
