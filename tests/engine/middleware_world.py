"""A middleware between a scripted application that behaves as vLLM does and a scripted client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headway.engine.base import RequestTag
from headway.engine.vllm.messages import ENV_CONFIG, ENV_EVENT_LOG, XARG, decode_tag
from headway.engine.vllm.middleware import Event, Receive, Scope, Send, SloMiddleware

PATHS = ("/v1/completions", "/v1/chat/completions")

Script = Callable[["World", RequestTag, Send, Receive], Awaitable[None]]


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Return every value of a header."""
    return [value for key, value in headers if key.lower() == name]


class World:
    """A middleware, the application inside it, and what the client sees."""

    def __init__(self, script: Script | None = None) -> None:
        self.deliver: Callable[[dict[str, Any]], None] = lambda message: None
        self.script = script
        self.seen: list[Event] = []  # what the application received
        self.scopes: list[Scope] = []
        self.sent: list[Event] = []
        self.bodies: list[bytes] = []
        self.middleware = SloMiddleware(self.app, install=self.install, registry=CollectorRegistry())

    def install(self, deliver: Callable[[dict[str, Any]], None]) -> None:
        """Stand in for vLLM's output loop."""
        self.deliver = deliver

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then play the script."""
        self.scopes.append(scope)
        if scope["type"] != "http":
            await send({"type": "other"})
            return
        event = await receive()
        self.seen.append(event)
        self.bodies.append(event["body"])
        assert not event.get("more_body", False)
        tag = None
        if event["body"].startswith(b"{"):
            tag = decode_tag(json.loads(event["body"]).get("vllm_xargs", {}).get(XARG))
        assert self.script is not None
        await self.script(self, tag or RequestTag(group="none"), send, receive)

    async def post(
        self,
        body: bytes | list[bytes] | None = None,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        path: str = PATHS[0],
        method: str = "POST",
        then: Iterable[Event] = (),
    ) -> World:
        """Send a request whose body comes in one or several parts."""
        parts = [b'{"prompt":"x"}'] if body is None else [body] if isinstance(body, bytes) else body
        events: list[Event] = [
            {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)
        ]
        queue = iter([*events, *then])

        async def receive() -> Event:
            event = next(queue, None)
            if event is None:
                await asyncio.Event().wait()
            assert event is not None
            return event

        async def send(event: Event) -> None:
            self.sent.append(event)

        scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"h"), *headers]}
        await self.middleware(scope, receive, send)
        return self

    @property
    def status(self) -> int:
        """Status of the response; it started exactly once."""
        (start,) = [event for event in self.sent if event["type"] == "http.response.start"]
        assert self.sent[0] is start
        status: int = start["status"]
        return status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the response."""
        return list(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        """Body of the response; it ended exactly once, with its last event."""
        ends = [event for event in self.sent[1:] if not event.get("more_body", False)]
        assert ends == [self.sent[-1]]
        return b"".join(event.get("body", b"") for event in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error of the response; its length is right."""
        assert header(self.headers, b"content-length") == [str(len(self.body)).encode()]
        assert header(self.headers, b"content-type") == [b"application/json"]
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def refused(tag: RequestTag, **changes: Any) -> dict[str, Any]:
    """Return the engine's message."""
    message = {
        "kind": "refused",
        "group": tag.group,
        "reason": "ttft_unattainable",
        "slo_class": "chat",
        "ttft_target_s": 1.0,
        "tpot_target_s": None,
        "tbt_target_s": None,
        "prompt_tokens": 9,
        "detail": None,
        "bound_s": 2.0,
        "pace_bound_s": None,
        "retry_after_s": 1.5,
    }
    return message | changes


def done(tag: RequestTag, *missed: str) -> dict[str, Any]:
    """Return the engine's message at the end of a request."""
    keys = ["tpot_target_s", "tbt_target_s", "ttft_s", "tpot_s", "tbt_max_s", "prefill_queue_s", "decode_queue_s"]
    return dict.fromkeys(keys) | {
        "kind": "done",
        "group": tag.group,
        "slo_class": "chat",
        "ttft_target_s": 1.0,
        "promised": True,
        "aborted": False,
        "failed": False,
        "missed": list(missed),
        "prompt_tokens": 9,
        "output_tokens": 1,
        "prefill_compute_s": 0.1,
        "decode_compute_s": 0.0,
        "preemptions": 0,
    }


async def start(send: Send, status: int = 200, kind: bytes = b"text/event-stream") -> None:
    """Start a response."""
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def chunk(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send a part of the body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def stream(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
    """vLLM streams: the response starts before the engine answers."""
    await start(send)
    world.deliver({"kind": "accepted", "group": tag.group, "bound_s": 0.4})
    world.deliver({"kind": "first_token", "group": tag.group, "queue_s": 0.0214, "since_arrival_s": 0.1})
    await chunk(send, b"data: 1\n\n")
    await chunk(send, b"data: [DONE]\n\n")
    await chunk(send, b"", more=False)


async def refused_stream(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
    """vLLM streams an aborted request: 200 was started, then come empty chunks."""
    await start(send)
    world.deliver(refused(tag))
    await chunk(send, b'data: {"choices":[]}\n\n')
    await chunk(send, b"data: [DONE]\n\n")
    await chunk(send, b"", more=False)


async def refused_whole(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
    """vLLM answers an aborted request in one piece: 200 with an empty choice."""
    world.deliver(refused(tag))
    await start(send, kind=b"application/json")
    await chunk(send, b'{"choices":[{"finish_reason":"abort"}]}', more=False)


def write_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes, and a file for the events, which is returned."""
    (folder / "headway.toml").write_text('default_class = "chat"\n[class.chat]\nttft_ms = 1000\n[class.document]\n')
    monkeypatch.setenv(ENV_CONFIG, str(folder / "headway.toml"))
    monkeypatch.setenv(ENV_EVENT_LOG, str(folder / "events.jsonl"))
    return folder / "events.jsonl"
