"""`headway serve`: what reaches vLLM, what is refused before it starts, how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headway.cli import serve
from headway.cli.main import build
from headway.engine.vllm import launch, model, versions
from headway.engine.vllm.launch import Command
from headway.errors import EngineError, HeadwayError, InputError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Collect the commands that would be run, on a machine with a GPU vLLM and the embedded model at hand."""
    commands: list[Command] = []

    def run(server: Any, *, calibrate: bool = False) -> int:
        commands.append(server.command)
        return 0

    embedded = model.EmbeddedModel(path=Path("/cache/smollm2"), name="smollm2", sha256="0" * 64)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(versions, "check", lambda: "0.32.0")
    monkeypatch.setattr(versions, "is_cpu", lambda: False)
    monkeypatch.setattr(launch, "check_port", lambda host, port: None)
    for owner in (model, launch):
        monkeypatch.setattr(owner, "embedded_model", lambda **_options: embedded)
    return commands


def invoke(*words: str) -> Result:
    """Run `headway serve` with these words."""
    argv = ["serve", *words]
    return CliRunner().invoke(build(argv), argv)


def test_unknown_options_reach_vllm_in_both_spellings(served: list[Command]) -> None:
    """`--opt value`, `--opt=value`, short ones and JSON stand unchanged at the end of vLLM's command."""
    extra = [
        "--max-num-seqs",
        "32",
        "--seed=7",
        "-tp",
        "2",
        "-O3",
        "--enable-log-requests",
        "--x",
        '{"a": "b c"}',
    ]
    assert invoke("org/model", "--port", "8123", *extra).exit_code == 0
    (command,) = served
    assert list(command.argv[-len(extra) :]) == extra
    assert (command.model, command.port) == ("org/model", 8123)


def test_no_model_serves_the_embedded_one(served: list[Command]) -> None:
    """A first word that is an option is no model."""
    assert invoke("--max-num-seqs", "32").exit_code == 0
    assert served[0].model == "smollm2"


def test_what_follows_a_double_dash_is_vllms(served: list[Command]) -> None:
    """After `--` an option of ours by name is vLLM's."""
    assert invoke("m", "--", "--config", "vllm.yaml").exit_code == 0
    assert served[0].argv[-2:] == ("--config", "vllm.yaml")


def test_stock_leaves_headway_out(served: list[Command]) -> None:
    """With --stock no plug point of ours is on the command line."""
    assert invoke("m", "--stock").exit_code == 0
    assert not any("headway" in word for word in served[0].argv)


def test_names_travel_in_the_environment(served: list[Command]) -> None:
    """Policy and admission reach the engine's processes through the environment."""
    assert invoke("m", "--policy", "edf", "--admission=admit_all").exit_code == 0
    assert served[0].env["HEADWAY_POLICY"] == "edf"
    assert served[0].env["HEADWAY_ADMISSION"] == "admit_all"


@pytest.mark.parametrize("option", ["--policy", "--admission"])
def test_unknown_names_list_the_known_ones(served: list[Command], option: str) -> None:
    """A name that nobody knows is refused before anything starts."""
    result = invoke("m", option, "nobody")
    assert isinstance(result.exception, InputError)
    assert f"{option} nobody: expected one of " in str(result.exception)
    assert served == []


def test_broken_config_is_refused_before_the_start(served: list[Command], tmp_path: Path) -> None:
    """A headway.toml that cannot be read never starts a server."""
    pytest.importorskip("headway.config")
    broken = tmp_path / "headway.toml"
    broken.write_text("policy = [\n")
    result = invoke("m", "--config", str(broken))
    assert isinstance(result.exception, InputError)
    assert "headway.toml" in str(result.exception)
    assert served == []


def test_port_out_of_range_is_refused(served: list[Command]) -> None:
    """A port that cannot exist is bad input."""
    assert invoke("m", "--port", "70000").exit_code == 2
    assert served == []


class _Scripted:
    """A server that ends as told: `error` while it starts, `code` later, calling `during` at each wait."""

    model, url = "m", "http://127.0.0.1:1"
    command = SimpleNamespace(drain_s=0.0)

    def __init__(
        self, *, code: int = 0, error: HeadwayError | None = None, during: Callable[[], None] = lambda: None
    ) -> None:
        self.code, self.error, self.during = code, error, during
        self.log: list[str] = []

    def start(self) -> None:
        self.log.append("start")

    def wait_ready(self) -> float:
        if self.error is not None:
            self.during()
            raise self.error
        return 2.0

    def wait(self) -> int:
        self.during()
        return self.code

    def send_signal(self, number: int) -> None:
        self.log.append(signal.Signals(number).name)

    def stop(self) -> None:
        self.log.append("stop")

    def explain(self, code: int) -> HeadwayError:
        return EngineError(f"ended with {code}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on_and_the_handlers_put_back(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal reaches the server, whose clean end is ours; the caller's handlers are back afterwards."""
    before = signal.getsignal(number)
    server = _Scripted(during=lambda: os.kill(os.getpid(), number))
    assert serve.run(server) == 0  # type: ignore[arg-type]
    assert server.log == ["start", number.name, "stop"]
    assert signal.getsignal(number) == before
    assert "headway: serving m on http://127.0.0.1:1/v1 (ready after 2 s)" in capsys.readouterr().out


def test_whoever_stops_it_reads_how_long_streams_have(capfd: pytest.CaptureFixture[str]) -> None:
    """Said once, at the first signal; not where nothing is waited for, or nothing is served yet."""
    server = _Scripted(during=lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    server.command = SimpleNamespace(drain_s=30.0)
    serve.run(server)  # type: ignore[arg-type]
    assert capfd.readouterr().out.count("headway: stopping; streams have 30 s to end (Ctrl-C twice: at once)") == 1
    serve.run(_Scripted(during=lambda: os.kill(os.getpid(), signal.SIGINT)))  # type: ignore[arg-type]
    starting = _Scripted(error=EngineError("ended"), during=lambda: os.kill(os.getpid(), signal.SIGINT))
    starting.command = SimpleNamespace(drain_s=30.0)
    serve.run(starting)  # type: ignore[arg-type]
    assert "stopping" not in capfd.readouterr().out


def test_stopped_while_starting_is_no_error() -> None:
    """Asked to stop before it was ready: the exit code tells the signal, nothing is explained."""
    server = _Scripted(error=EngineError("ended"), during=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert serve.run(server) == 128 + signal.SIGTERM  # type: ignore[arg-type]


def test_failed_start_is_raised_and_cleaned_up() -> None:
    """A server that cannot start raises its reason, and is stopped."""
    server = _Scripted(error=EngineError("no memory"))
    with pytest.raises(EngineError, match="no memory"):
        serve.run(server)  # type: ignore[arg-type]
    assert server.log == ["start", "stop"]


def test_death_while_serving_is_explained() -> None:
    """A server that dies by itself later is an error with its reason."""
    with pytest.raises(EngineError, match="ended with 1"):
        serve.run(_Scripted(code=1))  # type: ignore[arg-type]
