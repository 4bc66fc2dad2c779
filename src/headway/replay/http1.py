"""A small HTTP/1.1 client that tells exactly when bytes were written and read.

General HTTP clients put a task, a queue and several wake-ups between the socket and the caller; at hundreds of
streams on a small machine that delay is what gets measured. Here an exchange is a chain of callbacks on one protocol
object: the request is written in one call, every read reaches the caller at once with its time.

Only what a load generator needs: POST (and GET through `ask`), keep-alive, chunked, sized and until-close bodies, TLS.
No redirects, no compression (identity is asked for), no proxies, no retries: a retry would hide a failure.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from headway import __version__
from headway.errors import EngineError

#: Largest answer to a question before or after a run; a server's metrics are some hundred kilobytes.
REPLY_BYTES = 16 << 20
#: Longest head of an answer, and longest line between chunks.
HEAD_BYTES = 1 << 20
#: Common servers close an idle connection after 5 s; not reusing one near that age avoids false failures.
IDLE_LIMIT_S = 2.0


class Exchange(Protocol):
    """Who made a request: told of each step of its answer. Times are `time.perf_counter()`."""

    def on_sent(self, now: float) -> None:
        """Note that the request was written to the socket."""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Take status and headers (names in lower case)."""

    def on_data(self, data: bytes, now: float) -> None:
        """Take a piece of the body, as read."""

    def on_end(self, error: str | None, now: float) -> None:
        """Note the end of the exchange: None when the body is whole, else what broke it. Called once."""


class BadHttpError(Exception):
    """The server sent what HTTP/1.1 does not allow; never leaves this module."""


class Connection(asyncio.Protocol):
    """One keep-alive connection; carries one exchange at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._rest = b""
        self._in_body = False
        self._reuse = True
        self._left: int | None = None  # bytes of the body or chunk still to come; None: until the connection closes
        self._chunk: str | None = None  # None: not chunked, else what comes next: size, data, end, trailer

    @property
    def usable(self) -> bool:
        """Whether a request can be written now."""
        return self._transport is not None and not self._transport.is_closing() and self._exchange is None

    def send(self, data: bytes, exchange: Exchange) -> None:
        """Write a whole request."""
        self._exchange = exchange
        self._transport.write(data)  # type: ignore[union-attr]
        exchange.on_sent(time.perf_counter())

    def abandon(self) -> None:
        """Drop the exchange and the connection; the caller is not told any more."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: well when its body lasts until the close, else as dropped."""
        self._transport = None
        self._pool.forget(self)
        if self._exchange is not None:
            until_close = self._in_body and self._left is None and self._chunk is None
            self._finish(None if until_close and exc is None else "dropped", time.perf_counter())

    def data_received(self, data: bytes) -> None:
        """Pass the body on; its time is the moment of this read."""
        now = time.perf_counter()
        if self._exchange is None:  # bytes nobody asked for
            self.abandon()
            return
        try:
            if not self._in_body:
                data = self._head(self._rest + data)
                if not self._in_body:
                    return
            if self._chunk is not None:
                self._chunked(data, now)
            elif self._left is None:
                if data:
                    self._exchange.on_data(data, now)
            else:
                self._sized(data, now)
        except BadHttpError:
            self._reuse = False
            self._finish("bad_http", now)

    def _head(self, data: bytes) -> bytes:
        """Read the head, also interim ones (1xx); return what follows it."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > HEAD_BYTES:
                    raise BadHttpError
                self._rest = data
                return b""
            status_line, *lines = data[:end].decode("latin-1").split("\r\n")
            data = data[end + 4 :]
            if not status_line.startswith("HTTP/1."):
                raise BadHttpError
            status = _number(status_line[9:12])
            if status < 100:
                raise BadHttpError
            if status >= 200:
                break
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self._rest, self._in_body = b"", True
        connection = headers.get("connection", "").lower()
        self._reuse = status_line.startswith("HTTP/1.1") and "close" not in connection
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunk, self._left = "size", 0
        elif "content-length" in headers:
            self._left = _number(headers["content-length"])
        elif status in (204, 304):
            self._left = 0
        else:
            self._left, self._reuse = None, False
        self._exchange.on_head(status, headers)  # type: ignore[union-attr]
        return data

    def _sized(self, data: bytes, now: float) -> None:
        piece = data[: self._left]
        self._left -= len(piece)  # type: ignore[operator]
        if piece:
            self._exchange.on_data(piece, now)  # type: ignore[union-attr]
        if self._left == 0:
            self._reuse = self._reuse and len(piece) == len(data)
            self._finish(None, now)

    def _chunked(self, data: bytes, now: float) -> None:
        if self._rest:
            data = self._rest + data
        at, end, over = 0, len(data), False
        pieces = []
        while at < end:
            if self._chunk == "data":
                piece = data[at : at + self._left]  # type: ignore[operator]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)  # type: ignore[operator]
                if self._left == 0:
                    self._chunk = "end"
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                if end - at > HEAD_BYTES:
                    raise BadHttpError
                break
            if self._chunk == "size":
                self._left = _number(data[at:line].partition(b";")[0], 16)
                self._chunk = "data" if self._left else "trailer"
            elif self._chunk == "end":
                if line != at:
                    raise BadHttpError
                self._chunk = "size"
            elif line == at:  # the empty line after the last trailer
                over = True
            at = line + 2
            if over:
                break
        self._rest = data[at:]
        if pieces:
            self._exchange.on_data(pieces[0] if len(pieces) == 1 else b"".join(pieces), now)  # type: ignore[union-attr]
        if over:
            self._reuse = self._reuse and not self._rest
            self._finish(None, now)

    def _finish(self, error: str | None, now: float) -> None:
        exchange, self._exchange = self._exchange, None
        reuse = self._reuse and error is None
        self._reset()
        if self._transport is not None:
            if reuse:
                self._pool.give(self, now)
            else:
                self._transport.abort()
        exchange.on_end(error, now)  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text, whatever bytes it holds."""
        return self.body.decode("utf-8", "replace")


