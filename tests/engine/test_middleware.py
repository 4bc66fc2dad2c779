"""The HTTP side around scripted applications that behave as vLLM does."""

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
    world.deliver({"kind": "first_token", "group": tag.group, "queue_s": 0.0214})
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


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes, and a file for the events."""
    (tmp_path / "headway.toml").write_text('default_class = "chat"\n[class.chat]\nttft_ms = 1000\n[class.document]\n')
    monkeypatch.setenv(ENV_CONFIG, str(tmp_path / "headway.toml"))
    monkeypatch.setenv(ENV_EVENT_LOG, str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


# Served


@pytest.mark.parametrize("path", PATHS)
async def test_an_accepted_stream_carries_bound_and_queue_time(path: str) -> None:
    """Headers are added, every byte passes in its order."""
    world = await World(stream).post(path=path)
    assert world.status == 200
    assert world.headers == [
        (b"content-type", b"text/event-stream"),
        (b"x-headway-ttft-bound-ms", b"400"),
        (b"x-headway-queue-ms", b"21"),
    ]
    assert world.body == b"data: 1\n\ndata: [DONE]\n\n"


async def test_without_a_promise_there_is_no_bound() -> None:
    """The queue time is told all the same."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        world.deliver({"kind": "accepted", "group": tag.group, "bound_s": None})
        world.deliver({"kind": "first_token", "group": tag.group, "queue_s": 0.0})
        await start(send)
        await chunk(send, b"x", more=False)

    world = await World(script).post()
    assert header(world.headers, b"x-headway-ttft-bound-ms") == []
    assert header(world.headers, b"x-headway-queue-ms") == [b"0"]


async def test_the_request_reaches_the_engine_with_its_tag() -> None:
    """Targets of the headers, sequences of the body, and a length that is right."""
    world = World(stream)
    headers = [(b"X-SLO-Class", b"document"), (b"x-slo-tpot-ms", b"80"), (b"content-length", b"1")]
    await world.post(b'{"prompt":["a","b"],"n":2,"max_tokens":3}', headers=headers)
    tag = decode_tag(json.loads(world.bodies[0])["vllm_xargs"][XARG])
    assert tag is not None
    assert (tag.slo_class, tag.tpot_ms, tag.ttft_ms, tag.size, tag.explicit_max_tokens) == (
        "document",
        80,
        None,
        4,
        True,
    )
    assert tag.arrival_unix_s is not None
    assert header(world.scopes[0]["headers"], b"content-length") == [str(len(world.bodies[0])).encode()]


async def test_a_body_in_parts_is_put_together() -> None:
    """Chunked requests have no length; the application gets one body with one."""
    world = World(stream)
    await world.post([b'{"prom', b'pt":', b'"x"}', b""], headers=[(b"Transfer-Encoding", b"chunked")])
    assert json.loads(world.bodies[0])["prompt"] == "x"
    assert header(world.scopes[0]["headers"], b"transfer-encoding") == []
    assert header(world.scopes[0]["headers"], b"content-length") == [str(len(world.bodies[0])).encode()]


async def test_a_long_body_is_tagged_too() -> None:
    """It is parsed beside the event loop."""
    world = World(stream)
    await world.post(json.dumps({"prompt": "x" * 200_000}).encode())
    assert XARG in json.loads(world.bodies[0])["vllm_xargs"]


async def test_what_is_no_json_passes_to_vllm() -> None:
    """It has its own words for that."""
    world = await World(stream).post(b"hello")
    assert world.bodies == [b"hello"]


async def test_groups_do_not_mix() -> None:
    """Two requests at once: each gets its own answer."""
    world = World()
    tags: list[RequestTag] = []
    both = asyncio.Event()

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        tags.append(tag)
        if len(tags) == 2:
            world.deliver(refused(tags[0]))
            both.set()
        await both.wait()
        await start(send)
        await chunk(send, b"served", more=False)

    world.script = script
    other = World()
    other.middleware = world.middleware
    await asyncio.gather(world.post(), other.post())
    assert (world.status, other.status) == (429, 200)
    assert other.body == b"served"


