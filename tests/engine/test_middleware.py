"""The HTTP side: what is served and refused, clients that go away, events and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from middleware_world import (
    PATHS,
    Script,
    World,
    chunk,
    done,
    header,
    refused,
    refused_stream,
    refused_whole,
    start,
    stream,
    write_config,
)
from prometheus_client import CollectorRegistry

from headway.engine.base import RequestTag
from headway.engine.vllm.messages import ENV_EVENT_LOG, ENV_TENANT_SALT, XARG, decode_tag
from headway.engine.vllm.middleware import Event, Receive, Scope, Send, SloMiddleware
from headway.engine.vllm.tenant import Tenants


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes, and a file for the events."""
    return write_config(tmp_path, monkeypatch)


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
        world.deliver({"kind": "first_token", "group": tag.group, "queue_s": 0.0, "since_arrival_s": 0.1})
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


async def test_the_front_is_measured_and_told_to_the_engine() -> None:
    """After eight streams the tag carries the time from the first token's step to the socket; before, nothing."""
    told: list[float | None] = []

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        told.append(tag.front_ms)
        await start(send)
        # The token's step was 40 ms before the request came, by the engine's clock: a front of at least 40 ms.
        world.deliver({"kind": "first_token", "group": tag.group, "queue_s": 0.0, "since_arrival_s": -0.04})
        await chunk(send, b"data: 1\n\n")
        await chunk(send, b"", more=False)

    world = World(script)
    for _ in range(9):
        await world.post()
    assert told[:8] == [None] * 8
    assert told[8] is not None
    assert told[8] >= 40


async def test_a_whole_answer_tells_nothing_about_the_front() -> None:
    """It leaves long after its first token."""

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        assert tag.front_ms is None
        await start(send, kind=b"application/json")
        world.deliver({"kind": "first_token", "group": tag.group, "queue_s": 0.0, "since_arrival_s": 0.0})
        await chunk(send, b"{}", more=False)

    world = World(script)
    for _ in range(9):
        await world.post()


async def test_a_configured_front_is_not_measured(tmp_path: Path) -> None:
    """The engine then takes the number of the file."""
    (tmp_path / "headway.toml").write_text('front_ms = 5\ndefault_class = "chat"\n[class.chat]\n')

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        assert tag.front_ms is None
        await stream(world, tag, send, receive)

    world = World(script)
    for _ in range(9):
        await world.post()


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


# Tenants


@pytest.mark.parametrize(
    ("value", "shown"),
    [(b"Bearer sk-gold", "gold"), (b"bearer  sk-gold ", "gold"), (b"sk-gold", "gold"), (b"Bearer sk-other", "~")],
)
async def test_an_api_key_becomes_a_tenant(
    environment: Path, monkeypatch: pytest.MonkeyPatch, value: bytes, shown: str
) -> None:
    """Its name in headway.toml, else a digest; the key itself is nowhere in what the engine gets."""
    path = environment.parent / "headway.toml"
    digest = hashlib.sha256(b"sk-gold").hexdigest()
    path.write_text(path.read_text() + f'[tenant.gold]\nkeys_sha256 = ["{digest}"]\nweight = 3\n')
    told: list[RequestTag] = []

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        told.append(tag)
        await stream(world, tag, send, receive)

    world = await World(script).post(headers=[(b"Authorization", value)])
    assert world.status == 200
    (tag,) = told
    assert tag.tenant is not None
    assert tag.tenant.startswith(shown)
    assert "sk-" not in repr(tag)


async def test_the_same_key_is_the_same_tenant_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the salt of the environment; with another salt the digest is another one."""
    key = [(b"authorization", b"Bearer sk-1")]
    monkeypatch.setenv(ENV_TENANT_SALT, "one")
    first, again = (Tenants({}).of(key) for _ in range(2))
    assert first == again
    assert first != Tenants({}).of([(b"authorization", b"Bearer sk-2")])
    monkeypatch.setenv(ENV_TENANT_SALT, "two")
    assert Tenants({}).of(key) != first
    assert Tenants({}).of([(b"x-slo-class", b"chat")]) is None


async def test_the_same_request_sent_again_is_recognised() -> None:
    """Same key and same body: same fingerprint; another key or another body: another one. The body is not in it."""
    told: list[RequestTag] = []

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        told.append(tag)
        await stream(world, tag, send, receive)

    world = World(script)
    bodies = [b'{"prompt":"secret"}'] * 3 + [b'{"prompt":"other"}']
    for body, key in zip(bodies, (b"1", b"1", b"2", b"1"), strict=True):
        world.sent.clear()
        await world.post(body, headers=[(b"authorization", b"Bearer " + key)])
    prints = [tag.fingerprint for tag in told]
    assert prints[0] == prints[1]
    assert len({*prints}) == 3
    assert "secret" not in repr(told)


async def test_without_fair_share_nobody_is_told_apart(environment: Path) -> None:
    """`fair_share = false`: no digest is made at all."""
    path = environment.parent / "headway.toml"
    path.write_text("fair_share = false\n" + path.read_text())
    told: list[RequestTag] = []

    async def script(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        told.append(tag)
        await stream(world, tag, send, receive)

    await World(script).post(headers=[(b"authorization", b"Bearer sk-1")])
    assert told[0].tenant is None


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


async def test_drift_is_one_line_with_its_numbers(environment: Path) -> None:
    """The band that the exceedance left, and the factors before and after."""
    world = World(stream)
    world.deliver({"kind": "drift", "state": "tightened", "regime": "mixed", "exceeded": 7, "judged": 16, "limit": 5})
    (line,) = [json.loads(line) for line in environment.read_text().splitlines()]
    assert (line["event"], line["state"], line["exceeded"]) == ("headway_drift", "tightened", 7)


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
