"""`headway calibrate` against a scripted server that logs a step for every request."""

from __future__ import annotations

import http.server
import json
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.main import build
from headway.engine.vllm import calibrate as sweeps
from headway.engine.vllm import launch, versions
from headway.engine.vllm import model as models
from headway.engine.vllm import server as servers
from headway.errors import EngineError, InputError
from headway.twin.profile import load as load_profile

STARTED = {
    "event": "started",
    "unix_s": 1_700_000_000.0,
    "model": "/somewhere/tiny",
    "device": "scripted",
    "versions": {"vllm": "vllm 0.32.0"},
    "engine": {"kv_blocks": 99, "token_budget": 2048},
    "config": {"front_ms": 15.0},
}


class Scripted(http.server.ThreadingHTTPServer):
    """Takes 20 ms and 1 ms a token for a prompt, 20 ms and 1 ms a stream for a decode, and logs that."""

    request_queue_size = 128

    def __init__(self, log: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.log = log
        self.metrics = f'headway_steps_total 1.0\nheadway_step_log{{file="{log}"}} 1.0\n'
        self.key: str | None = None
        self.logs = True
        self.lock = threading.Lock()
        log.write_text(json.dumps(STARTED) + "\n" + step(1, 1, 0.5) * 10)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"


def step(q: int, n: int, seconds: float) -> str:
    """Return a line of the log."""
    return json.dumps({"q": q, "n": n, "K": 0, "X": q * q / 2, "seconds": seconds}) + "\n"


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Scripted

    def do_GET(self) -> None:
        """Tell the model, or the metrics."""
        if self.path == "/metrics":
            self.answer(200, self.server.metrics.encode())
        else:
            self.answer(200, json.dumps({"data": [{"id": "tiny", "max_model_len": 1024}]}).encode())

    def do_POST(self) -> None:
        """Log the steps of a completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        q, streams = len(body["prompt"]), body["max_tokens"]
        with self.server.lock, self.server.log.open("a") as file:
            if self.server.logs:
                file.write(step(q, 0, 0.02 + 0.001 * q) + step(0, streams, 0.02 + 0.001 * streams))
        self.answer(200, b"{}")

    def answer(self, status: int, text: bytes) -> None:
        """Send it, or 401."""
        if self.server.key is not None and self.headers["authorization"] != f"Bearer {self.server.key}":
            status = 401
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Scripted]:
    """A running server."""
    with Scripted(tmp_path / "steps.jsonl") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def calibrated(out: Path, *words: str) -> Any:
    """Run the command."""
    command = ["calibrate", "--out", str(out), *words]
    return CliRunner().invoke(build(command), command)


def test_a_running_server_names_its_log_and_only_the_sweep_is_fitted(server: Scripted, tmp_path: Path) -> None:
    """The slow steps before the sweep are not in it; engine facts and origin are those that the server told."""
    out = tmp_path / "mine.toml"
    result = calibrated(out, server.url, "--rounds", "1", "--note", "a test")
    assert result.exit_code == 0, result.output
    profile = load_profile(out)
    assert profile.cost.a == pytest.approx(0.001, rel=0.01)
    assert profile.engine == {"kv_blocks": 99, "token_budget": 2048, "front_s": 0.015}
    told = {key: profile.provenance[key] for key in ("model", "device", "vllm_version", "date", "note")}
    assert told == {
        "model": "tiny",
        "device": "scripted",
        "vllm_version": "vllm 0.32.0",
        "date": "2023-11-14",
        "note": "a test",
    }
    assert "Seen: up to 768 prompt tokens" in result.stdout
    assert "prefill_only" in result.stdout


def test_each_round_covers_everything(server: Scripted) -> None:
    """So that the steps that the fit is judged by are like those before them."""
    told: list[tuple[int, int]] = []
    sent = sweeps.survey(server.url, "m", headway=True, rounds=2, progress=lambda done, of: told.append((done, of)))
    lines = [json.loads(line) for line in server.log.read_text().splitlines()[11:]]
    prompts = [line["q"] for line in lines if line["q"]]
    assert len(prompts) == sent
    assert sorted(prompts[: sent // 2]) == sorted(prompts[sent // 2 :])
    assert max(prompts) == 768
    assert told[-1] == (len(told), len(told))


def test_a_key_is_brought_along(server: Scripted, tmp_path: Path) -> None:
    """Without it the server says no, and so do we."""
    server.key = "secret"
    assert calibrated(tmp_path / "a.toml", server.url, "--rounds", "1", "--api-key", "secret").exit_code == 0
    failed = calibrated(tmp_path / "b.toml", server.url, "--rounds", "1")
    assert isinstance(failed.exception, EngineError)
    assert "HTTP Error 401" in str(failed.exception)


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ("headway_steps_total 1.0\n", "keeps no step log: start it with HEADWAY_STEP_LOG=FILE"),
        ("vllm:num_requests_running 0\n", "has no headway_ series: expected a running `headway serve`"),
    ],
)
def test_a_server_without_a_log_is_told_how_to_keep_one(
    server: Scripted, tmp_path: Path, metrics: str, named: str
) -> None:
    """Or that it is none of ours."""
    server.metrics = metrics
    assert named in str(calibrated(tmp_path / "a.toml", server.url).exception)


def test_a_log_on_another_machine_is_named(server: Scripted, tmp_path: Path) -> None:
    """With what to do."""
    server.metrics = 'headway_step_log{file="/there/steps.jsonl"} 1.0\n'
    failed = calibrated(tmp_path / "a.toml", server.url)
    assert isinstance(failed.exception, InputError)
    assert "/there/steps.jsonl: the step log of http://127.0.0.1:" in str(failed.exception)


def test_a_log_that_does_not_grow_is_not_that_servers(server: Scripted, tmp_path: Path) -> None:
    """A file of the same name may lie here."""
    server.logs = False
    assert "did not grow while" in str(calibrated(tmp_path / "a.toml", server.url, "--rounds", "1").exception)


def test_a_line_that_is_being_written_is_left_out(server: Scripted, tmp_path: Path) -> None:
    """The last one of a log, without its end."""
    out = tmp_path / "mine.toml"
    log = tmp_path / "other.jsonl"
    log.write_text(step(10, 1, 0.03) * 30 + step(0, 2, 0.02) * 30 + '{"q": 3, "n"')
    assert calibrated(out, "--steps", str(log)).exit_code == 0
    assert tomllib.loads(out.read_text())["provenance"]["steps"] == 60


def test_a_server_of_its_own_is_started_with_the_options_and_stopped(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM's order with nothing refused, so that the sweep alone decides what a step holds."""
    seen: dict[str, Any] = {}

    def command(**options: Any) -> Any:
        seen.update(options)
        Path(options["environ"]["HEADWAY_STEP_LOG"]).write_text(server.log.read_text())
        server.log = Path(options["environ"]["HEADWAY_STEP_LOG"])
        return SimpleNamespace(model="tiny", url=server.url, api_key=None)

    class Started:
        def __init__(self, command: Any, *, log: Path) -> None:
            self.url, self.model = command.url, command.model

        def __enter__(self) -> Started:
            seen["running"] = True
            return self

        def __exit__(self, *_: object) -> None:
            seen["running"] = False

    monkeypatch.setattr(launch, "command", command)
    monkeypatch.setattr(servers, "Server", Started)
    monkeypatch.setattr(versions, "check", lambda: "0.32.0")
    monkeypatch.setattr(models, "embedded_model", lambda **_: None)
    out, kept = tmp_path / "own.toml", tmp_path / "kept.jsonl"
    result = calibrated(out, "--rounds", "1", "--keep", str(kept), "--", "some/model", "--max-num-seqs", "64")
    assert result.exit_code == 0, result.output
    assert (seen["model"], seen["extra"]) == ("some/model", ["--max-num-seqs", "64"])
    assert (seen["policy"], seen["admission"], seen["running"]) == ("fcfs", "admit_all", False)
    assert kept.exists()
    assert load_profile(out).provenance["device"] == "scripted"
    again = calibrated(out, "--keep", str(kept))
    assert "exists: expected a new file" in str(again.exception)
    assert calibrated(out, "--rounds", "1", "--", "--max-num-seqs", "64").exit_code == 0
    assert (seen["model"], seen["extra"]) == (None, ["--max-num-seqs", "64"])


def test_targets_that_contradict_each_other(server: Scripted, tmp_path: Path) -> None:
    """One source of steps at a time."""
    log = str(server.log)
    for words, named in (
        ([server.url, "more"], "more after http"),
        (["--steps", log, "model"], "--steps and model"),
        (["--steps", log, "--set", "policy=fcfs"], "--set policy: expected one of"),
        (["--steps", log, "--set", "kv_blocks=1.5"], "--set kv_blocks=1.5: expected a whole number of at least 1"),
        (["--steps", log, "--set", "prefix_cache=1"], "--set prefix_cache=1: expected true or false"),
        (["--steps", log, "--rounds", "9"], "--rounds: --steps sends nothing: leave it out"),
        (["--steps", log, "--keep", "kept"], "--keep: --steps sends nothing"),
        ([server.url, "--policy", "edf"], "--policy: the server at a URL runs already"),
        (["--api-key", "key", "--", "model"], "--api-key: the server is started here"),
        (["--", "--port", "48733"], "--port after `--`: the server is started here, on a free port: leave it out"),
    ):
        failed = calibrated(tmp_path / "a.toml", *words)
        assert isinstance(failed.exception, InputError)
        assert named in str(failed.exception)
    folder = calibrated(tmp_path, "--steps", log)
    assert "is a folder: expected a file" in str(folder.exception)