# Refused


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("script", [refused_stream, refused_whole])
async def test_a_refusal_comes_before_any_byte(path: str, script: Script) -> None:
    """429 with both waits and the error body; nothing of the started 200 and of what follows gets out."""
    world = await World(script).post(path=path)
    assert world.status == 429
    assert header(world.headers, b"retry-after") == [b"2"]
    assert header(world.headers, b"retry-after-ms") == [b"1500"]
    assert world.error["code"] == "ttft_unattainable"
    assert world.error["headway"]["ttft_bound_ms"] == 2000.0
    assert len(world.sent) == 2


@pytest.mark.parametrize(("reason", "status"), [("never_fits", 400), ("draining", 503)])
async def test_the_status_follows_the_reason(reason: str, status: int) -> None:
    """What can never pass is a 400, a server that stops a 503."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        world.deliver(refused(tag, reason=reason))
        await start(send)
        await chunk(send, b"", more=False)

    world = await World(script).post()
    assert (world.status, world.error["code"]) == (status, reason)


async def test_a_refusal_beats_an_error_of_the_application() -> None:
    """vLLM may turn the aborted request into an error of its own."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        world.deliver(refused(tag))
        await start(send, 400, b"application/json")
        await chunk(send, b"{}", more=False)

    assert (await World(script).post()).status == 429


async def test_a_message_after_the_end_is_harmless() -> None:
    """The exchange is gone; it is still counted."""
    world = World(stream)
    await world.post()
    tag = decode_tag(json.loads(world.bodies[0])["vllm_xargs"][XARG])
    assert tag is not None
    world.deliver(refused(tag))
    assert world.status == 200


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
    """Same body, no tag, bad SLO headers ignored, the start not held."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        await start(send)
        assert [event["type"] for event in world.sent] == ["http.response.start"]
        await chunk(send, b"page", more=False)

    world = await World(script).post(method=method, path=path, headers=[(b"x-slo-ttft-ms", b"soon")])
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


# Clients that go away


async def test_a_disconnect_while_waiting_reaches_the_application() -> None:
    """It has the request and waits for the engine; nothing is sent to nobody."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        await start(send)
        world.seen.append(await receive())

    world = await World(script).post(then=[{"type": "http.disconnect"}])
    assert [event["type"] for event in world.seen] == ["http.request", "http.disconnect"]
    assert world.sent == []
    assert world.middleware._open == {}


async def test_a_disconnect_inside_the_body_ends_it() -> None:
    """The application never hears of it."""
    world = World(stream)

    async def receive() -> Event:
        return {"type": "http.disconnect"}

    async def send(event: Event) -> None:
        raise AssertionError

    await world.middleware({"type": "http", "method": "POST", "path": PATHS[0], "headers": []}, receive, send)
    assert world.scopes == []


async def test_an_application_that_raises_leaves_nothing_behind() -> None:
    """The server above handles it."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        raise RuntimeError("boom")

    world = World(script)
    with pytest.raises(RuntimeError, match="boom"):
        await world.post()
    assert world.middleware._open == {}


# Events and metrics


async def test_each_refusal_and_each_miss_is_one_line(environment: Path) -> None:
    """JSON without empty fields; what was attained is no event."""
    world = World(stream)
    tag = RequestTag(group="g")
    world.deliver(refused(tag))
    world.deliver(done(tag))
    world.deliver(done(tag, "ttft"))
    world.deliver({"kind": "preempted", "request": "r", "lost_tokens": 3, "promised": False})
    lines = [json.loads(line) for line in environment.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["headway_refused", "headway_miss", "headway_preempted"]
    assert lines[0]["reason"] == "ttft_unattainable"
    assert "tbt_target_s" not in lines[0]
    assert lines[1]["missed"] == ["ttft"]
    assert all("unix_s" in line for line in lines)


async def test_events_go_to_standard_error_without_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each there too."""
    monkeypatch.delenv(ENV_EVENT_LOG)
    World(stream).deliver(refused(RequestTag(group="g")))
    assert json.loads(capsys.readouterr().err)["event"] == "headway_refused"


async def test_two_instances_in_a_process_count_once(environment: Path) -> None:
    """Both answer their own requests, one counts and writes."""
    registry = CollectorRegistry()
    receivers: list[Callable[[dict[str, Any]], None]] = []

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    for _ in range(2):
        SloMiddleware(nothing, install=receivers.append, registry=registry)
    for deliver in receivers:
        deliver(refused(RequestTag(group="g")))
    assert registry.get_sample_value("headway_requests_total", {"slo_class": "chat", "result": "refused"}) == 1
    assert len(environment.read_text().splitlines()) == 1
