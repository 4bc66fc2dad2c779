"""Turns and think times of conversations, worked out from when requests began and ended."""

from __future__ import annotations

import polars as pl


def with_turns(frame: pl.DataFrame) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Return `frame` in the order of arrival with `turn` and `think_s` filled in, and what to note about it.

    `frame` has `arrival_s`, `session_id` (null: no session) and `end_s` (end of the answer, null: unknown),
    all times on one clock. Turns count from 0 in the order of arrival. The think time of a turn is its
    arrival minus the end of the turn before. A session with a turn that arrives before the one before has
    ended is no chain: its requests stay, but as independent ones.
    """
    frame = frame.sort("arrival_s", maintain_order=True)
    pause = pl.col("arrival_s") - pl.col("end_s").shift(1).over("session_id")
    frame = frame.with_columns(
        pl.int_range(pl.len()).over("session_id").cast(pl.Int32).alias("turn"), pause.alias("think_s")
    )
    grouped = frame.filter(pl.col("session_id").is_not_null()).group_by("session_id")
    overlapping = grouped.agg((pl.col("think_s") < 0).any().alias("bad")).filter("bad")["session_id"]
    known = pl.col("session_id").is_not_null() & ~pl.col("session_id").is_in(overlapping.implode())
    frame = frame.with_columns(
        pl.when(known).then(pl.col(name)).alias(name) for name in ("session_id", "turn", "think_s")
    )
    notes: tuple[str, ...] = ()
    if len(overlapping):
        notes = (f"{len(overlapping)} sessions with overlapping requests kept as independent requests",)
    return frame, notes
