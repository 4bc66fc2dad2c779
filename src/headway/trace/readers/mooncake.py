"""Mooncake traces (github.com/kvcache-ai/Mooncake, FAST 2025, Apache-2.0): JSON lines.

Keys: `timestamp` (ms from 0), `input_length`, `output_length` (tokens), `hash_ids` (blocks of 512 tokens,
chained: one id always follows the same id; the short last block has an id too). In the real traces arrivals
are rounded to ticks 3 s apart, so they arrive as a train of bursts: spread them (`select(spread_s=3)`) and
say so. Output tokens have no ids.
"""

from __future__ import annotations

import polars as pl

from headway.trace.assemble import Rows
from headway.trace.blocks import check_chained, check_counts
from headway.trace.json_table import read_jsonl
from headway.trace.source import Source

BLOCK_SIZE = 512
REQUIRED = {"timestamp": "float", "input_length": "int", "output_length": "int"}
OPTIONAL = {"hash_ids": "ids"}
_KEYS = {"arrival_s": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"}
#: A trace counts as rounded to ticks when the median of its distinct arrivals has at least this many requests.
TICK_CROWD = 3


def fits(source: Source) -> bool:
    """Tell whether the first row has Mooncake's keys and no others, a numeric time and a list of ids."""
    first = source.first_object()
    return (
        first.keys() >= REQUIRED.keys()
        and first.keys() <= REQUIRED.keys() | OPTIONAL.keys()
        and isinstance(first["timestamp"], int | float)
        and isinstance(first.get("hash_ids", []), list)
    )


def read(source: Source) -> Rows:
    """Read the file; the number of ids and their chain are checked."""
    table = read_jsonl(source, REQUIRED, OPTIONAL)
    frame = table.select(
        "line",
        (pl.col("timestamp") / 1000.0).alias("arrival_s"),
        pl.col("input_length").alias("input_tokens"),
        pl.col("output_length").alias("output_tokens"),
        "hash_ids",
    )
    check_counts(source, frame, BLOCK_SIZE, exact=True)
    check_chained(source, frame)
    notes = []
    crowd = frame.group_by("arrival_s").len()["len"].median()
    gaps = frame["arrival_s"].unique().sort().diff().drop_nulls()
    if crowd is not None and crowd >= TICK_CROWD and len(gaps):
        notes.append(
            f"arrivals are rounded to ticks about {gaps.median():.3g} s apart with {crowd:g} requests each (median): "
            "spread them to avoid artificial bursts"
        )
    return Rows(frame=frame, block_size=BLOCK_SIZE, notes=tuple(notes), keys=_KEYS)
