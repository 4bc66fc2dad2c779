"""Headway's own record of a run (`requests.parquet`): what was offered becomes a trace to offer again.

A run that was killed has left its finished requests in `requests.jsonl.part`, one a line; they are read as well.
The arrival is the scheduled one. A request that finished has the lengths that the server counted; one that
was refused, failed or was cut off keeps the lengths that were asked for, because it was offered all the same.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from headway.errors import InputError
from headway.trace.assemble import Rows
from headway.trace.json_table import objects
from headway.trace.sessions import with_turns
from headway.trace.source import Source

FILE = "requests.parquet"
PART = "requests.jsonl.part"
_MAGIC = b"PAR1"
COLUMNS: dict[str, pl.DataType] = {
    "slo_class": pl.String(),
    "session_id": pl.String(),
    "input_tokens": pl.Int32(),
    "max_tokens": pl.Int32(),
    "prompt_tokens": pl.Int32(),
    "generated_tokens": pl.Int32(),
    "status": pl.String(),
    "scheduled_s": pl.Float64(),
    "end_s": pl.Float64(),
}


def fits(source: Source) -> bool:
    """Tell whether the source is a Parquet file or the folder of a run."""
    if source.is_folder:
        return any((source.path / name).is_file() for name in (FILE, PART))
    return source.head.startswith(_MAGIC)


def read(source: Source) -> Rows:
    """Read the requests of a run."""
    path = source.path / FILE if source.is_folder else source.path
    killed = source.is_folder and not path.is_file()
    table = _part(Source(source.path / PART)) if killed else _table(path)
    done = (table["status"] == "ok").fill_null(False)
    generated = pl.when(done & (pl.col("generated_tokens") > 0)).then(pl.col("generated_tokens"))
    frame = table.select(
        pl.lit(0, dtype=pl.Int64).alias("line"),
        pl.col("scheduled_s").alias("arrival_s"),
        "end_s",
        pl.coalesce("prompt_tokens", "input_tokens").cast(pl.Int64).alias("input_tokens"),
        pl.coalesce(generated, pl.col("max_tokens")).cast(pl.Int64).alias("output_tokens"),
        "slo_class",
        "session_id",
    )
    frame, notes = with_turns(frame)
    if unfinished := int((~done).sum()):
        notes = (f"{unfinished} requests did not finish: their lengths are those asked for", *notes)
    if killed:
        notes = ("the run was killed: only its finished requests are here", *notes)
    return Rows(frame=frame.drop("end_s"), unsorted=True, notes=notes)


def _table(path: Path) -> pl.DataFrame:
    try:
        schema = pl.read_parquet_schema(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
    for name, kind in COLUMNS.items():
        if schema.get(name) != kind:
            raise InputError.at(path, None, name, str(schema.get(name)), f"a column of type {kind}")
    return pl.read_parquet(path, columns=list(COLUMNS))


def _part(source: Source) -> pl.DataFrame:
    """Return the finished requests of a killed run; a last line cut short never finished."""
    rows = [row for _, row in objects(source, may_be_cut=True)]
    columns = {name: [row.get(name) for row in rows] for name in COLUMNS}
    try:
        return pl.DataFrame(columns, schema=COLUMNS)
    except (TypeError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{source.path}: not the requests of a run: {str(error).splitlines()[0]}") from None
