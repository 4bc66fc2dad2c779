"""Claims about the recording proxy: answers pass through unchanged, lengths stay, text never reaches the disk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from headway.errors import EngineError, InputError
from headway.trace import read
from headway.trace.capture import serve
from headway.trace.fingerprint import BLOCK_BYTES, prompt_ids, prompt_text
from headway.trace.proxy import proxy_app
from headway.trace.recorder import Recorder

SECRET = "the patient's name is Violet Underhill and her code is 4711 " * 8
ANSWER = "Thank you, Violet Underhill"
USAGE = {"prompt_tokens": 120, "completion_tokens": 7, "total_tokens": 127}


def sse(*events: Any) -> list[bytes]:
    """Return server-sent events."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return [f"data: {text}\n\n".encode() for text in texts]


class Server:
    """An OpenAI-compatible server that answers as told and keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.usage: dict[str, Any] | None = USAGE
        self.cut = False
        self.raw: list[bytes] = []
        self.text: Any = ANSWER

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/health", self.health)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Answer what was asked, with a header of its own."""
        return web.Response(text=f"fine {request.query_string}", headers={"x-own": "1"})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion, streamed when asked."""
        self.raw.append(await request.read())
        body = json.loads(self.raw[-1])
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": SECRET}}, status=self.status, headers={"Retry-After": "3"})
        if not body.get("stream"):
            return web.json_response(
                {"choices": [{"message": {"content": ANSWER}}], "usage": self.usage},
                headers=[("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")],
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in sse({"choices": [{"delta": {"content": self.text}}]}):
            await response.write(event)
        if self.cut:
            assert request.transport is not None
            request.transport.abort()
            return response
        if body.get("stream_options", {}).get("include_usage") and self.usage:
            await response.write(sse({"choices": [], "usage": self.usage})[0])
        await response.write(sse("[DONE]")[0])
        await response.write_eof()
        return response


@asynccontextmanager
async def recording(
    folder: Path, server: Server, **settings: Any
) -> AsyncIterator[tuple[TestClient[Any, Any], Recorder]]:
    """Run server and proxy; yield a client of the proxy and the recorder."""
    recorder = Recorder(folder / "live.jsonl", start_s=0.0, salt=b"s" * 32)
    async with TestServer(server.app()) as upstream:
        app = proxy_app(str(upstream.make_url("")), recorder, **settings)
        async with TestClient(TestServer(app)) as client:
            yield client, recorder
    recorder.close()


def chat(**changes: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": SECRET}], **changes}


async def test_a_plain_answer_passes_and_leaves_lengths_times_and_hashes(tmp_path: Path) -> None:
    """The client gets the answer as it is; the file is a trace."""
    server = Server()
    async with recording(tmp_path, server) as (client, _):
        answer = await client.post("/v1/chat/completions", json=chat(), headers={"x-slo-class": "chat"})
        assert (await answer.json())["choices"][0]["message"]["content"] == ANSWER
    trace = read(tmp_path / "live.jsonl")
    assert trace.frame.select("input_tokens", "output_tokens", "slo_class").rows() == [(120, 7, "chat")]
    assert len(trace.frame["hash_ids"][0]) == 120 // 16
    assert trace.block_size == 16


async def test_no_text_reaches_the_disk(tmp_path: Path) -> None:
    """Neither prompt, answer, error, session, header nor salt is in any file, nor a word of them."""
    server = Server()
    async with recording(tmp_path, server, session_header="x-session") as (client, _):
        headers = {"x-session": "violet-session-77", "x-slo-class": "Violet Underhill, room 12"}
        for body in (chat(), chat(stream=True), {"model": "m", "prompt": SECRET}):
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            await (await client.post(path, json=body, headers=headers)).read()
        server.status = 500
        await (await client.post("/v1/chat/completions", json=chat(), headers=headers)).read()
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert [file.name for file in tmp_path.rglob("*")] == ["live.jsonl"]
    for word in ("Violet", "violet", "Underhill", "patient", "4711", "Thank", "session-77", "room", "s" * 8):
        assert word.encode() not in written
    rows = [json.loads(line) for line in written.splitlines()[1:]]
    numbers = {"arrival_s", "input_tokens", "output_tokens", "turn", "think_s", "hash_ids"}
    for row in rows:
        assert row.keys() <= numbers | {"session_id", "dropped"}
    assert len({row["session_id"] for row in rows if "session_id" in row}) == 1


async def test_a_stream_passes_event_by_event_without_the_usage_that_the_proxy_asked_for(
    tmp_path: Path,
) -> None:
    """The server sees include_usage; the client, who did not ask, sees no usage event."""
    server = Server()
    async with recording(tmp_path, server) as (client, recorder):
        answer = await client.post("/v1/chat/completions", json=chat(stream=True))
        assert await answer.read() == b"".join(sse({"choices": [{"delta": {"content": ANSWER}}]}, "[DONE]"))
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
        assert recorder.kept == 1
    assert read(tmp_path / "live.jsonl").frame["output_tokens"].to_list() == [7]


async def test_a_client_that_asked_for_usage_gets_it(tmp_path: Path) -> None:
    """Nothing is taken out that was asked for."""
    server = Server()
    async with recording(tmp_path, server) as (client, _):
        body = chat(stream=True, stream_options={"include_usage": True})
        text = await (await client.post("/v1/chat/completions", json=body)).text()
        assert '"completion_tokens": 7' in text


async def test_other_paths_pass_untouched_and_are_not_recorded(tmp_path: Path) -> None:
    """Query, headers and status are those of the server."""
    async with recording(tmp_path, Server()) as (client, recorder):
        answer = await client.get("/health?a=1")
        assert (answer.status, await answer.text(), answer.headers["x-own"]) == (200, "fine a=1", "1")
        assert (await client.get("/nowhere")).status == 404
        assert (recorder.kept, recorder.dropped) == (0, {})


async def test_requests_without_lengths_are_counted_by_reason(tmp_path: Path) -> None:
    """Refusals, missing usage, several prompts, a cut stream: none vanishes, and the client sees each as it was."""
    server = Server()
    async with recording(tmp_path, server) as (client, _):
        server.status = 429
        answer = await client.post("/v1/chat/completions", json=chat())
        assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
        server.status, server.usage = 200, None
        await (await client.post("/v1/chat/completions", json=chat())).read()
        server.usage = USAGE
        await (await client.post("/v1/completions", json={"prompt": ["a", "b"]})).read()
        server.cut = True
        answer = await client.post("/v1/chat/completions", json=chat(stream=True))
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
        server.cut = False
        await (await client.post("/v1/chat/completions", json=chat())).read()
    report = read(tmp_path / "live.jsonl").report
    assert (report.read, report.kept) == (5, 1)
    assert report.dropped == {
        "http 429": 1,
        "no usage from the server": 1,
        "several prompts in one request": 1,
        "server cut the stream": 1,
    }


async def test_the_body_passes_byte_by_byte_and_repeated_headers_stay(tmp_path: Path) -> None:
    """Numbers keep their digits, keys their order, an answer both of its cookies."""
    server = Server()
    raw = b'{ "prompt":"x", "top_p":1.0e0, "seed":12345678901234567890,\n "model":"m" }'
    async with recording(tmp_path, server) as (client, _):
        answer = await client.post("/v1/completions", data=raw)
        assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert server.raw == [raw]


async def test_an_event_of_any_length_passes(tmp_path: Path) -> None:
    """Log probabilities make events of megabytes; the proxy has no limit on a line."""
    server = Server()
    server.text = "y" * 3_000_000
    async with recording(tmp_path, server) as (client, recorder):
        answer = await client.post("/v1/chat/completions", json=chat(stream=True))
        data = await answer.read()
    assert data.count(b"y") >= 3_000_000
    assert data.endswith(b"data: [DONE]\n\n")
    assert recorder.kept == 1


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": "120", "completion_tokens": 7}, {"prompt_tokens": -1, "completion_tokens": 7}, {}]
)
async def test_usage_that_is_no_count_is_not_believed(tmp_path: Path, usage: dict[str, Any]) -> None:
    """The request is dropped, counted, and the file can be read."""
    server = Server()
    async with recording(tmp_path, server) as (client, recorder):
        server.usage = usage
        await client.post("/v1/chat/completions", json=chat())
        server.usage = USAGE
        await client.post("/v1/chat/completions", json=chat())
    assert recorder.dropped == {"no usage from the server": 1}
    assert read(tmp_path / "live.jsonl").report.read == 2


@pytest.mark.parametrize("changes", [{"messages": 3}, {"messages": [{"role": "user", "content": "\ud800"}]}])
async def test_odd_prompts_pass_and_are_hashed(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Half a surrogate pair, or messages that are no list, are the server's business."""
    server = Server()
    async with recording(tmp_path, server) as (client, recorder):
        answer = await client.post("/v1/chat/completions", json=chat(**changes))
        assert answer.status == 200
    assert recorder.kept == 1


