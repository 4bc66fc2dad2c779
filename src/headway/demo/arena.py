"""Several servers of the same model side by side, each idle while another is measured."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from headway.demo.systems import System, write_config
from headway.engine.vllm import calibrate, launch
from headway.engine.vllm.model import embedded_model
from headway.engine.vllm.server import Server
from headway.errors import EngineError
from headway.replay.client import Progress, replay
from headway.replay.store import Run
from headway.replay.targets import Targets
from headway.trace import Trace

Say = Callable[[str], None]


class Arena:
    """Starts the systems together, warms them up one after the other, and replays against one at a time.

    Args:
        systems: what to start; names must differ.
        folder: where logs, configurations and runs go.
        model: name or path of the model; None takes the embedded one.
        say: receives progress lines.
        extra: vLLM options for every system.
    """

    def __init__(
        self,
        systems: Sequence[System],
        folder: Path,
        *,
        model: str | None = None,
        say: Say = lambda line: None,
        extra: Sequence[str] = (),
    ) -> None:
        self.systems = tuple(systems)
        self.folder = folder
        self._model = model
        self._say = say
        self._extra = tuple(extra)
        self._stack = ExitStack()
        self._servers: dict[str, Server] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._model is None:
            embedded_model(progress=self._say)
        try:
            for system in self.systems:
                command = launch.command(
                    model=self._model,
                    port=launch.free_port(),
                    stock=system.stock,
                    config=write_config(system, self.folder),
                    extra=(*self._extra, *system.extra),
                    # Each engine's own profile: what one learns must not depend on what another saved meanwhile.
                    environ={**os.environ, "HEADWAY_PROFILE": str(self.folder / f"{system.name}.profile.json")},
                )
                server = Server(command, log=self.folder / f"{system.name}.log")
                server.start()
                self._stack.callback(server.stop)
                self._servers[system.name] = server
            self._say(f"starting {len(self.systems)} vLLM servers: {', '.join(s.title for s in self.systems)}")
            with ThreadPoolExecutor(len(self.systems)) as pool:
                list(pool.map(lambda s: s.wait_ready(), self._servers.values()))
            for system in self.systems:
                self._say(f"warming up {system.title}")
                server = self._servers[system.name]
                calibrate.sweep(server.url, server.model, headway=not system.stock)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

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
