"""Results of a simulation, row by row into the columns of a real run (`headway.replay.record`)."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from headway.core import Reason
from headway.replay.record import SCHEMA
from headway.twin.job import Job

_ROWS = 16_384

#: Columns that the recorder fills; the others are derived in `frame` or null.
_FILLED = {
    "index": pl.Int32(),
    "status": pl.String(),
    "http_status": pl.Int32(),
    "reason": pl.String(),
    "retry_after_s": pl.Float64(),
    "max_tokens": pl.Int32(),
    "prompt_tokens": pl.Int32(),
    "generated_tokens": pl.Int32(),
    "scheduled_s": pl.Float64(),
    "first_token_s": pl.Float64(),
    "last_token_s": pl.Float64(),
    "end_s": pl.Float64(),
    "tbt_max_s": pl.Float64(),
    "ttft_target_s": pl.Float64(),
    "tpot_target_s": pl.Float64(),
    "tbt_target_s": pl.Float64(),
    "ttft_bound_s": pl.Float64(),
    "queue_s": pl.Float64(),
    "token_s": pl.List(pl.Float64()),
}


class Recorder:
    """Takes finished, refused and cut-off requests; `frame` gives the table.

    Args:
        front_s: time outside the engine, added to every token that a client sees.
        keep_tokens: keep the arrival of every token (8 bytes each), which gap percentiles need.
    """

    def __init__(self, *, front_s: float = 0.0, keep_tokens: bool = True) -> None:
        self.front_s = front_s
        self.keep_tokens = keep_tokens
        self.preempted_requests = 0
        self.cached_tokens = 0
        self._rows: list[tuple] = []
        self._parts: list[pl.DataFrame] = []

    def finished(self, job: Job, run: NDArray[np.float64]) -> None:
        """A request got its last token; `run` are the times of the tokens since its last interruption."""
        times = run if not job.early else np.concatenate((job.early, run))
        self._answered(job, "ok", times, None)

    def cut_off(self, job: Job, now: float, times: list[float]) -> None:
        """The run ended before the request did."""
        self._answered(job, "cut_off", np.array(times), now)

    def refused(self, job: Job, now: float, reason: Reason, retry_after_s: float | None) -> None:
        """A request was refused at `now`."""
        state, slo = job.state, job.slo
        code = 400 if reason is Reason.NEVER_FITS else 429
        self._add(
            (
                *(job.row, "refused", code, reason.value, retry_after_s, state.max_output_tokens, None, 0),
                *(state.arrival_s, None, None, now + self.front_s, None),
                *(slo.ttft_s, slo.tpot_s, slo.tbt_s, None, None, []),
            )
        )

    def _answered(self, job: Job, status: str, times: NDArray[np.float64], now: float | None) -> None:
        state, slo, front, n = job.state, job.slo, self.front_s, len(times)
        gap = float((times[1:] - times[:-1]).max()) if n > 1 else None
        first, last = (float(times[0]) + front, float(times[-1]) + front) if n else (None, None)
        bound = None if state.bound_s is None else state.bound_s + front - state.arrival_s
        queued = None if job.start_s is None else job.start_s - state.arrival_s
        self.preempted_requests += state.preemptions > 0
        self.cached_tokens += job.hit_tokens
        self._add(
            (
                *(job.row, status, 200, None if now is None else "end_of_run", None),
                *(state.max_output_tokens, state.prompt_tokens, n, state.arrival_s),
                *(first, last, last if now is None else now, gap),
                *(slo.ttft_s, slo.tpot_s, slo.tbt_s, bound, queued),
                (times + front).tolist() if self.keep_tokens else [],
            )
        )

    def _add(self, row: tuple) -> None:
        self._rows.append(row)
        if len(self._rows) >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._parts.append(pl.DataFrame(self._rows, schema=_FILLED, orient="row"))
            self._rows = []

    def frame(self, trace: pl.DataFrame, first_row: int = 0) -> pl.DataFrame:
        """Return the table of `record.SCHEMA`, ordered by index; `trace` gives what the twin does not carry."""
        self._flush()
        rows = pl.concat(self._parts) if self._parts else pl.DataFrame(schema=_FILLED)
        given = trace.select("slo_class", "session_id", "input_tokens").with_row_index("index")
        table = rows.sort("index").join(given.cast({"index": pl.Int32}), on="index", how="left", maintain_order="left")
        ok = pl.col("status") == "ok"
        n = pl.col("generated_tokens")
        table = table.with_columns(
            trace_row=pl.col("index") + first_row,
            sent_s=pl.col("scheduled_s"),
            first_answer_s=pl.col("first_token_s"),
            ttft_s=pl.col("first_token_s") - pl.col("scheduled_s"),
            service_ttft_s=pl.col("first_token_s") - pl.col("scheduled_s"),
            tpot_s=pl.when(n > 1).then((pl.col("last_token_s") - pl.col("first_token_s")) / (n - 1)),
            e2e_s=pl.when(ok).then(pl.col("last_token_s") - pl.col("scheduled_s")),
        )
        measured = {"ttft_s": "ttft_target_s", "tpot_s": "tpot_target_s", "tbt_max_s": "tbt_target_s"}
        met = [(pl.col(value) <= pl.col(target)).fill_null(True) for value, target in measured.items()]
        table = table.with_columns(attained=ok & pl.all_horizontal(met))
        return table.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
