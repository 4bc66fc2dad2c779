"""The HTTP answer to a refused request: status, headers and OpenAI error body (docs/design.md, section 7)."""

from __future__ import annotations

import json
import math
from typing import Any

from headway.core import Reason

#: Code of the refusal -> HTTP status; what is not named is 429.
STATUS = {"never_fits": 400, "draining": 503}

_EXPLAIN = {
    "ttft_unattainable": "the first token cannot come within the target",
    "tbt_unattainable": "the engine cannot keep the pace of one more stream",
    "kv_exhausted": "the KV cache cannot hold one more request of this size",
    "never_fits": "this request cannot meet its targets on this server even when served alone",
    "queue_full": "the queue is full",
    "tenant_share": "more than this API key's share of a class that cannot serve everybody",
    "draining": "the server is shutting down",
}

Headers = list[tuple[bytes, bytes]]


def answer(message: dict[str, Any]) -> tuple[int, Headers, bytes]:
    """Return status, headers and body for a `refused` message of the engine.

    Retry-After is in whole seconds, at least 1; both headers are absent when the wait is unknown or would not help.
    """
    code = message["reason"]
    numbers = {
        "class": message["slo_class"],
        "ttft_target_ms": _ms(message["ttft_target_s"]),
        "ttft_bound_ms": _ms(message["bound_s"]),
        "tpot_target_ms": _ms(message["tpot_target_s"]),
        "tbt_target_ms": _ms(message["tbt_target_s"]),
        "pace_bound_ms": _ms(message["pace_bound_s"]),
        "prompt_tokens": message["prompt_tokens"],
    }
    text = _EXPLAIN.get(code, "the request was refused")
    if message["detail"] is not None:
        text += f": {message['detail']}"
    elif numbers["ttft_bound_ms"] is not None and numbers["ttft_target_ms"] is not None:
        text += f": {numbers['ttft_bound_ms']:g} ms could be promised, {numbers['ttft_target_ms']:g} ms were asked for"
    headers: Headers = []
    wait = message["retry_after_s"]
    if wait is not None and math.isfinite(wait) and code != "never_fits":
        headers.append((b"retry-after", str(max(1, math.ceil(wait))).encode()))
        headers.append((b"retry-after-ms", str(max(1, math.ceil(wait * 1e3))).encode()))
    status = STATUS.get(code, 429)
    body = error_body(text, code=code, status=status, headway={k: v for k, v in numbers.items() if v is not None})
    return status, headers, body


def draining() -> tuple[int, Headers, bytes]:
    """Return the answer to a request that comes when the server was asked to stop, as `answer` does.

    How long another one takes to be there instead is not known here, so there is no Retry-After.
    """
    code = Reason.DRAINING.value
    return STATUS[code], [], error_body(_EXPLAIN[code], code=code, status=STATUS[code])


def error_body(
    message: str, *, code: str, status: int, param: str | None = None, headway: dict[str, Any] | None = None
) -> bytes:
    """Return an OpenAI error body."""
    kind = {400: "invalid_request_error", 503: "service_unavailable"}.get(status, "slo_unattainable")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if headway:
        error["headway"] = headway
    return json.dumps({"error": error}).encode()


def _ms(seconds: float | None) -> float | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    milliseconds = seconds * 1e3
    return round(milliseconds, 1) if abs(milliseconds) >= 1 else float(f"{milliseconds:.2g}")
