"""What the end of a vLLM log is turned into. The lines are vLLM 0.32's own, shortened."""

from __future__ import annotations

import pytest

from headway.engine.vllm.diagnosis import diagnose
from headway.engine.vllm.launch import Command
from headway.errors import EngineError, InputError

COMMAND = Command(argv=(), env={}, host="127.0.0.1", port=8471, model="org/model")

GENERIC = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def test_mistyped_option_is_the_callers_and_gets_a_hint() -> None:
    """vLLM's own words, without its page of usage, and the option of ours that was meant."""
    log = "usage: api_server.py [-h]\n   [model_tag]\napi_server.py: error: unrecognized arguments: --admision=x\n"
    error = diagnose(log, 2, COMMAND)
    assert isinstance(error, InputError)
    assert str(error) == ("vLLM refused its options: unrecognized arguments: --admision=x (did you mean --admission?)")


def test_bad_value_has_no_hint() -> None:
    """A refused value is passed on as vLLM says it."""
    error = diagnose("api_server.py: error: argument --max-num-seqs: invalid int value: 'abc'", 2, COMMAND)
    assert str(error) == "vLLM refused its options: argument --max-num-seqs: invalid int value: 'abc'"


@pytest.mark.parametrize(
    "line",
    [
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
        "OSError: We couldn't connect to 'https://hub' to load the files, and couldn't find them in the cached files.",
        "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/nonexistent/dir'.",
        "  Value error, Unrecognized model in /x. Should have a `model_type` key. [type=value_error, input_value=1]",
    ],
)
def test_model_not_found(line: str) -> None:
    """Whatever way vLLM says that there is no such model, the error names the model and what is expected."""
    error = diagnose(f"INFO start\n{line}\n", 1, COMMAND)
    assert isinstance(error, EngineError)
    assert str(error).startswith("model org/model was not found or cannot be read: ")
    assert "expected a folder" in str(error)
    assert "[type=" not in str(error)


def test_memory_error_of_a_worker_wins_over_what_follows_it() -> None:
    """The cause stands in a worker's prefixed line; the later errors only point at it."""
    cause = "ValueError: Available memory on node 0 (6/8 GiB) is less than requested memory for kv (100.0 GiB)."
    log = f"(Worker pid=95) ERROR 11-29 14:24:59 [multiproc_executor.py:1063] {cause}\nTraceback\n{GENERIC}\n"
    assert str(diagnose(log, 1, COMMAND)).startswith(f"not enough memory to serve org/model: {cause}")


def test_killed_by_the_system() -> None:
    """Exit code 137 without a word is what the out-of-memory killer leaves."""
    assert "memory ran out" in str(diagnose("INFO loading\n", 137, COMMAND))


def test_port_taken_meanwhile() -> None:
    """A port that was free at the check and taken at the bind is still named."""
    log = "OSError: [Errno 98] Address already in use"
    assert str(diagnose(log, 1, COMMAND)) == "port 8471 on 127.0.0.1 was taken while vLLM started"


def test_unknown_cause_is_named() -> None:
    """Another exception is shown as it is, without the traceback."""
    log = f"Traceback (most recent call last):\n  File x\npkg.mod.OddError: something odd\n{GENERIC}"
    assert str(diagnose(log, 1, COMMAND)) == "vLLM ended with exit code 1: pkg.mod.OddError: something odd"


def test_no_cause_shows_the_last_lines() -> None:
    """Without an exception line the end of the log is all there is to tell."""
    log = "\n".join(f"line {i}" for i in range(40)) + f"\n{GENERIC}"
    message = str(diagnose(log, 1, COMMAND))
    assert message.splitlines()[0] == "vLLM ended with exit code 1; its last lines:"
    assert message.splitlines()[-2:] == ["  line 39", f"  {GENERIC}"]
    assert "line 20" not in message
