"""LLMServingSim files (github.com/casys-kaist/LLMServingSim, MIT): JSON lines of two kinds.

Workloads: `arrival_time_ns`, `input_toks`, `output_toks` and, in some, `hash_ids` of 16-token blocks.
Measured vLLM runs: `request_id`, `input_toks`, `output_toks`, `arrival_time` (epoch seconds) and four `_ts`
on another, monotonic clock that must not be subtracted from it; only the arrival is used here.
"""

from __future__ import annotations

import polars as pl

from headway.errors import InputError
from headway.trace.assemble import Rows
from headway.trace.blocks import check_counts
from headway.trace.json_table import read_jsonl
from headway.trace.source import Source

BLOCK_SIZE = 16
_LENGTHS = {"input_toks": "int", "output_toks": "int"}
_WORKLOAD = {**_LENGTHS, "arrival_time_ns": "int"}
_MEASURED = {**_LENGTHS, "arrival_time": "float"}
_STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def fits(source: Source) -> bool:
    """Tell whether the first row is a workload row or a measured one."""
    keys = source.first_object().keys()
    return keys >= _WORKLOAD.keys() or keys >= _MEASURED.keys() | {"queued_ts"}


def read(source: Source) -> Rows:
    """Read either kind; measured rows lie in the order in which they finished."""
    workload = source.first_object().keys() >= _WORKLOAD.keys()
    if workload:
        table = read_jsonl(source, _WORKLOAD, {"hash_ids": "ids", "request_id": "str"})
    else:
        optional = {"request_id": "str", **dict.fromkeys(_STAMPS, "float")}
        table = read_jsonl(source, _MEASURED, optional)
    clock = "arrival_time_ns" if workload else "arrival_time"
    if (bad := table[clock] < 0).any():
        row = int(bad.arg_max() or 0)
        raise InputError.at(source.path, table["line"][row], clock, table[clock][row], "0 or more")
    # Whole nanoseconds are subtracted before they become a float, which would keep only 0.2 us of an epoch.
    arrival = (pl.col(clock) - pl.col(clock).min()) / (1e9 if workload else 1.0)
    frame = table.select(
        "line",
        arrival.alias("arrival_s"),
        pl.col("input_toks").alias("input_tokens"),
        pl.col("output_toks").alias("output_tokens"),
        *(["hash_ids"] if workload else []),
    )
    if workload:
        check_counts(source, frame, BLOCK_SIZE)
    keys = {"arrival_s": clock, "input_tokens": "input_toks", "output_tokens": "output_toks"}
    return Rows(frame=frame, block_size=BLOCK_SIZE if workload else None, unsorted=True, keys=keys)
