"""A proxy in front of an OpenAI-compatible server that records lengths, times and salted hashes: never text.

Everything passes through unchanged, streams event by event. Two exceptions, both on completions: the proxy
asks the server for plain (not compressed) answers, and when a streaming client did not ask for usage, the
proxy does and takes the usage event out of the stream again. A request counts as it arrives here, before the
server sees it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from headway.trace.assemble import MAX_TOKENS
from headway.trace.fingerprint import prompt_text
from headway.trace.recorder import Recorder

RECORDED = ("/v1/chat/completions", "/v1/completions")
MAX_BODY_BYTES = 1 << 28
#: Names of classes that are written down; anything else in that header could be text.
CLASS_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_EVENT_END = re.compile(rb"((?:\r?\n){2})")
_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
    "upgrade", "host", "content-length",
}  # fmt: skip


def proxy_app(
    upstream: str, recorder: Recorder, *, session_header: str | None = None, class_header: str = "x-slo-class"
) -> web.Application:
    """Return the proxy for the server at `upstream` (`http://host:port`)."""
    proxy = _Proxy(upstream.rstrip("/"), recorder, session_header, class_header)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    app.cleanup_ctx.append(proxy.session_scope)
    return app


class _Proxy:
    def __init__(self, upstream: str, recorder: Recorder, session_header: str | None, class_header: str) -> None:
        self._upstream = upstream
        self._recorder = recorder
        self._session_header = session_header
        self._class_header = class_header
        self._client: aiohttp.ClientSession

    async def session_scope(self, _: web.Application) -> AsyncIterator[None]:
        """Hold one client session for the life of the application."""
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self._client:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on and write down its lengths when it has finished."""
        arrival_s = time.monotonic()
        data = await request.read()
        body = _completion(request, data)
        if body is None:
            return await self._pass(request, data)
        call = _Call(request, body, data, arrival_s)
        try:
            return await self._recorded(call)
        except ConnectionResetError:
            call.failure = "client left"
            raise
        except aiohttp.ClientError:
            call.failure = "server unreachable"
            message = "the server behind this proxy cannot be reached"
            return web.json_response({"error": {"message": message, "code": "bad_gateway"}}, status=502)
        except asyncio.CancelledError:
            call.failure = "client left"
            raise
        finally:
            self._write(call)

    async def _pass(self, request: web.Request, data: bytes) -> web.StreamResponse:
        url = self._upstream + str(request.rel_url)
        try:
            async with self._client.request(
                request.method, url, data=data or None, headers=_forwarded(request), allow_redirects=False
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_returned(answer))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientError:
            return web.Response(status=502, text="the server behind this proxy cannot be reached\n")

    async def _recorded(self, call: _Call) -> web.StreamResponse:
        headers = _forwarded(call.request)
        headers["Accept-Encoding"] = "identity"
        async with self._client.post(
            self._upstream + str(call.request.rel_url), data=call.data(), headers=headers
        ) as answer:
            if answer.status != 200:
                call.failure = f"http {answer.status}"
            if answer.content_type != "text/event-stream":
                data = await answer.read()
                if answer.status == 200:
                    call.take_usage(data)
                return web.Response(status=answer.status, headers=_returned(answer), body=data)
            response = web.StreamResponse(status=answer.status, headers=_returned(answer))
            await response.prepare(call.request)
            try:
                async for event in _events(answer.content):
                    if call.keeps(event):
                        await response.write(event)
            except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
                # The client must see the break as it was, not a stream that ends well.
                call.failure = "server cut the stream"
                if call.request.transport is not None:
                    call.request.transport.abort()
                return response
            await response.write_eof()
            return response

    def _write(self, call: _Call) -> None:
        prompt = prompt_text(call.body)
        failure = call.failure
        if failure is None and prompt is None:
            failure = "several prompts in one request"
        if failure is None and (call.input_tokens is None or call.output_tokens is None):
            failure = "no usage from the server"
        if failure is not None:
            self._recorder.drop(arrival_s=call.arrival_s, reason=failure)
            return
        assert prompt is not None
        assert call.input_tokens is not None
        assert call.output_tokens is not None
        headers = call.request.headers
        name = headers.get(self._class_header, "")
        self._recorder.keep(
            arrival_s=call.arrival_s,
            end_s=time.monotonic(),
            input_tokens=call.input_tokens,
            output_tokens=call.output_tokens,
            prompt=prompt,
            slo_class=name if CLASS_NAME.fullmatch(name) else None,
            session=headers.get(self._session_header) if self._session_header else None,
        )


class _Call:
    """One completion on its way through the proxy."""

    def __init__(self, request: web.Request, body: dict[str, Any], raw: bytes, arrival_s: float) -> None:
        self.request = request
        self.body = body
        self._raw = raw
        self.arrival_s = arrival_s
        self.failure: str | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        options = body.get("stream_options")
        asked = isinstance(options, dict) and bool(options.get("include_usage"))
        self._added_usage = bool(body.get("stream")) and not asked

    def data(self) -> bytes:
        """Return the body for the server: the client's own bytes unless usage is asked for."""
        if not self._added_usage:
            return self._raw
        options = self.body.get("stream_options")
        options = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return json.dumps({**self.body, "stream_options": options}).encode()

    def keeps(self, event: bytes) -> bool:
        """Read one event of the stream; tell whether it goes on to the client."""
        for line in event.splitlines():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                continue
            chunk = self.take_usage(data)
            if self._added_usage and chunk.get("usage") and not chunk.get("choices"):
                return False
        return True

    def take_usage(self, data: bytes) -> dict[str, Any]:
        """Note the usage in a JSON answer or chunk and return it; the last usage of a stream counts."""
        try:
            chunk = json.loads(data)
        except ValueError:
            return {}
        if not isinstance(chunk, dict):
            return {}
        if chunk.get("error"):
            self.failure = "error in the answer"
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.input_tokens = _count(usage.get("prompt_tokens"), self.input_tokens)
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)
        return chunk


def _count(value: object, before: int | None) -> int | None:
    """Return a number of tokens; what is none (null, text, a negative one) leaves what was known before."""
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else before


def _completion(request: web.Request, data: bytes) -> dict[str, Any] | None:
    """Return the body of a completion request, None for anything else."""
    if request.method != "POST" or request.path not in RECORDED:
        return None
    try:
        body = json.loads(data)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield server-sent events as the bytes that the server wrote, each with the empty line that ends it."""
    rest = b""
    async for piece in content.iter_any():
        # Not by line: the reader's limit on a line is far below what an event with log probabilities can hold.
        *events, rest = _EVENT_END.split(rest + piece)
        for event, end in zip(events[::2], events[1::2], strict=True):
            yield event + end
    if rest:
        yield rest


def _forwarded(request: web.Request) -> CIMultiDict[str]:
    return _end_to_end(request.headers)


def _returned(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    return _end_to_end(answer.headers)


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that are not about one connection, repeated ones too."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP)