async def test_an_unreachable_server_is_a_bad_gateway(tmp_path: Path) -> None:
    """The client hears 502 at once; the request is counted."""
    recorder = Recorder(tmp_path / "live.jsonl", start_s=0.0)
    async with TestClient(TestServer(proxy_app("http://127.0.0.1:9", recorder))) as client:
        assert (await client.post("/v1/chat/completions", json=chat())).status == 502
        assert (await client.get("/health")).status == 502
    recorder.close()
    assert recorder.dropped == {"server unreachable": 1}


def test_equal_prefixes_share_ids_and_another_salt_shares_none() -> None:
    """Two prompts that differ in the third block share two ids; ids depend on all before them."""
    start = "x" * (2 * BLOCK_BYTES)
    first = prompt_ids(start + "a" * BLOCK_BYTES + "z" * BLOCK_BYTES, b"s")
    second = prompt_ids(start + "b" * BLOCK_BYTES + "z" * BLOCK_BYTES, b"s")
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert not set(first) & set(prompt_ids(start + "a" * BLOCK_BYTES, b"t"))


def test_blocks_of_tokens_come_from_the_tokenizer_when_there_is_one() -> None:
    """33 tokens are two whole blocks of 16."""
    assert len(prompt_ids("x" * 33, b"s", encode=lambda text: [ord(c) for c in text])) == 2


