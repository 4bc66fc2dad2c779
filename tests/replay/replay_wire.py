"""Helpers of the replay tests: traces of invented rows, and a server whose bytes a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import polars as pl

from headway.trace.record import SCHEMA, ReadReport, Trace

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def make_trace(rows: list[dict], *, block_size: int | None = None, first_row: int = 0) -> Trace:
    """Return a trace of rows; a row needs only `arrival_s`, the rest has defaults."""
    defaults = {"input_tokens": 8, "output_tokens": 2}
    full = [dict.fromkeys(SCHEMA) | defaults | row for row in rows]
    return Trace(
        frame=pl.DataFrame(full, schema=SCHEMA),
        format="test",
        source="invented",
        sha256="0" * 64,
        report=ReadReport(read=len(rows), kept=len(rows)),
        block_size=block_size,
        first_row=first_row,
    )


def chunk(data: bytes) -> bytes:
    """Return one HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str = "a", *, used: int | None = None, finish: bool = False) -> bytes:
    """Return one completions event."""
    body: dict = {"choices": [{"index": 0, "text": text, "finish_reason": "length" if finish else None}]}
    if used is not None:
        body["usage"] = {"prompt_tokens": 8, "completion_tokens": used}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def plain(status: int, body: object, **headers: str) -> bytes:
    """Return a whole JSON answer."""
    data = json.dumps(body).encode()
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\n{lines}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@dataclass
class Request:
    """One request as the server saw it; `probe` marks those before the clock starts."""

    path: str
    headers: dict[str, str]
    body: dict
    probe: bool
    number: int = 0  # among those that are no probes


@dataclass
class Server:
    """Address and memory of a scripted server."""

    url: str = ""
    listener: asyncio.Server | None = None
    requests: list[Request] = field(default_factory=list)

    @property
    def timed(self) -> list[Request]:
        """Requests of the replay itself."""
        return [request for request in self.requests if not request.probe and request.body]


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]

GOOD = HEAD + chunk(token(used=1)) + chunk(token(used=2, finish=True)) + chunk(DONE) + END


@contextlib.asynccontextmanager
async def serve(
    answer: Answer,
    *,
    models: dict | None = None,
    probe: Answer | None = None,
    metrics: Callable[[], str] | None = None,
) -> AsyncIterator[Server]:
    """Serve: GET lists one model, probes are answered well (or by `probe`), every other POST goes to `answer`.

    `metrics` gives the page of /metrics; without it there is none.
    """
    server = Server()
    writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task] = set()
    models = models if models is not None else {"data": [{"id": "m"}]}

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        tasks.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *rest = head.strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (entry.partition(":") for entry in rest)}
                size = int(headers.get("content-length", 0))
                body = json.loads(await reader.readexactly(size)) if size else {}
                request = Request(line.split()[1], headers, body, "x-request-id" not in headers)
                request.number = len(server.timed)
                server.requests.append(request)
                if line.startswith("GET") and request.path == "/metrics":
                    text = metrics().encode() if metrics else b""
                    status = 200 if metrics else 404
                    writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
                elif line.startswith("GET"):
                    writer.write(plain(200, models if request.path == "/v1/models" else {"version": "1"}))
                elif request.probe:
                    await (probe(request, writer) if probe else good(request, writer))
                else:
                    await answer(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 24)
    server.listener = listener
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for writer in writers:
            writer.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def good(request: Request, writer: asyncio.StreamWriter) -> None:
    """Answer with two tokens."""
    writer.write(GOOD)


def index_of(request: Request) -> int:
    """Return the index of the trace row that a request was made for."""
    return int(re.search(r"-(\d+)$", request.headers["x-request-id"])[1])
