"""A scripted OpenAI-compatible server with known timings, to measure a client with: no model, no queue but its slots.

    python -m headway.replay.nullserver --ttft-ms 50 --tpot-ms 10 [--slots 4] [--port 0]

It prints one line `listening PORT` and serves until its standard input closes or it is ended. A request takes a
slot (at once without `--slots`); its first token leaves `ttft` later, every further one `tpot` after the one
before, on an absolute schedule. `GET /log` returns, and forgets, one JSON line for each answered request with
the times of the script and the times at which the bytes were really written, on the machine-wide monotonic
clock of `time.perf_counter`.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import re
import sys
import time
from collections import deque
from dataclasses import dataclass

from headway.replay.alarm import Alarm

_MAX_TOKENS = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"\r\nx-request-id:\s*([^\r]+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
MODEL = "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the server does with a request."""

    ttft_s: float = 0.05  # from the moment a slot is free to the first token
    tpot_s: float = 0.01  # between tokens
    slots: int | None = None  # requests served at the same time; None: all
    per_chunk: int = 1  # tokens in one chunk, each chunk per_chunk * tpot after the one before
    usage: str = "every"  # running usage in every chunk, only in the `last`, or `none`
    prefix_chunks: int = 0  # role-only or empty deltas sent at once

    def arguments(self) -> list[str]:
        """Return the command-line arguments that give this script."""
        words = [f"--ttft-ms={self.ttft_s * 1e3:.10g}", f"--tpot-ms={self.tpot_s * 1e3:.10g}"]
        words += [
            f"--per-chunk={self.per_chunk}",
            f"--usage={self.usage}",
            f"--prefix-chunks={self.prefix_chunks}",
        ]
        return words + ([f"--slots={self.slots}"] if self.slots is not None else [])


class _Answer:
    """One request being answered."""

    __slots__ = (
        "connection",
        "prompt_tokens",
        "received",
        "request_id",
        "sent",
        "started",
        "tokens",
        "written",
    )

    def __init__(self, connection: _Connection, request_id: str, tokens: int, received: float) -> None:
        self.connection = connection
        self.request_id = request_id
        self.tokens = tokens
        self.received = received
        self.started = received
        self.sent = 0
        self.written: list[float] = []


class NullServer:
    """The script, its slots and the clock; connections hand requests in."""

    def __init__(self, script: Script, loop: asyncio.AbstractEventLoop) -> None:
        self.script = script
        self.alarm = Alarm(loop, self._ring)
        self.log: list[str] = []
        self._due: list[tuple[float, int, _Answer]] = []
        self._order = itertools.count()
        self._queue: deque[_Answer] = deque()
        self._busy = 0

    def submit(self, answer: _Answer) -> None:
        """Take a request that has just been read."""
        if self.script.slots is not None and self._busy >= self.script.slots:
            self._queue.append(answer)
            return
        self._begin(answer, answer.received)

    def _begin(self, answer: _Answer, now: float) -> None:
        self._busy += 1
        answer.started = now
        answer.connection.write(_HEAD + b"".join(_chunk(_event(b"")) for _ in range(self.script.prefix_chunks)))
        self._push(now + self.script.ttft_s, answer)

    def _push(self, due: float, answer: _Answer) -> None:
        heapq.heappush(self._due, (due, next(self._order), answer))
        if self._due[0][2] is answer:
            self.alarm.set(due)

    def _ring(self) -> None:
        script = self.script
        while self._due and self._due[0][0] <= time.perf_counter():
            due, _, answer = heapq.heappop(self._due)
            count = min(script.per_chunk, answer.tokens - answer.sent)
            answer.sent += count
            usage = answer.sent if script.usage == "every" else None
            over = answer.sent >= answer.tokens
            data = _chunk(_event(b" token" * count, usage, finish=over))
            if over:
                if script.usage != "none":
                    data += _chunk(_event(None, answer.sent))
                data += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            answer.connection.write(data)
            answer.written.extend([time.perf_counter()] * count)
            if over:
                self._end(answer, due)
            else:
                self._push(due + script.tpot_s * min(script.per_chunk, answer.tokens - answer.sent), answer)
        if self._due:
            self.alarm.set(self._due[0][0])

    def _end(self, answer: _Answer, due: float) -> None:
        self.log.append(
            json.dumps(
                {
                    "request_id": answer.request_id,
                    "received": answer.received,
                    "started": answer.started,
                    "written": answer.written,
                }
            )
        )
        self._busy -= 1
        answer.connection.idle()
        if self._queue:
            # The slot passes on at the scripted moment, so lateness of this loop does not add up.
            following = self._queue.popleft()
            self._begin(following, max(due, following.received))