def test_every_part_of_a_prompt_counts_and_several_prompts_are_told() -> None:
    """Roles, contents and tools are part of the prefix; token lists are one prompt."""
    message = {"role": "user", "content": "hi"}
    assert prompt_text({"messages": [message]}) != prompt_text({"messages": [message], "tools": [{"a": 1}]})
    assert prompt_text({"messages": [message]}) != prompt_text({"messages": [message | {"role": "system"}]})
    assert prompt_text({"prompt": [1, 2]}) == "1 2"
    assert prompt_text({"prompt": ["one"]}) == "one"
    assert prompt_text({"prompt": ["one", "two"]}) is None


def test_turns_and_think_times_of_a_named_session(tmp_path: Path) -> None:
    """The second turn came 3 s after the first answer ended; an overlapping one has no think time."""
    recorder = Recorder(tmp_path / "live.jsonl", start_s=100.0)
    common = {"input_tokens": 5, "output_tokens": 1, "prompt": "p", "session": "me"}
    recorder.keep(arrival_s=100.0, end_s=102.0, **common)
    recorder.keep(arrival_s=105.0, end_s=110.0, **common)
    recorder.keep(arrival_s=106.0, end_s=111.0, **common)
    recorder.close()
    frame = read(tmp_path / "live.jsonl").frame
    assert frame["turn"].to_list() == [0, 1, 2]
    assert frame["think_s"].to_list() == [None, 3.0, None]


def test_rows_lie_in_the_order_of_completion_and_are_sorted_when_read(tmp_path: Path) -> None:
    """A short request overtakes a long one."""
    recorder = Recorder(tmp_path / "live.jsonl", start_s=0.0)
    recorder.keep(arrival_s=2.0, end_s=3.0, input_tokens=2, output_tokens=1, prompt="p")
    recorder.keep(arrival_s=1.0, end_s=9.0, input_tokens=1, output_tokens=1, prompt="p")
    recorder.close()
    assert read(tmp_path / "live.jsonl").frame["input_tokens"].to_list() == [1, 2]


def test_an_existing_file_is_never_touched(tmp_path: Path) -> None:
    """A second recording has another salt, so it needs a file of its own."""
    (tmp_path / "live.jsonl").write_text("mine")
    with pytest.raises(InputError, match=r"live.jsonl: exists: expected a new file"):
        Recorder(tmp_path / "live.jsonl", start_s=0.0)
    assert (tmp_path / "live.jsonl").read_text() == "mine"


def test_a_kill_loses_nothing_that_finished_and_a_cut_line_is_counted(tmp_path: Path) -> None:
    """SIGKILL right after the second request: both are on disk; half a line at the end is dropped, not an error."""
    path = tmp_path / "live.jsonl"
    code = (
        "import os, signal, sys\n"
        "from headway.trace.recorder import Recorder\n"
        "r = Recorder(sys.argv[1], start_s=0.0)\n"
        "for t in (1.0, 2.0):\n"
        "    r.keep(arrival_s=t, end_s=t, input_tokens=40, output_tokens=1, prompt='x' * 200)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(read(path)) == 2
    with path.open("ab") as file:
        file.write(b'{"arrival_s":3.0,"input_to')
    report = read(path).report
    assert (report.kept, report.dropped) == (2, {"line cut short by a kill": 1})


async def test_serving_until_told_to_stop_counts_what_came(tmp_path: Path) -> None:
    """The whole of `headway trace record` but for the command line; the port is free again afterwards."""
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with TestServer(Server().app()) as upstream:
        task = asyncio.create_task(
            serve(
                tmp_path / "live.jsonl",
                upstream=str(upstream.make_url("")),
                host="127.0.0.1",
                port=0,
                ready=address.set_result,
                stop=stop,
            )
        )
        async with aiohttp.ClientSession() as client:
            url = f"{await address}/v1/chat/completions"
            async with client.post(url, json=chat()) as answer:
                assert answer.status == 200
        stop.set()
        assert await task == (1, {})


async def test_a_taken_port_and_a_bad_upstream_are_clear_errors(tmp_path: Path) -> None:
    """Neither leaves a file behind."""
    async with TestServer(Server().app()) as upstream:
        settings: dict[str, Any] = {"host": "127.0.0.1", "port": upstream.port, "ready": print}
        with pytest.raises(EngineError, match=r"cannot listen: .*expected a free port"):
            await serve(tmp_path / "live.jsonl", upstream=str(upstream.make_url("")), **settings)
        with pytest.raises(InputError, match="expected http://host:port"):
            await serve(tmp_path / "live.jsonl", upstream="localhost", **settings)
    assert not list(tmp_path.iterdir())


def test_the_file_is_private(tmp_path: Path) -> None:
    """Traffic data is for its owner's eyes."""
    Recorder(tmp_path / "live.jsonl", start_s=0.0).close()
    assert os.stat(tmp_path / "live.jsonl").st_mode & 0o077 == 0
