"""An API server that was asked to stop takes no new request and leaves no stream without an end.

vLLM lets what is in flight run on for `--shutdown-timeout` seconds, then kills the engine. What comes meanwhile it
would answer with status 200 and nothing in it, and what is left then would hang until its process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: Without a time to drain, vLLM's own aborts get as long to end the streams.
LEAST_S = 0.5


class Drain:
    """Whether the server was asked to stop; calls `over` once, in the event loop, when the time to drain has passed."""

    def __init__(self, over: Callable[[], None]) -> None:
        self.draining = False
        self._over = over

    def watch(self, scope: Mapping[str, Any]) -> None:
        """Begin to watch; `scope` is that of the start-up, when vLLM has set its own handlers of the signals.

        They stay: ours is called before them. Outside the main thread, where no handler can be set, nothing is watched.
        """
        loop = asyncio.get_running_loop()
        limit_s = _limit_s(scope)

        def begin() -> None:
            if not self.draining:
                self.draining = True
                loop.call_later(max(limit_s, LEAST_S), self._over)

        def handler(number: int, frame: FrameType | None, before: Any) -> None:
            loop.call_soon_threadsafe(begin)
            if callable(before):
                before(number, frame)

        with contextlib.suppress(ValueError):
            for each in SIGNALS:
                before = signal.getsignal(each)
                signal.signal(each, lambda number, frame, before=before: handler(number, frame, before))
                signal.siginterrupt(each, False)


def _limit_s(scope: Mapping[str, Any]) -> float:
    """Return vLLM's time to drain, seconds; 0 where the application does not tell."""
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    return float(getattr(getattr(engine, "vllm_config", None), "shutdown_timeout", 0.0))
