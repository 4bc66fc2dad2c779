"""What a replay adds up while it runs: outcomes, lateness, how tokens were counted."""

from __future__ import annotations

import time
from dataclasses import dataclass

from headway.replay import honesty
from headway.replay.failures import Failures
from headway.replay.record import STATUSES
from headway.replay.request import Call

#: An answer of at least so many tokens that came in one piece was buffered somewhere.
_BUFFERED_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a replay is; counts of requests."""

    total: int
    sent: int
    in_flight: int
    ok: int
    attained: int
    refused: int
    failed: int
    cut_off: int
    elapsed_s: float
    span_s: float  # of the trace

    @property
    def finished(self) -> int:
        """Requests with an outcome."""
        return self.ok + self.refused + self.failed + self.cut_off


class Ledger:
    """Running totals over finished requests."""

    def __init__(self, total: int, span_s: float) -> None:
        self.total = total
        self.span_s = span_s
        self.counts = dict.fromkeys((*STATUSES, "attained", "sent"), 0)
        self.tokens = 0
        self._lateness: list[float] = []
        self._counted_by: dict[str, int] = {}
        self._prompt_deltas: list[int] = []
        self._buffered = 0
        self._failures = Failures()

    def keep(self, call: Call, row: dict) -> None:
        """Count one finished request."""
        counts, stream = self.counts, call.stream
        counts[row["status"]] += 1
        counts["attained"] += row["attained"]
        self.tokens += len(stream.token_times)
        if call.sent is not None:
            counts["sent"] += 1
            # Waiting for the client's own cap is not lateness of the client: it was asked for, and reported apart.
            self._lateness.append(call.sent - call.released)
        if call.status == "ok":
            how = stream.counted_by or "chunk"
            self._counted_by[how] = self._counted_by.get(how, 0) + 1
            times = stream.token_times
            self._buffered += len(times) >= _BUFFERED_TOKENS and times[0] == times[-1]
        if call.status == "failed":
            message = None if call.message == call.reason else call.message
            self._failures.add(call.http_status, call.reason or "unknown", message)
        if stream.prompt_tokens is not None:
            self._prompt_deltas.append(stream.prompt_tokens - call.input_tokens)

    def progress(self, in_flight: int, zero: float) -> Progress:
        """Return how far the replay is."""
        counts = self.counts
        return Progress(
            total=self.total,
            sent=counts["sent"] + in_flight,
            in_flight=in_flight,
            attained=counts["attained"],
            elapsed_s=max(0.0, time.perf_counter() - zero),
            span_s=self.span_s,
            **{status: counts[status] for status in STATUSES},
        )

    def facts(self, *, lag: list[float], used: honesty.CpuUse, limit_s: float, gone: bool) -> dict:
        """Return what goes into `run.json` at the end: honesty of the client and whether the run is valid.

        `gone`: nobody listened at the server's address any more when the run was over.
        """
        lateness, loop_lag = honesty.spread(self._lateness), honesty.spread(lag)
        reasons = honesty.verdict(lateness=lateness, loop_lag=loop_lag, limit_s=limit_s)
        reasons += honesty.nothing_served(self.counts, self.tokens)
        if gone:
            reasons.append(f"the server was gone at the end (failed requests: {self.counts['failed']})")
        deltas = self._prompt_deltas
        return {
            "valid": not reasons,
            "invalid_reasons": reasons,
            "client": {
                "lateness": lateness,
                "lateness_limit_ms": round(limit_s * 1e3, 3),
                "loop_lag": loop_lag,
                "cpu_s": round(used.cpu_s, 4),
                "cpu_wait_s": None if used.wait_s is None else round(used.wait_s, 4),
                "tokens": self.tokens,
                "cpu_s_per_1000_tokens": round(used.cpu_s / self.tokens * 1e3, 5) if self.tokens else None,
            },
            "failures": self._failures.facts(),
            "tokens_counted_by": self._counted_by,
            "buffered_responses": self._buffered,
            "prompt_tokens_minus_asked": {
                "n": len(deltas),
                "min": min(deltas, default=None),
                "max": max(deltas, default=None),
            },
            "not_offered": self.total - sum(self.counts[status] for status in STATUSES),
        }
