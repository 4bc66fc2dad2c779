"""Checks of hash ids: how many a prompt may have, and that they are chained."""

from __future__ import annotations

import polars as pl

from headway.errors import InputError
from headway.trace.source import Source


def check_counts(source: Source, frame: pl.DataFrame, block_size: int, *, exact: bool = False) -> None:
    """Refuse a row with more ids than blocks of `block_size` in its prompt (`exact`: with another number)."""
    blocks = -(-frame["input_tokens"] // block_size)
    counts = frame["hash_ids"].list.len()
    bad = ((counts != blocks) if exact else (counts > blocks)).fill_null(False) & (frame["input_tokens"] > 0)
    if bad.any():
        row = int(bad.arg_max() or 0)
        word = "exactly" if exact else "at most"
        expected = f"{word} {blocks[row]} ids: one for each {block_size} of {frame['input_tokens'][row]} input tokens"
        raise InputError.at(source.path, frame["line"][row], "hash_ids", f"{counts[row]} ids", expected)


def check_chained(source: Source, frame: pl.DataFrame) -> None:
    """Refuse ids that are not chained: one id stands for a whole prefix, so it always follows the same id."""
    pairs = frame.select(
        "line",
        pl.col("hash_ids").alias("id"),
        pl.col("hash_ids").list.shift(1).alias("parent"),
    ).explode("id", "parent")
    pairs = pairs.filter(pl.col("id").is_not_null())
    first = pairs.unique("id", keep="first", maintain_order=False).select("id", pl.col("parent").alias("first"))
    wrong = pairs.join(first, on="id").filter(pl.col("parent").ne_missing(pl.col("first"))).sort("line")
    if wrong.height:
        line, block, parent, other = wrong.row(0)
        raise InputError.at(
            source.path,
            line,
            "hash_ids",
            block,
            f"an id that always follows the same id, not {parent} and {other}",
        )
