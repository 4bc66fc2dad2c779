"""Servers of the same model side by side, each idle while another is measured."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from headway.demo.systems import System, write_config
from headway.engine.vllm import calibrate, launch
from headway.engine.vllm.messages import ENV_PROFILE
from headway.engine.vllm.model import embedded_model
from headway.engine.vllm.server import Server
from headway.errors import EngineError
from headway.replay.client import Progress, replay
from headway.replay.store import Run
from headway.replay.targets import Targets
from headway.trace import Trace

Say = Callable[[str], None]


class Arena:
    """Starts systems, warms them up one after the other, and replays against one at a time.

    Args:
        folder: where logs, configurations and runs go.
        model: name or path of the model; None takes the embedded one.
        say: receives progress lines.
        extra: vLLM options for every system.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str | None = None,
        say: Say = lambda line: None,
        extra: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._model = model
        self._say = say
        self._extra = tuple(extra)
        self._servers: dict[str, Server] = {}

    def start(self, *systems: System) -> None:
        """Start systems together, wait until they are ready, then warm each up while the others idle.

        Raises:
            EngineError: one of them does not start; the reason is in the message.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._model is None:
            embedded_model(progress=self._say)
        for system in systems:
            command = launch.command(
                model=self._model,
                port=launch.free_port(),
                stock=system.stock,
                config=write_config(system, self.folder),
                extra=(*self._extra, *system.extra),
                # A profile of its own: what one engine learned must not depend on what another saved before.
                environ={**os.environ, ENV_PROFILE: str(self.folder / f"{system.name}.profile.json")},
            )
            server = Server(command, log=self.folder / f"{system.name}.log")
            server.start()
            self._servers[system.name] = server
        self._say(f"starting vLLM: {'; '.join(s.title for s in systems)}")
        with ThreadPoolExecutor(len(systems)) as pool:
            list(pool.map(lambda s: self._servers[s.name].wait_ready(), systems))
        for system in systems:
            self._say(f"warming up: {system.title}")
            server = self._servers[system.name]
            calibrate.sweep(server.url, server.model, headway=not system.stock)

    def stop(self, *systems: System) -> None:
        """Stop systems; all of them when none is named."""
        for name in [s.name for s in systems] or list(self._servers):
            self._servers.pop(name).stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def run(
        self,
        system: System,
        trace: Trace,
        targets: Mapping[str, Targets],
        *,
        seed: int,
        label: str,
        grace_s: float,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Run:
        """Replay `trace` against one system; the run's folder is named after `label`."""
        server = self._servers[system.name]
        if (code := server.poll()) is not None:
            raise server.explain(code)
        run = replay(
            trace,
            url=server.url,
            model=server.model,
            targets=targets,
            run_dir=self.folder / "runs" / label,
            seed=seed,
            label=f"{system.title}, {label}",
            grace_s=grace_s,
            on_progress=on_progress,
            send_slo_headers=not system.stock,
        )
        if run.meta.get("state") == "interrupted":
            raise KeyboardInterrupt
        self._wait_idle(server)
        return run

    def metrics(self, system: System) -> str:
        """Return the Prometheus text of a system."""
        with urllib.request.urlopen(f"{self._servers[system.name].url}/metrics", timeout=30) as response:
            return str(response.read().decode())

    def _wait_idle(self, server: Server) -> None:
        """Let the engine drop what the client cut off, so that the next run starts on an idle machine."""
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
                    text = response.read().decode()
            except OSError as error:
                raise EngineError(f"{server.url}/metrics: {error}") from error
            values = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)", text, re.MULTILINE)
            if values and not any(float(v) for v in values):
                return
            time.sleep(0.2)
        raise EngineError(f"{server.url}: requests of the last run are still in the engine")
