"""One request of a replay: what was due, what came back, and the row it leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from time import time

from headway.replay.stream import MOST_BYTES, TokenStream, error_code, error_message
from headway.replay.targets import Targets

#: HTTP codes that mean "refused": a decision of the server, not a fault.
REFUSALS = (429, 503)

#: Error code of a refusal that no retry would change; it comes as a 400.
NEVER_FITS = "never_fits"

#: Characters of a server's error code that are kept.
REASON_CHARS = 200

#: Characters of a server's error message that are kept.
MESSAGE_CHARS = 120


class Call:
    """State of one request while it is in flight. Times are `time.perf_counter()`; the row counts from `zero`."""

    __slots__ = (
        "_count",
        "_done",
        "_size",
        "_whole",
        "due",
        "end",
        "http_status",
        "index",
        "input_tokens",
        "max_tokens",
        "message",
        "queue_s",
        "reason",
        "released",
        "retry_after_s",
        "sent",
        "session_id",
        "slo_class",
        "status",
        "stream",
        "targets",
        "trace_row",
        "ttft_bound_s",
    )

    def __init__(
        self,
        *,
        index: int,
        trace_row: int,
        due: float,
        input_tokens: int,
        max_tokens: int,
        slo_class: str | None,
        session_id: str | None,
        targets: Targets,
        done: Callable[[Call], None],
        count: Callable[[str], int] | None = None,
    ) -> None:
        self.index = index
        self.trace_row = trace_row
        self.due = due
        self.released = due  # when the client's own cap let it go; `due` without a cap
        self.input_tokens = input_tokens
        self.max_tokens = max_tokens
        self.slo_class = slo_class
        self.session_id = session_id
        self.targets = targets
        self.sent: float | None = None
        self.end: float | None = None
        self.http_status: int | None = None
        self.status: str | None = None
        self.reason: str | None = None
        self.message: str | None = None  # of the server, with a failure
        self.retry_after_s: float | None = None
        self.ttft_bound_s: float | None = None
        self.queue_s: float | None = None
        self.stream = TokenStream()
        self._done = done  # told when the exchange is over
        self._count = count  # tokens of a text, where the tokenizer is known
        self._size = 0  # bytes of that body
        self._whole: list[bytes] | None = None  # body of an answer that is no stream

    def slo_headers(self) -> dict[str, str]:
        """Return the headers that tell a Headway server its class and targets."""
        headers = {} if self.slo_class is None else {"x-slo-class": self.slo_class}
        for key, value in self.targets.as_dict().items():
            if value is not None:
                headers[f"x-slo-{key.removesuffix('_s')}-ms"] = f"{value * 1e3:.10g}"
        return headers

    def on_sent(self, now: float) -> None:
        """Note the moment of the write."""
        self.sent = now

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Read the status, Retry-After and what a Headway server promises."""
        self.http_status = status
        self.retry_after_s = retry_after(headers)
        self.ttft_bound_s = _milliseconds(headers.get("x-headway-ttft-bound-ms"))
        self.queue_s = _milliseconds(headers.get("x-headway-queue-ms"))
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            self.close("failed", f"content_encoding:{encoding}", self.sent)
        if status != 200 or headers.get("content-type", "").startswith("application/json"):
            self._whole = []

    def on_data(self, data: bytes, now: float) -> None:
        """Take a piece of the body."""
        if self._whole is None:
            self.stream.feed(data, now)
        else:
            self._size += len(data)
            if self._size <= MOST_BYTES:
                self._whole.append(data)

    def on_end(self, error: str | None, now: float) -> None:
        """Settle the outcome and hand the call back."""
        if error is not None:
            self.close("failed", self.stream.error or error, now)
        elif self.http_status != 200:
            self._close_http(b"".join(self._whole or []), now)
        else:
            if self._whole is None:
                self.stream.finish(now, self._count)
            else:
                self.stream.whole(b"".join(self._whole), now)
            self._close_stream(now)
        self._done(self)

    def close(self, status: str, reason: str | None, end: float, message: str | None = None) -> None:
        """Set the outcome, with the server's own words if it had any; the first one stays."""
        if self.status is None:
            self.status, self.end = status, end
            # Code and message come from the server: of any length, and not always text that a file can hold.
            self.reason = None if reason is None else _storable(reason[:REASON_CHARS])
            self.message = _shortened(message or self.stream.message)

    def _close_http(self, body: bytes, end: float) -> None:
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        code = f"http_{self.http_status}"
        message = parsed if isinstance(parsed, str) else body[: 4 * MESSAGE_CHARS].decode("utf-8", "replace")
        if isinstance(parsed, dict):
            code, message = error_code(parsed, code), error_message(parsed) or message
        refused = self.http_status in REFUSALS or code == NEVER_FITS
        self.close("refused" if refused else "failed", code, end, message)

    def _close_stream(self, end: float) -> None:
        stream = self.stream
        if stream.error is not None:
            self.close("failed", stream.error, end)
        elif not stream.token_times:
            self.close("failed", "no_tokens", end)
        elif not stream.complete:
            self.close("failed", "dropped", end)
        else:
            self.close("ok", None, end)

    def row(self, zero: float) -> dict:
        """Return the row of `record.SCHEMA`; points in time count from `zero`, microseconds kept."""
        times = self.stream.token_times
        first, last = (times[0], times[-1]) if times else (None, None)
        ttft = first - self.due if times else None
        tpot = (last - first) / (len(times) - 1) if len(times) > 1 else None
        widest = max(map(float.__sub__, times[1:], times)) if len(times) > 1 else None
        attained = self.status == "ok" and self.targets.met(ttft_s=ttft, tpot_s=tpot, tbt_max_s=widest)
        return {
            "index": self.index,
            "trace_row": self.trace_row,
            "slo_class": self.slo_class,
            "session_id": self.session_id,
            "input_tokens": self.input_tokens,
            "max_tokens": self.max_tokens,
            "prompt_tokens": self.stream.prompt_tokens,
            "generated_tokens": len(times),
            "status": self.status,
            "http_status": self.http_status,
            "reason": self.reason,
            "retry_after_s": self.retry_after_s,
            "scheduled_s": _since(zero, self.due),
            "sent_s": _since(zero, self.sent),
            "first_token_s": _since(zero, first),
            "first_answer_s": _since(zero, self.stream.first_answer),
            "last_token_s": _since(zero, last),
            "end_s": _since(zero, self.end),
            "ttft_s": _round(ttft),
            "service_ttft_s": _round(first - self.sent) if times and self.sent is not None else None,
            "tpot_s": _round(tpot),
            "tbt_max_s": _round(widest),
            "e2e_s": _round(last - self.due) if times else None,
            "ttft_target_s": self.targets.ttft_s,
            "tpot_target_s": self.targets.tpot_s,
            "tbt_target_s": self.targets.tbt_s,
            "attained": attained,
            "ttft_bound_s": self.ttft_bound_s,
            "queue_s": self.queue_s,
            "token_s": [round(time - zero, 6) for time in times],
        }


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _shortened(message: str | None) -> str | None:
    """Return a message on one line of at most `MESSAGE_CHARS` characters; None for an empty one."""
    line = " ".join((message or "")[: 8 * MESSAGE_CHARS].split())
    return _storable(line if len(line) <= MESSAGE_CHARS else f"{line[: MESSAGE_CHARS - 3]}...") or None


def retry_after(headers: dict[str, str]) -> float | None:
    """Return the seconds of `retry-after-ms` or `Retry-After` (number or date); None when absent or broken."""
    exact = _milliseconds(headers.get("retry-after-ms"))
    if exact is not None:
        return exact
    value = headers.get("retry-after")
    if value is None:
        return None
    told = _seconds(value)
    if told is not None:
        return told
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, OverflowError, OSError):
        return None


def _milliseconds(value: str | None) -> float | None:
    seconds = None if value is None else _seconds(value)
    return None if seconds is None else seconds / 1e3


def _seconds(value: str) -> float | None:
    """Return a number of a header; None for text and for what no wait can be."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _since(zero: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - zero, 6)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