class _Whole:
    """An exchange that waits for a whole answer of at most `REPLY_BYTES`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._status = 0
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = 0
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def on_sent(self, now: float) -> None:
        """Nothing to note."""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Keep status and headers."""
        self._status, self._headers = status, headers

    def on_data(self, data: bytes, now: float) -> None:
        """Keep a piece of the body."""
        self._size += len(data)
        if self._size <= REPLY_BYTES:
            self._pieces.append(data)
        elif not self.reply.done():
            self.reply.set_exception(EngineError(f"{self._url}: answered more than {REPLY_BYTES >> 20} MiB"))

    def on_end(self, error: str | None, now: float) -> None:
        """Settle the reply."""
        if self.reply.done():
            return
        if error is None:
            self.reply.set_result(Reply(status=self._status, headers=self._headers, body=b"".join(self._pieces)))
        else:
            what = {"dropped": "closed the connection without an answer", "bad_http": "does not speak HTTP/1.1"}
            self.reply.set_exception(EngineError(f"{self._url}: {what.get(error, error)}"))


async def ask(method: str, url: str, headers: dict[str, str], body: bytes = b"") -> Reply:
    """Return the answer to one request over a connection of its own; raises `EngineError` when there is none."""
    pool = Pool(url, headers, method=method)
    await pool.open()
    connection = pool.take()
    if connection is None:
        raise EngineError(f"{url}: closed the connection at once")
    whole = _Whole(url)
    try:
        connection.send(pool.request({}, body), whole)
        return await whole.reply
    finally:
        connection.abandon()
        pool.close()


class Pool:
    """Connections to one server and the head of every request to one of its addresses; no limit on their number."""

    def __init__(self, url: str, headers: dict[str, str], *, method: str = "POST") -> None:
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        head = {
            "Host": parts.netloc.rpartition("@")[2],
            "User-Agent": f"headway/{__version__}",
            "Accept-Encoding": "identity",
            **headers,
        }
        lines = [f"{method} {parts.path or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        self._start = "\r\n".join(lines).encode("latin-1") + b"\r\n"
        self._address: tuple[str, int] = (self._host, self._port)
        self._idle: list[Connection] = []

    async def open(self) -> None:
        """Find the address that answers and keep a first connection; raises `EngineError` when none does."""
        loop = asyncio.get_running_loop()
        reason: object = "name not found"
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            found, reason = [], error
        for *_, address in found:
            self._address = address[:2]
            try:
                self.give(await self.connect(), time.perf_counter())
            except OSError as error:
                reason = error
            else:
                return
        raise EngineError(f"{self._url}: no server there: {reason}")

    def request(self, headers: dict[str, str], body: bytes) -> bytes:
        """Return the bytes of one request."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if body:
            lines += f"Content-Length: {len(body)}\r\n"
        return self._start + f"{lines}\r\n".encode("latin-1") + body

    def take(self) -> Connection | None:
        """Return an idle connection, the one used last, or None."""
        now = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_LIMIT_S:
                return connection
            connection.abandon()
        return None

    async def connect(self) -> Connection:
        """Return a new connection; raises `OSError`."""
        loop = asyncio.get_running_loop()
        host, port = self._address
        name = self._host if self._tls is not None else None
        _, connection = await loop.create_connection(
            lambda: Connection(self), host, port, ssl=self._tls, server_hostname=name
        )
        return connection

    def give(self, connection: Connection, now: float) -> None:
        """Take back a connection whose exchange is over."""
        connection.idle_since = now
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Note that a connection has closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abandon()


def _number(text: str | bytes, base: int = 10) -> int:
    # Digits alone: `int` would take a sign, underscores and other alphabets as well.
    digits = text.decode("latin-1").strip() if isinstance(text, bytes) else text.strip()
    if not digits.isascii() or not digits.isalnum() or len(digits) > 16:
        raise BadHttpError
    try:
        return int(digits, base)
    except ValueError:
        raise BadHttpError from None
