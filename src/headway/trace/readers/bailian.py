"""Qwen-Bailian traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0): JSON lines.

Keys: `chat_id`, `parent_chat_id` (-1: root), `timestamp` (seconds), `input_length` (with the history of the
chat), `output_length`, `type` (text, search, image, file, ...), `turn` (from 1), `hash_ids` (salted hashes of
16-token blocks). A session is a chain of parents; its id here is the `chat_id` of the oldest ancestor in the
file. When answers ended is not told, so think times are not known.
"""

from __future__ import annotations

import polars as pl

from headway.errors import InputError
from headway.trace.assemble import Rows
from headway.trace.blocks import check_counts
from headway.trace.json_table import read_jsonl
from headway.trace.source import Source

BLOCK_SIZE = 16
REQUIRED = {"chat_id": "int", "timestamp": "float", "input_length": "int", "output_length": "int"}
OPTIONAL = {"parent_chat_id": "int", "type": "str", "turn": "int", "hash_ids": "ids"}
ROOT = -1
_KEYS = {"arrival_s": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"}


def fits(source: Source) -> bool:
    """Tell whether the first row has the keys of a chat request."""
    return source.first_object().keys() >= REQUIRED.keys()


def read(source: Source) -> Rows:
    """Read the file and follow parents to the root of each session."""
    table = read_jsonl(source, REQUIRED, OPTIONAL)
    turns = table["turn"].fill_null(1)
    if (bad := turns < 1).any():
        row = int(bad.arg_max() or 0)
        raise InputError.at(source.path, table["line"][row], "turn", turns[row], "1 or more")
    roots, orphans = _roots(table)
    frame = table.select(
        "line",
        pl.col("timestamp").alias("arrival_s"),
        pl.col("input_length").alias("input_tokens"),
        pl.col("output_length").alias("output_tokens"),
        pl.Series("session_id", roots),
        (turns - 1).alias("turn"),
        "hash_ids",
    )
    check_counts(source, frame, BLOCK_SIZE)
    notes: tuple[str, ...] = ()
    if orphans:
        notes = (f"{orphans} requests have a parent that is not in the file: each starts a session here",)
    return Rows(frame=frame, block_size=BLOCK_SIZE, notes=notes, keys=_KEYS)


def _roots(table: pl.DataFrame) -> tuple[list[str], int]:
    """Return the session of every row, and how many rows name a parent that the file lacks."""
    root: dict[int, int] = {}
    orphans = 0
    for chat, parent in zip(table["chat_id"], table["parent_chat_id"].fill_null(ROOT), strict=True):
        if parent == ROOT:
            root[chat] = chat
        elif parent in root:
            root[chat] = root[parent]
        else:
            orphans += 1
            root[chat] = chat
    return [str(root[chat]) for chat in table["chat_id"]], orphans
