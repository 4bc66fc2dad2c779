"""Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset, CC-BY-4.0).

Columns: `TIMESTAMP` (wall time of arrival), `ContextTokens`, `GeneratedTokens`. The header is the same in
both years; the stamps are not. 2023: naive, 7 decimals (100 ns), CRLF, no end of line at the end of the file.
2024: up to 6 decimals and an offset (`+00:00`). Tokens are those of the service's own tokenizer.
"""

from __future__ import annotations

import re

import polars as pl

from headway.errors import InputError
from headway.trace.assemble import Rows
from headway.trace.csv_table import converted, read_csv, to_number
from headway.trace.source import Source

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LIKE_2023 = "a time such as 2023-11-16 18:17:03.9799600"
_LIKE_2024 = "a time such as 2024-05-10 00:00:00.009930+00:00"
#: Years whose nanoseconds since 1970 fit 64 bits.
_FIRST_YEAR, _LAST_YEAR = 1700, 2261
_NAIVE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,9})?")
_OFFSET = re.compile(_NAIVE.pattern + r"[+-]\d\d:\d\d")
_KEYS = {"arrival_s": "TIMESTAMP", "input_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}


def fits_2023(source: Source) -> bool:
    """Tell whether header and first row are those of 2023."""
    return bool(_NAIVE.fullmatch(_first_stamp(source)))


def fits_2024(source: Source) -> bool:
    """Tell whether header and first row are those of 2024."""
    return bool(_OFFSET.fullmatch(_first_stamp(source)))


def read_2023(source: Source) -> Rows:
    """Read naive stamps; one with an offset is an error, not a guess."""
    return _read(source, "%Y-%m-%d %H:%M:%S%.f", _LIKE_2023)


def read_2024(source: Source) -> Rows:
    """Read stamps with an offset; a naive one is an error, not a guess."""
    return _read(source, "%Y-%m-%d %H:%M:%S%.f%:z", _LIKE_2024)


def _first_stamp(source: Source) -> str:
    if tuple(source.csv_header()) != COLUMNS:
        return ""
    rows = source.head_lines()[1:2]
    return rows[0].split(",")[0].strip().strip('"') if rows else ""


def explain(source: Source) -> InputError | None:
    """Return what is wrong with a file that has this header and no stamp of either year below it."""
    if tuple(source.csv_header()) != COLUMNS:
        return None
    if len(source.head_lines()) < 2:
        return InputError(f"{source.path}: no request is in it: expected rows below the header")
    return InputError.at(source.path, 2, "TIMESTAMP", _first_stamp(source), f"{_LIKE_2023} or {_LIKE_2024}")


def _read(source: Source, pattern: str, expected: str) -> Rows:
    table = read_csv(source, COLUMNS)
    stamps = table["TIMESTAMP"].str.to_datetime(pattern, time_unit="ns", time_zone=None, strict=False, exact=True)
    year = table["TIMESTAMP"].str.head(4).cast(pl.Int32, strict=False)
    stamps = stamps.set(~year.is_between(_FIRST_YEAR, _LAST_YEAR).fill_null(False), None)
    stamps = converted(source, table, "TIMESTAMP", stamps, expected).dt.epoch("ns")
    # Subtract as whole nanoseconds: epoch seconds as float would keep only about 0.2 us.
    first = stamps[0] if len(stamps) else 0
    frame = pl.DataFrame(
        {
            "line": table["line"],
            "arrival_s": (stamps - first).cast(pl.Float64) / 1e9,
            "input_tokens": to_number(source, table, "ContextTokens", pl.Int64, "a whole number of tokens"),
            "output_tokens": to_number(source, table, "GeneratedTokens", pl.Int64, "a whole number of tokens"),
        }
    )
    return Rows(frame=frame, keys=_KEYS)
