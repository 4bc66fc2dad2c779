"""BurstGPT traces (github.com/HPMLL/BurstGPT, CC-BY-4.0): CSV.

Columns: `Timestamp` (seconds since local midnight of the first day: whole in file 1, fractions in file 3),
`Model`, `Request tokens`, `Response tokens` (0: the call failed), `Total tokens`, `Log Type`. File 3 inserts
`Session ID` (set for conversations only) and `Elapsed time` (end to end on their service) as columns two and
three, so columns are read by name. A session says nothing of shared prefixes.
"""

from __future__ import annotations

import polars as pl

from headway.trace.assemble import MAX_SPAN_S, Rows
from headway.trace.csv_table import converted, read_csv, to_number
from headway.trace.sessions import with_turns
from headway.trace.source import Source

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_EXTRA = ("Session ID", "Elapsed time")
_KEYS = {"arrival_s": "Timestamp", "input_tokens": "Request tokens", "output_tokens": "Response tokens"}


def fits(source: Source) -> bool:
    """Tell whether the header has BurstGPT's columns, with or without the two extra ones."""
    header = set(source.csv_header())
    return header in (set(COLUMNS), {*COLUMNS, *_EXTRA})


def read(source: Source) -> Rows:
    """Read either layout."""
    table = read_csv(source, COLUMNS, optional=_EXTRA)
    frame = pl.DataFrame(
        {
            "line": table["line"],
            "arrival_s": to_number(source, table, "Timestamp", pl.Float64, "seconds"),
            "input_tokens": to_number(source, table, "Request tokens", pl.Int64, "a whole number of tokens"),
            "output_tokens": to_number(source, table, "Response tokens", pl.Int64, "a whole number of tokens"),
        }
    )
    if "Session ID" not in table.columns:
        return Rows(frame=frame, keys=_KEYS)
    elapsed = table["Elapsed time"].replace("", None).cast(pl.Float64, strict=False)
    elapsed = elapsed.set((~elapsed.is_between(0, MAX_SPAN_S)).fill_null(False), None)
    elapsed = converted(source, table, "Elapsed time", elapsed, "0 or more seconds", allow_empty=True)
    if not (frame["arrival_s"].diff() >= 0).fill_null(True).all():
        return Rows(frame=frame, keys=_KEYS)  # out of order: refused for its line before sessions matter
    session = table["Session ID"].replace("", None)
    frame, notes = with_turns(
        frame.with_columns(session.alias("session_id"), (frame["arrival_s"] + elapsed).alias("end_s"))
    )
    return Rows(frame=frame.drop("end_s"), notes=notes, keys=_KEYS)
