"""Run the recording proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from headway.errors import EngineError, InputError
from headway.trace.fingerprint import Encode
from headway.trace.proxy import proxy_app
from headway.trace.recorder import Recorder
from headway.trace.tokenizer import load


async def serve(
    target: Path,
    *,
    upstream: str,
    host: str,
    port: int,
    tokenizer: Path | None = None,
    session_header: str | None = None,
    ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> tuple[int, dict[str, int]]:
    """Record until SIGINT, SIGTERM or `stop`; return (requests kept, dropped by reason).

    `ready` gets the address once the proxy listens. Raises `InputError` for a bad upstream, tokenizer or an
    existing target, `EngineError` when the port is taken.
    """
    if not upstream.startswith(("http://", "https://")):
        raise InputError(f"--upstream = {upstream!r}: expected http://host:port")
    encode = None if tokenizer is None else _encoder(tokenizer)
    recorder = Recorder(target, start_s=time.monotonic(), encode=encode)
    runner = web.AppRunner(proxy_app(upstream, recorder, session_header=session_header), access_log=None)
    done = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            target.unlink()
            raise EngineError(f"{host}:{port}: cannot listen: {error.strerror}: expected a free port") from None
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, done.set)
        ready(f"http://{host}:{runner.addresses[0][1]}")
        await done.wait()
    finally:
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)
        await runner.cleanup()
        recorder.close()
    return recorder.kept, dict(recorder.dropped)


def _encoder(path: Path) -> Encode:
    tokenizer = load(path)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
