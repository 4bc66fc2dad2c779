"""Starting, awaiting, explaining and ending a server: all on scripted stand-ins for vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_client import wait_for

from headway.engine.vllm import versions
from headway.engine.vllm.launch import Command, free_port
from headway.engine.vllm.server import Server
from headway.errors import EngineError, InputError

#: Answers /health; its child ignores SIGTERM and holds a child of its own, like an engine that hangs.
TREE = """
import http.server, subprocess, sys
inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deep', flush=True); time.sleep(600)"
outer = (
    "import os, signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE);"
    "child.stdout.readline(); print(os.getpid(), child.pid, flush=True); child.wait()"
)
child = subprocess.Popen([sys.executable, "-c", outer, inner], stdout=subprocess.PIPE, text=True)
print("pids", child.stdout.readline().strip(), flush=True)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take any vLLM for supported: none runs here."""
    monkeypatch.setattr(versions, "check", lambda: "0.32.0")


def scripted(script: str) -> Command:
    """Return a command that runs a Python script with its port as argument."""
    port = free_port()
    argv = (sys.executable, "-c", script, str(port))
    return Command(argv=argv, env=dict(os.environ), host="127.0.0.1", port=port, model="m")


def pids_in(log: str) -> list[int]:
    """Return the process ids that TREE printed."""
    line = next(line for line in log.splitlines() if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


def test_ready_inside_the_block_and_gone_after_it(tmp_path: Path, assert_ends: Callable[[int], None]) -> None:
    """Every process of the tree ends with the block, also one that ignores SIGTERM in another session."""
    with Server(scripted(TREE), log=tmp_path / "log", grace_s=5) as server:
        assert server.poll() is None
        pids = pids_in(server.output_tail())
        assert len(pids) == 2
    for pid in pids:
        assert_ends(pid)
    assert server.poll() == 128 + signal.SIGTERM


def test_nothing_survives_the_owner(tmp_path: Path, assert_ends: Callable[[int], None]) -> None:
    """Kill -9 of the process that started the server: the whole tree goes."""
    owner = """
import os, sys
from pathlib import Path
from headway.engine.vllm import versions
from headway.engine.vllm.launch import Command
from headway.engine.vllm.server import Server
versions.check = lambda: "0.32.0"
argv = (sys.executable, "-c", sys.argv[1], sys.argv[2])
command = Command(argv=argv, env=dict(os.environ), host="127.0.0.1", port=int(sys.argv[2]), model="m")
with Server(command, log=Path(sys.argv[3]), grace_s=5):
    print("ready", flush=True)
    sys.stdin.read()
"""
    log = tmp_path / "log"
    argv = [sys.executable, "-c", owner, TREE, str(free_port()), str(log)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pids = pids_in(log.read_text())
        process.kill()
    for pid in pids:
        assert_ends(pid)


def test_a_second_interrupt_does_not_wait(tmp_path: Path, assert_ends: Callable[[int], None]) -> None:
    """Its grace is longer than this test may take; two SIGTERM would wait for it."""
    deaf = "import signal; signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True))\n" + TREE
    with Server(scripted(deaf), log=tmp_path / "log", grace_s=600) as server:
        pids = pids_in(server.output_tail())
        server.send_signal(signal.SIGINT)
        wait_for(lambda: "asked" in server.output_tail())  # two that are pending are one
        server.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGKILL
    for pid in pids:
        assert_ends(pid)


def test_one_that_is_stopped_while_it_starts_ends_soon_and_silently(capfd: pytest.CaptureFixture[str]) -> None:
    """vLLM would first finish starting, then print tracebacks; its grace is longer than this test may take."""
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('Traceback of a start', flush=True))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(600)"
    )
    server = Server(scripted(script), grace_s=600)
    server.start()
    wait_for(lambda: "up" in server.output_tail())
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGKILL
    assert "Traceback" in server.output_tail()
    assert "Traceback" not in capfd.readouterr().err


def test_early_death_is_explained(tmp_path: Path) -> None:
    """A server that dies before it is ready raises what its output says."""
    script = "import sys; sys.exit('api_server.py: error: unrecognized arguments: --polcy')"
    with (
        pytest.raises(InputError, match=r"--polcy \(did you mean --policy\?\)"),
        Server(scripted(script), log=tmp_path / "log"),
    ):
        pass


def test_early_death_without_a_log_file_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a log file the output passes through to stderr and is still there to explain."""
    with (
        pytest.raises(EngineError, match=r"vLLM ended with exit code 1: OddError: gone"),
        Server(scripted("import sys; sys.exit('OddError: gone')")),
    ):
        pass
    assert "OddError: gone" in capfd.readouterr().err


def test_not_ready_in_time(tmp_path: Path) -> None:
    """A server that never answers is stopped after the limit, its last words shown."""
    script = "import time; print('still loading', flush=True); time.sleep(600)"
    server = Server(scripted(script), log=tmp_path / "log", ready_s=1.0, grace_s=5)
    with pytest.raises(EngineError, match=r"(?s)not ready after 1 s.*still loading"), server:
        pass
    assert server.poll() is not None


def test_progress_tells_time_and_last_line(tmp_path: Path) -> None:
    """While waiting, the callback hears the seconds so far and the newest line."""
    heard: list[tuple[float, str]] = []
    server = Server(scripted(TREE), log=tmp_path / "log", grace_s=5)
    server.start()
    try:
        seconds = server.wait_ready(lambda elapsed_s, line: heard.append((elapsed_s, line)))
    finally:
        server.stop()
    assert all(0 <= elapsed_s <= seconds for elapsed_s, _ in heard)
    assert all(line == "" or line.startswith("pids") for _, line in heard)


def test_taken_port_starts_nothing(tmp_path: Path) -> None:
    """The port is tried before anything starts."""
    import socket

    command = scripted(TREE)
    with socket.create_server((command.host, command.port)):
        server = Server(command, log=tmp_path / "log")
        with pytest.raises(EngineError, match=f"port {command.port} on 127.0.0.1 is taken"):
            server.start()
    assert server.poll() is None
    assert not (tmp_path / "log").exists()


def test_unsupported_version_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is checked before anything starts."""

    def refuse() -> str:
        raise EngineError("vllm 0.1 is installed")

    monkeypatch.setattr(versions, "check", refuse)
    with pytest.raises(EngineError, match=r"vllm 0\.1 is"):
        Server(scripted(TREE), log=tmp_path / "log").start()


def test_stop_is_harmless_before_start_and_twice(tmp_path: Path) -> None:
    """Stopping what does not run does nothing."""
    server = Server(scripted(TREE), log=tmp_path / "log", grace_s=5)
    assert server.stop() is None
    with server:
        pass
    assert server.stop() == 128 + signal.SIGTERM
