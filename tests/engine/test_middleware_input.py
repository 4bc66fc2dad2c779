"""The HTTP side: bad input, and what is not ours to touch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from middleware_world import (
    PATHS,
    Script,
    World,
    chunk,
    header,
    start,
    stream,
    write_config,
)

from headway.engine.base import RequestTag
from headway.engine.vllm.middleware import Event, Receive, Scope, Send


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes, and a file for the events."""
    return write_config(tmp_path, monkeypatch)


# Bad input


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-slo-ttft-ms", b"soon")],
        [(b"x-slo-ttft-ms", b"100"), (b"X-SLO-TTFT-MS", b"100")],
        [(b"x-slo-ttft-ms", b"-1"), (b"x-slo-class", b"chat")],
    ],
)
async def test_a_bad_header_never_reaches_the_application(headers: list[tuple[bytes, bytes]]) -> None:
    """400 naming it; the body was read, so that the connection can be used again."""
    world = World(stream)
    read: list[int] = []
    parts = [b"{", b"}", b""]
    original = world.middleware

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_and_count() -> Event:
            read.append(1)
            return await receive()

        await original(scope, receive_and_count, send)

    world.middleware = counting  # type: ignore[assignment]
    await world.post(parts, headers=headers)
    assert (world.status, world.error["code"], world.error["param"]) == (400, "bad_slo_header", "x-slo-ttft-ms")
    assert world.scopes == []
    assert len(read) == len(parts)


async def test_an_unknown_class_lists_the_known_ones() -> None:
    """Those of headway.toml."""
    world = await World(stream).post(headers=[(b"x-slo-class", b"gold")])
    assert world.status == 400
    assert "expected one of chat, " in world.error["message"]


def vllm_error(message: str) -> Script:
    """Return an application that answers as vLLM does to a bad request."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        body = json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})
        length = (b"Content-Length", str(len(body)).encode())
        kind = (b"content-type", b"application/json")
        await send({"type": "http.response.start", "status": 400, "headers": [length, kind]})
        await chunk(send, body[:20].encode())
        await chunk(send, body[20:].encode(), more=False)

    return script


async def test_an_over_long_prompt_gets_the_code_of_such_refusals() -> None:
    """vLLM's message stays."""
    world = await World(vllm_error("This model's maximum context length is 4096 tokens. However, ...")).post()
    assert (world.status, world.error["code"], world.error["type"]) == (400, "never_fits", "BadRequestError")


async def test_other_errors_of_vllm_are_untouched() -> None:
    """Same headers, same bytes."""
    world = await World(vllm_error("temperature must be non-negative")).post()
    assert world.headers[0][0] == b"Content-Length"
    assert json.loads(world.body)["error"]["code"] == 400
    assert header(world.headers, b"content-length") == [str(len(world.body)).encode()]


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"error":"x"}', b'{"error":{"message":null}}', b"[" * 9999]
)
async def test_an_odd_error_body_passes(body: bytes) -> None:
    """Whatever a 400 holds."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        await start(send, 400)
        await chunk(send, body, more=False)

    world = await World(script).post()
    assert (world.status, world.body) == (400, body)


# What is not ours


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", PATHS[0]), ("POST", "/v1/embeddings"), ("GET", "/metrics"), ("OPTIONS", PATHS[1]), ("POST", "/v1/models")],
)
async def test_other_requests_pass_untouched(method: str, path: str) -> None:
    """Same body, no tag, the start not held."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        await start(send)
        assert [event["type"] for event in world.sent] == ["http.response.start"]
        await chunk(send, b"page", more=False)

    world = await World(script).post(method=method, path=path, headers=[(b"accept", b"*/*")])
    assert (world.status, world.body, world.bodies) == (200, b"page", [b'{"prompt":"x"}'])


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
async def test_other_protocols_pass(kind: str) -> None:
    """Only HTTP is ours."""
    world = World()
    sent: list[Event] = []

    async def receive() -> Event:
        raise AssertionError

    async def send(event: Event) -> None:
        sent.append(event)

    await world.middleware({"type": kind}, receive, send)
    assert sent == [{"type": "other"}]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/tokenize"])
async def test_a_target_where_nobody_keeps_it_is_refused(path: str) -> None:
    """On endpoints that carry no SLO the header is a 400 that names it, not taken in silence."""
    world = await World().post(path=path, headers=[(b"X-SLO-TTFT-MS", b"500")])
    assert world.status == 400
    error = json.loads(world.body)["error"]
    assert error["code"] == "bad_slo_header"
    assert error["param"] == "x-slo-ttft-ms"
    assert path in error["message"]
