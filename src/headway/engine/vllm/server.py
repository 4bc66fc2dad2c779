"""A vLLM server as a child process: started, awaited, explained when it dies, and never left behind."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import urlsplit

from headway.engine.vllm import guard, versions
from headway.engine.vllm.diagnosis import diagnose
from headway.engine.vllm.launch import Command, check_port
from headway.errors import EngineError

#: Lines of output kept to explain an early death.
TAIL_LINES = 2000

Progress = Callable[[float, str], None]


class Server:
    """One vLLM API server with all its processes.

    Used as a context manager it is ready inside the block and gone after it. The processes also end when this
    process is interrupted or killed, whatever kills it (see guard.py).

    `log` takes the server's output; without it the output is passed on to stderr as it comes. `grace_s` is how
    long vLLM may take to end by itself, beyond its time to drain, before it is killed.
    """

    def __init__(
        self, command: Command, *, log: Path | None = None, grace_s: float = 15.0, ready_s: float = 600.0
    ) -> None:
        self.command = command
        self.url = command.url
        self.model = command.model
        self.log = log
        self._grace_s = command.drain_s + grace_s
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pump: threading.Thread | None = None
        self._ready = False
        self._given_up = False

    def start(self) -> None:
        """Start the processes and return at once.

        Raises EngineError when vLLM is missing or unsupported, or the port is taken.
        """
        if self._process is not None:
            raise EngineError("this server was started before")
        versions.check()
        check_port(self.command.host, self.command.port)
        # The guard is a script run in isolation (-I): it must not import what vLLM's folder shadows.
        wrapper = [sys.executable, "-I", guard.__file__, str(os.getpid()), str(self._grace_s)]
        output: int | IO[bytes] = subprocess.PIPE if self.log is None else self.log.open("wb")
        try:
            self._process = subprocess.Popen(
                wrapper + list(self.command.argv),
                env=self.command.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us, and we stop it in order
            )
        finally:
            if not isinstance(output, int):
                output.close()
        if self._process.stdout is not None:
            self._pump = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
            self._pump.start()

    def wait_ready(self, progress: Progress | None = None) -> float:
        """Wait until the server answers /health and return the seconds that took.

        `progress` is called a few times a second with the seconds so far and the newest line of output.
        Raises EngineError (InputError for a bad option) explaining why when the server dies or takes longer
        than `ready_s`; it is stopped then.
        """
        began = time.monotonic()
        while not self._healthy():
            code = self.poll()
            elapsed_s = time.monotonic() - began
            if code is not None:
                raise self.explain(code)
            if elapsed_s > self._ready_s:
                lines = self.output_tail(5)
                self.stop()
                raise EngineError(f"vLLM was not ready after {self._ready_s:.0f} s; last lines:\n{lines}")
            if progress is not None:
                progress(elapsed_s, self.output_tail(1))
            time.sleep(0.25)
        self._ready = True
        return time.monotonic() - began

    def poll(self) -> int | None:
        """Return the exit code once every process has ended, else None."""
        return None if self._process is None else self._process.poll()

    def wait(self) -> int:
        """Wait for the server to end and return its exit code."""
        if self._process is None:
            raise EngineError("this server was never started")
        code = self._process.wait()
        if self._pump is not None:
            self._pump.join(5)
        return code

    def send_signal(self, number: int) -> None:
        """Pass a signal on; SIGTERM, SIGINT and SIGHUP end the server in order.

        One that is still starting ends soon and silently: it has nothing to end in order, only tracebacks.
        """
        if self._process is None or self._process.poll() is not None:
            return
        if not self._ready and number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._given_up = True
            self._process.send_signal(signal.SIGUSR1)
        self._process.send_signal(number)

    def stop(self) -> int | None:
        """End all processes (SIGTERM, then SIGKILL); return the exit code, None when it was never started."""
        if self._process is None:
            return None
        self.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(self._grace_s + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def output_tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of the server's output."""
        if self.log is None:
            return "\n".join(list(self._tail)[-lines:])
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 512 * lines))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def explain(self, code: int) -> Exception:
        """Return the error that says why the server ended with this exit code."""
        if self._pump is not None:
            self._pump.join(5)
        return diagnose(self.output_tail(), code, self.command)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _healthy(self) -> bool:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            # Only asks this machine's own child whether it is up; its certificate names another host.
            context = ssl._create_unverified_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=2, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _pass_on(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace")
                self._tail.append(line.rstrip("\n"))
                if self._given_up:
                    continue
                sys.stderr.write(line)
                sys.stderr.flush()
