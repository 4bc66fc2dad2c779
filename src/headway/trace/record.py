"""The one record type that every trace reader yields.

A trace is a table, one row a request, in the order of arrival. Times are seconds from the first arrival.
No column ever holds text of a prompt or an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

#: Column -> type of a trace table. Columns after `output_tokens` may be null.
SCHEMA: dict[str, pl.DataType] = {
    "arrival_s": pl.Float64(),  # seconds from the first arrival of the trace
    "input_tokens": pl.Int32(),  # whole prompt, >= 1
    "output_tokens": pl.Int32(),  # tokens that were generated, >= 1
    "slo_class": pl.String(),  # name of an SLO class, where the source tells
    "session_id": pl.String(),  # requests of one conversation share it
    "turn": pl.Int32(),  # 0-based turn within the session
    "think_s": pl.Float64(),  # pause between the end of the previous turn and this request
    # Chained prefix blocks: block i equal = the first (i+1)*block_size tokens equal. A short last block may
    # have an id or none, so there are at most ceil(input_tokens / block_size); tokens after the last id are
    # shared with nobody.
    "hash_ids": pl.List(pl.UInt64()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What became of the rows of a source: `read == kept + sum(dropped.values())`."""

    read: int
    kept: int
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows

    def __post_init__(self) -> None:
        if self.read != self.kept + sum(self.dropped.values()):
            raise ValueError(f"rows vanished: read {self.read}, kept {self.kept}, dropped {self.dropped}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A request trace: the table (`SCHEMA`), where it came from and what was dropped on the way."""

    frame: pl.DataFrame
    format: str  # name of the reader, "azure2023" for instance
    source: str  # file name without folders
    sha256: str  # of the bytes of the source
    report: ReadReport
    block_size: int | None = None  # tokens a hash id stands for; None when the trace carries none
    first_row: int = 0  # row of the source's trace at which this one begins, after a window was cut out of it
    history: tuple[str, ...] = ()  # what was done to the trace since it was read, and what to know of its source

    def __post_init__(self) -> None:
        if self.frame.schema != pl.Schema(SCHEMA):
            raise ValueError(f"trace columns {self.frame.schema} differ from {SCHEMA}")
        if (self.block_size is None) != (self.frame["hash_ids"].null_count() == self.frame.height):
            raise ValueError("a trace has a block size exactly when it has hash ids")

    def __len__(self) -> int:
        return self.frame.height

    @property
    def span_s(self) -> float:
        """Seconds between the first and the last arrival (0 for fewer than two requests)."""
        return float(self.frame["arrival_s"][-1]) if len(self) else 0.0

    def facts(self) -> dict[str, object]:
        """Return what a run records of its trace; runs are paired by these, so real and simulated ones share them."""
        return {
            "source": self.source,
            "format": self.format,
            "sha256": self.sha256,
            "requests": len(self),
            "span_s": self.span_s,
            "block_size": self.block_size,
            "selection": list(self.history),
        }
