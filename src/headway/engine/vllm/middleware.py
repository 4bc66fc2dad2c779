"""The HTTP side: `--middleware headway.engine.vllm.middleware.SloMiddleware`.

On the way in it checks the SLO headers and hands them to the scheduler inside the request. On the way out it holds
the start of the response until the first body byte, because by then the scheduler's verdict is known: a refusal
decided inside the engine becomes a clean 429 before any byte of a stream, an accepted request gets its bound.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from headway.engine.base import MAX_GROUP, RequestTag
from headway.engine.front import Front
from headway.engine.vllm import headers as slo_headers
from headway.engine.vllm import inbox, refusal
from headway.engine.vllm.drain import Drain
from headway.engine.vllm.messages import ENV_EVENT_LOG, XARG, config_from_environment, encode_tag
from headway.engine.vllm.metrics import Metrics
from headway.engine.vllm.tenant import Tenants

logger = logging.getLogger("headway")

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Endpoints whose requests carry SLOs.
PATHS = ("/v1/completions", "/v1/chat/completions")

#: Bodies above this size are parsed off the event loop, so that one long prompt does not stall every stream.
LOOP_BYTES = 65_536

#: A front beyond this is a stall of the host, not what the next request must leave room for.
MAX_FRONT_MS = 1_000.0

#: Messages that are written as an event line, beside misses.
EVENTS = frozenset({"refused", "preempted", "drift"})

_TOO_LONG = ("maximum context length", "maximum model length", "max_model_len")


class SloMiddleware:
    """ASGI middleware between vLLM's server and its routes.

    Args:
        app: what it wraps.
        install: called with `deliver`, which must get every message of the engine; default: vLLM's output loop.
        registry: where the `headway_` series go. Of several instances in one process, all of which get every
            message, the first one of a registry counts them and writes the events.
    """

    def __init__(
        self,
        app: App,
        *,
        install: Callable[[inbox.Deliver], None] = inbox.install,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.app = app
        self.config = config_from_environment()
        self._tenants = Tenants(self.config.tenant)
        self.metrics = Metrics.claim(registry)
        self.events = EventLog(os.environ.get(ENV_EVENT_LOG)) if self.metrics is not None else None
        self._open: dict[str, _Exchange] = {}
        self._front = Front()
        self._drain = Drain(self._cut)
        install(self.deliver)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            self._drain.watch(scope)
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if not scope["path"].endswith(PATHS):
            name = slo_headers.first(scope["headers"])
            if name is None:
                await self.app(scope, receive, send)
                return
            # A target that nobody would keep must not be taken in silence.
            await _read_body(receive)
            text = f"{name}: expected only on {' and '.join(PATHS)}, not on {scope['path'][:80]}"
            await _answer(send, 400, [], refusal.error_body(text, code="bad_slo_header", status=400, param=name))
            return
        arrived = time.time()
        # All of it even for a request that is refused for its headers: what is left unread costs the connection.
        body, gone = await _read_body(receive)
        if gone is not None:
            return
        if self._drain.draining:
            await _answer(send, *refusal.draining())
            return
        try:
            slo = slo_headers.parse(scope["headers"], self.config.classes)
        except slo_headers.HeaderError as error:
            answer = refusal.error_body(str(error), code="bad_slo_header", status=400, param=error.header)
            await _answer(send, 400, [], answer)
            return
        front = self._front.seconds if self.config.front_ms is None else None
        tag = RequestTag(
            group=uuid.uuid4().hex,
            arrival_unix_s=arrived,
            tenant=self._tenants.of(scope["headers"]) if self.config.fair_share else None,
            front_ms=None if front is None else min(1e3 * front, MAX_FRONT_MS),
            **slo,  # type: ignore[arg-type]
        )
        if len(body) > LOOP_BYTES:
            body = await asyncio.to_thread(self._tagged, body, tag)
        else:
            body = self._tagged(body, tag)
        exchange = _Exchange(send, arrived, self._front, self._drain)
        self._open[tag.group] = exchange
        try:
            await self.app(_with_length(scope, len(body)), _replay(body, receive), exchange.send)
        except asyncio.CancelledError:
            if not exchange.was_cut:
                raise
            await exchange.end()
        finally:
            self._open.pop(tag.group, None)

    def _cut(self) -> None:
        """End what is still open when the time to drain is over."""
        for exchange in list(self._open.values()):
            exchange.cut()

    def _tagged(self, body: bytes, tag: RequestTag) -> bytes:
        if self.config.bookings:
            tag = dataclasses.replace(tag, fingerprint=self._tenants.fingerprint(tag.tenant, body))
        return tag_body(body, tag)

    def deliver(self, message: dict[str, Any]) -> None:
        """Take one message of the engine (called from vLLM's output loop, in this process)."""
        kind = message["kind"]
        if kind in ("refused", "accepted", "first_token"):
            exchange = self._open.get(message["group"])
            if exchange is not None:
                exchange.learn(message)
        if self.metrics is not None:
            self.metrics.record(message, time.monotonic())
        if self.events is not None and (
            kind in ("refused", "preempted", "drift") or (kind == "done" and message["missed"])
        ):
            self.events.write("miss" if kind == "done" else kind, message)


class _Exchange:
    """One response on its way out: held until the verdict is known."""

    def __init__(self, send: Send, arrived: float, front: Front, drain: Drain) -> None:
        self._drain = drain
        self._send = send
        self._arrived = arrived  # Unix seconds
        self._front = front
        self._token_s: float | None = None  # arrival to the first token's step, seconds
        self._start: Event | None = None
        self._passing = False
        self._dropping = False
        self._error: list[bytes] | None = None
        self._refused: dict[str, Any] | None = None
        self._headers: refusal.Headers = []
        self._task = asyncio.current_task()
        self.was_cut = False

    def cut(self) -> None:
        """Stop waiting for the rest of the response; `end` tells the client."""
        if self._task is not None:
            self.was_cut = True
            self._task.cancel()

    async def end(self) -> None:
        """End a response that was cut: a stream with an error event, what has not begun as a refusal."""
        assert self._task is not None
        self._task.uncancel()
        if self._dropping:
            return
        if not self._passing:
            await _answer(self._send, *refusal.draining())
            return
        _, _, error = refusal.draining()
        kinds = [value for name, value in (self._start or {}).get("headers", ()) if name.lower() == b"content-type"]
        event = b"data: " + error + b"\n\ndata: [DONE]\n\n" if kinds and b"event-stream" in kinds[0] else b""
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    def learn(self, message: dict[str, Any]) -> None:
        if message["kind"] == "refused":
            self._refused = message
        elif message["kind"] == "accepted" and message["bound_s"] is not None:
            self._headers.append((b"x-headway-ttft-bound-ms", f"{message['bound_s'] * 1e3:.0f}".encode()))
        elif message["kind"] == "first_token":
            # Of several sequences the first one to have a token; the body that carries it follows.
            self._token_s = message["since_arrival_s"] if self._token_s is None else self._token_s
            self._headers = [h for h in self._headers if h[0] != b"x-headway-queue-ms"]
            self._headers.append((b"x-headway-queue-ms", f"{message['queue_s'] * 1e3:.0f}".encode()))

    async def send(self, event: Event) -> None:
        if self._dropping:
            return
        if self._passing:
            await self._send(event)
            return
        if event["type"] == "http.response.start":
            self._start = event
            if event["status"] == 400:
                self._error = []
            return
        if event["type"] != "http.response.body" or self._start is None:
            await self._send(event)
            return
        if self._refused is not None:
            self._dropping = True
            await _answer(self._send, *refusal.answer(self._refused))
            return
        if self._start["status"] >= 500 and self._drain.draining:
            # It came in the moment of the signal, when the engine took nothing more.
            self._dropping = True
            await _answer(self._send, *refusal.draining())
            return
        if self._error is not None:
            self._error.append(event.get("body", b""))
            if not event.get("more_body", False):
                await self._send_error(b"".join(self._error))
            return
        self._passing = True
        self._start["headers"] = [*self._start.get("headers", ()), *self._headers]
        await self._send(self._start)
        await self._send(event)
        if (
            event.get("more_body", False) and self._token_s is not None
        ):  # a whole answer comes long after its first token
            self._front.add(time.time() - self._arrived - self._token_s)

    async def _send_error(self, body: bytes) -> None:
        """Give vLLM's own refusal of an over-long prompt the code that all such refusals have."""
        assert self._start is not None
        try:
            parsed = json.loads(body)
            message = parsed["error"]["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            message = None
        if isinstance(message, str) and any(words in message for words in _TOO_LONG):
            parsed["error"]["code"] = "never_fits"
            body = json.dumps(parsed).encode()
            kept = [h for h in self._start.get("headers", ()) if h[0].lower() != b"content-length"]
            self._start["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        self._passing = True
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})


class EventLog:
    """One JSON line an event, to a file or to standard error."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        if path is not None:
            with open(path, "a", encoding="utf-8"):
                pass  # a path that cannot be written is an error now, not at the first event

    def write(self, event: str, message: dict[str, Any]) -> None:
        """Write the event with its numbers; a full disk must not stop serving."""
        fields = {k: v for k, v in message.items() if v is not None and k != "kind"}
        line = json.dumps({"event": f"headway_{event}", "unix_s": round(time.time(), 3), **fields})
        try:
            if self._path is None:
                print(line, file=sys.stderr, flush=True)
                return
            # Opened each time, so that the file may be rotated.
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            logger.warning("headway: cannot write an event: %s", error)


def tag_body(body: bytes, tag: RequestTag) -> bytes:
    """Return the JSON body with the tag in `vllm_xargs`; what is no JSON object is left for vLLM to refuse."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(request, dict):
        return body
    xargs = request.get("vllm_xargs")
    if xargs is not None and not isinstance(xargs, dict):
        return body
    explicit = request.get("max_tokens") is not None or request.get("max_completion_tokens") is not None
    full = dataclasses.replace(tag, size=_sequences(request), explicit_max_tokens=explicit)
    # Ours last: whatever a client sends under this name is overwritten.
    request["vllm_xargs"] = {**(xargs or {}), XARG: encode_tag(full)}
    try:
        return json.dumps(request).encode()
    except RecursionError:
        return body


def _sequences(request: dict[str, Any]) -> int:
    """Engine requests that vLLM makes of one HTTP request: n for each prompt."""
    n = request.get("n")
    try:
        n = int(n) if isinstance(n, (int, float, str)) and int(n) == float(n) else 1  # vLLM takes "2" and 2.0 as well
    except (ValueError, OverflowError):
        n = 1
    prompt = request.get("prompt")
    several = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else 1
    return min(max(n, 1) * several, MAX_GROUP)


async def _read_body(receive: Receive) -> tuple[bytes, Event | None]:
    parts: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return b"", event
        parts.append(event.get("body", b""))
        if not event.get("more_body", False):
            return b"".join(parts), None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the app the body once, then what the client does (a disconnect while it waits)."""
    done = False

    async def receive_again() -> Event:
        nonlocal done
        if done:
            return await receive()
        done = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _with_length(scope: Scope, length: int) -> Scope:
    kept = [h for h in scope["headers"] if h[0].lower() not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*kept, (b"content-length", str(length).encode())]}


async def _answer(send: Send, status: int, extra: refusal.Headers, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
