"""What the middleware tells clients when the server was asked to stop, under this process's real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from middleware_world import World, chunk, header, start, stream, write_config

from headway.engine.base import RequestTag
from headway.engine.vllm.drain import SIGNALS
from headway.engine.vllm.middleware import Event, Receive, Send


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A configuration, and this process's signal handlers put back."""
    write_config(tmp_path, monkeypatch)
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


async def stop(world: World, limit_s: float) -> None:
    """Start the application up with so much time to drain, as vLLM does, then send this process a SIGTERM."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    config = SimpleNamespace(shutdown_timeout=limit_s)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config)))

    async def receive() -> Event:
        return {"type": "lifespan.startup"}

    async def send(event: Event) -> None:
        pass

    await world.middleware({"type": "lifespan", "app": app}, receive, send)
    os.kill(os.getpid(), signal.SIGTERM)
    await asked.wait()  # vLLM's own handler is still called
    await asyncio.sleep(0)


async def test_who_comes_while_the_server_stops_is_told() -> None:
    """503 draining, without a time to retry: another server is meant, and when it is there is not known here."""
    world = World(stream)
    await stop(world, 30.0)
    await world.post()
    assert world.status == 503
    assert (world.error["code"], world.error["type"]) == ("draining", "service_unavailable")
    assert header(world.headers, b"retry-after") == []
    assert world.bodies == []  # the engine never heard of it


@pytest.mark.parametrize("begun", [False, True])
async def test_what_is_open_when_the_time_is_over_ends(begun: bool) -> None:
    """A stream gets an error event and its end; a request that waits for its first token a 503."""

    async def endless(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        await start(send)
        if begun:
            await chunk(send, b"data: 1\n\n")
        await stop(world, 0.0)
        await asyncio.Event().wait()

    world = await World(endless).post()
    if not begun:
        assert (world.status, world.error["code"]) == (503, "draining")
        return
    first, error, last, end = world.body.split(b"\n\n")
    assert (world.status, first, last, end) == (200, b"data: 1", b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "draining"


@pytest.mark.parametrize("stopping", [False, True])
async def test_who_comes_in_the_moment_of_the_signal_is_told(stopping: bool) -> None:
    """The engine takes nothing more although the request was let in: no 500, as long as that is why."""

    async def fails(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        if stopping:
            await stop(world, 30.0)
        await start(send, 500, b"application/json")
        await chunk(send, b'{"error": {"code": 500}}', more=False)

    world = await World(fails).post()
    if stopping:
        assert (world.status, world.error["code"]) == (503, "draining")
    else:
        assert (world.status, world.body) == (500, b'{"error": {"code": 500}}')


async def test_a_request_that_others_cancel_is_not_answered() -> None:
    """Only what was cut at the end of the time to drain is told so."""

    async def cancelled(world: World, tag: RequestTag, send: Send, receive: Receive) -> None:
        raise asyncio.CancelledError

    world = World(cancelled)
    with pytest.raises(asyncio.CancelledError):
        await world.post()
    assert world.sent == []