class _Connection(asyncio.Protocol):
    """HTTP/1.1, keep-alive, one request at a time."""

    def __init__(self, server: NullServer) -> None:
        self._server = server
        self._data = bytearray()
        self._need = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def idle(self) -> None:
        self._data.clear()
        self._need = 0

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._need:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._data, 0, end + 2)
            self._need = end + 4 + (int(length[1]) if length else 0)
        if len(self._data) < self._need:
            return
        now = time.perf_counter()
        head = bytes(self._data[:2048])
        if head.startswith(b"POST "):
            wanted = _MAX_TOKENS.search(self._data)
            name = _REQUEST_ID.search(head)
            tokens = max(1, int(wanted[1])) if wanted else 16
            self._server.submit(_Answer(self, name[1].decode() if name else "", tokens, now))
            return
        self._get(head)
        self.idle()

    def _get(self, head: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path == b"/v1/models":
            body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path == b"/version":
            body = json.dumps({"version": "null server"})
        elif path == b"/log":
            body = "".join(line + "\n" for line in self._server.log)
            self._server.log.clear()
        else:
            self.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        raw = body.encode()
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)


def _event(text: bytes | None, usage: int | None = None, *, finish: bool = False) -> bytes:
    choices = b"[]"
    if text is not None:
        reason = b'"length"' if finish else b"null"
        choices = b'[{"index":0,"text":"%s","logprobs":null,"finish_reason":%s}]' % (text, reason)
    told = b'{"prompt_tokens":1,"total_tokens":%d,"completion_tokens":%d}' % (usage + 1, usage) if usage else b"null"
    return (
        b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"null","choices":%s,"usage":%s}\n\n'
        % (choices, told)
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(script: Script, port: int = 0) -> tuple[asyncio.Server, int]:
    """Serve `script` on the loopback interface in this loop; return the server and its port (0: any free one)."""
    loop = asyncio.get_running_loop()
    null = NullServer(script, loop)
    server = await loop.create_server(lambda: _Connection(null), "127.0.0.1", port, backlog=4096)
    return server, server.sockets[0].getsockname()[1]


async def _main(script: Script, port: int) -> None:
    server, bound = await serve(script, port)
    print(f"listening {bound}", flush=True)
    loop = asyncio.get_running_loop()
    # Ends with the process that started it, whose end of the pipe closes then.
    gone = loop.create_future()
    loop.add_reader(sys.stdin.fileno(), lambda: sys.stdin.buffer.read1(1) or gone.done() or gone.set_result(None))
    async with server:
        await gone


def main() -> None:
    """Run the server as its own process."""
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--port", type=int, default=0)
    parse.add_argument("--ttft-ms", type=float, default=50.0)
    parse.add_argument("--tpot-ms", type=float, default=10.0)
    parse.add_argument("--slots", type=int)
    parse.add_argument("--per-chunk", type=int, default=1)
    parse.add_argument("--usage", choices=("every", "last", "none"), default="every")
    parse.add_argument("--prefix-chunks", type=int, default=0)
    told = parse.parse_args()
    script = Script(
        ttft_s=told.ttft_ms / 1e3,
        tpot_s=told.tpot_ms / 1e3,
        slots=told.slots,
        per_chunk=told.per_chunk,
        usage=told.usage,
        prefix_chunks=told.prefix_chunks,
    )
    asyncio.run(_main(script, told.port))


if __name__ == "__main__":
    main()
