"""`headway replay` and `headway runs` as a user runs them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headway.cli.main import build
from headway.errors import InputError
from headway.replay.nullserver import Script
from headway.replay.selftest import null_server
from headway.replay.store import load


def call(*words: str):
    """Run the command line in this process."""
    return CliRunner().invoke(build(list(words)), list(words))


@pytest.fixture(scope="module")
def url():
    """A null server in a process of its own."""
    with null_server(Script(ttft_s=0.005, tpot_s=0.001)) as address:
        yield address


def test_replay_then_list_then_show(tmp_path, url):
    """A generated trace is replayed, the run is listed and shown, as tables and as JSON."""
    done = call(
        "replay", "demo", "--url", url, "--limit", "12", "--rate", "200", "--max-output", "4", "--prompts", "tokens",
        "--slo", "chat:ttft=60", "--slo", "document:ttft=60", "--label", "first", "--json",
        "--out", str(tmp_path / "a"),
    )  # fmt: skip
    assert done.exit_code in (0, 4), done.output  # 4: this machine was too busy for the client
    told = json.loads(done.stdout)
    assert told["summary"]["total"]["n"] == 12
    assert told["summary"]["total"]["attainment"] == 1.0
    assert "clipped to 4" in " ".join(told["meta"]["trace"]["selection"])
    (line,) = call("runs", "list", str(tmp_path), "--json").stdout.splitlines()
    assert (json.loads(line)["label"], json.loads(line)["kind"]) == ("first", "replay")
    listed = call("runs", "list", str(tmp_path)).stdout
    assert "first" in listed
    assert "replay" in listed
    shown = json.loads(call("runs", "show", str(tmp_path / "a"), "--json").stdout)
    assert shown["summary"] == told["summary"]
    assert "12 requests" in call("runs", "show", str(tmp_path / "a")).stdout


def test_targets_for_nobody_are_an_error_before_anything_is_sent(tmp_path, url):
    """Every answer would attain them: a slip in a class's name must not read as 100 %."""
    words = ["replay", "demo", "--url", url, "--limit", "3", "--out", str(tmp_path / "a")]
    result = call(*words, "--slo", "caht:ttft=1")
    assert isinstance(result.exception, InputError)
    assert "targets for class caht, requests of class chat" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay"], "expected TRACE and --url"),
        (["replay", "demo", "--url", "localhost:8000"], "expected http"),
        (["replay", "demo", "--url", "http://x", "--slo", "ttft"], "KEY=SECONDS"),
        (["replay", "demo", "--url", "http://x", "--class-rule", "chat<=few"], "CLASS<=TOKENS"),
        (["replay", "demo", "--url", "http://x", "--class-rule", "chat<400"], "'chat<400': expected CLASS or CLASS<="),
        (["replay", "demo", "--url", "http://x", "--class-rule", "chat=<400"], "'chat=<400': expected CLASS"),
        (["replay", "demo", "--url", "http://x", "--limit", "0"], "limit = 0: expected a number above 0"),
        (["replay", "demo", "--url", "http://x", "--rate", "0"], r"rate = 0\.0: expected a number above 0"),
        (["replay", "demo", "--url", "http://x", "--format", "azure2023"], "--format 'azure2023' with demo"),
        (["replay", "--self-test", "--url", "http://x"], "--url http://x with --self-test"),
        (["replay", "--self-test", "--json", "--rate", "3"], r"--rate 3\.0 with --self-test"),
        (["replay", "--self-test", "--no-slo-headers"], "-slo-headers .*with --self-test"),
        (["replay", "--self-test", "demo"], "TRACE demo with --self-test"),
        (["runs", "list", "nowhere"], "expected a folder"),
        (["runs", "show", "nowhere"], r"no run\.json"),
    ],
)
def test_bad_input_is_named(words, message, tmp_path, monkeypatch):
    """Exit code 2 comes from `InputError`, whose text names the flag and what was expected."""
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert isinstance(result.exception, InputError)
    assert result.exception.exit_code == 2
    with pytest.raises(InputError, match=message):
        raise result.exception


def test_ctrl_c_leaves_what_finished(tmp_path, url):
    """SIGINT: exit code 130, the finished requests on disk, the run marked as interrupted."""
    start = "import sys; from headway.cli.main import run; sys.argv[0] = 'headway'; run()"
    command = [
        sys.executable, "-c", start, "replay", "demo", "--url", url, "--limit", "5000", "--rate", "50",
        "--max-output", "2", "--prompts", "tokens", "--out", str(tmp_path / "run"), "--json",
    ]  # fmt: skip
    part = tmp_path / "run" / "requests.jsonl.part"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") >= 5):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    run = load(tmp_path / "run")
    assert run.meta["state"] == "interrupted"
    assert 5 <= run.frame.height < 5000
    assert run.meta["not_offered"] == 5000 - run.frame.height
    assert not part.exists()
