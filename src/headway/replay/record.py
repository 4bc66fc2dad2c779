"""What one replayed request leaves behind: the columns of `requests.parquet`.

Every `_s` column is in seconds. Points in time count from the start of the run (the scheduled time of a request
with arrival 0); durations are named for what they measure. A value that was never reached is null, never 0.
"""

from __future__ import annotations

import polars as pl

#: What became of a request. Only `ok` can attain its targets; all four count in the denominator.
STATUSES = ("ok", "refused", "failed", "cut_off")

#: Column -> type of `requests.parquet`, one row a request, ordered by `index`.
SCHEMA: dict[str, pl.DataType] = {
    "index": pl.Int32(),  # position in the replayed slice of the trace
    "trace_row": pl.Int32(),  # position in the whole trace
    "slo_class": pl.String(),
    "session_id": pl.String(),
    "input_tokens": pl.Int32(),  # asked for
    "max_tokens": pl.Int32(),  # output asked for
    "prompt_tokens": pl.Int32(),  # reported by the server's usage
    "generated_tokens": pl.Int32(),  # received
    "status": pl.String(),  # one of STATUSES
    "http_status": pl.Int32(),
    "reason": pl.String(),  # error code of a refusal, or what failed
    "retry_after_s": pl.Float64(),
    "scheduled_s": pl.Float64(),  # when it was due
    "sent_s": pl.Float64(),  # when the client really wrote the request
    "first_token_s": pl.Float64(),
    "first_answer_s": pl.Float64(),  # first token that is not reasoning; equals first_token_s without reasoning
    "last_token_s": pl.Float64(),
    "end_s": pl.Float64(),  # response finished, refused or failed
    "ttft_s": pl.Float64(),  # first token - SCHEDULED arrival
    "service_ttft_s": pl.Float64(),  # first token - sent: the service-time view, blind to a late client
    "tpot_s": pl.Float64(),  # (last token - first token) / (tokens - 1); null below two tokens
    "tbt_max_s": pl.Float64(),  # widest gap between two tokens
    "e2e_s": pl.Float64(),  # last token - scheduled arrival
    "ttft_target_s": pl.Float64(),  # null: no target
    "tpot_target_s": pl.Float64(),
    "tbt_target_s": pl.Float64(),
    "attained": pl.Boolean(),  # status ok and every target met
    "ttft_bound_s": pl.Float64(),  # promise of the server (x-headway-ttft-bound-ms), where it makes one
    "queue_s": pl.Float64(),  # queue time told by the server (x-headway-queue-ms)
    "token_s": pl.List(pl.Float64()),  # arrival of every token; a chunk of m tokens repeats its time m times
}
