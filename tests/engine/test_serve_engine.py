"""`headway serve --stock` on the embedded model and the real vLLM: one start, from first byte to kill -9."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headway.engine.vllm.guard import descendants
from headway.engine.vllm.launch import free_port

pytestmark = pytest.mark.engine

SERVE = [sys.executable, "-c", "from headway.cli.main import run; run()", "serve"]


class Served(NamedTuple):
    """The running command and where it listens."""

    process: subprocess.Popen[str]
    port: int
    listening: str  # the line that it printed when it was ready


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run `headway serve` as a user would."""
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "stderr.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*SERVE, "--stock", "--port", str(port)], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            listening = next((line for line in lines if "serving" in line), "")
            assert listening, Path(log).read_text()[-4000:]
            yield Served(process, port, listening)
        finally:
            process.terminate()


def ask(served: Served, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET, or POST a JSON body, and return the JSON answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def test_says_where_it_listens(served: Served) -> None:
    """One line on stdout, once it is healthy."""
    assert served.listening.startswith(f"headway: serving smollm2 on http://127.0.0.1:{served.port}/v1 (ready after ")


def test_lists_the_model(served: Served) -> None:
    """The embedded model is served as smollm2 with a context of 4,096 tokens."""
    (model,) = ask(served, "/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == ("smollm2", 4096)


def test_greedy_answer_makes_sense(served: Served) -> None:
    """Weights, tokenizer and chat template are right: the model knows the capital of France, and stops."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "smollm2", "messages": chat, "max_tokens": 32, "temperature": 0}
    choice = ask(served, "/v1/chat/completions", body)["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"


def test_completion(served: Served) -> None:
    """A plain completion counts its tokens: every digit is one."""
    body = {"model": "smollm2", "prompt": "1 2 3 4 5 6 7", "max_tokens": 4, "temperature": 0}
    answer = ask(served, "/v1/completions", body)
    assert answer["choices"][0]["text"] == " 8 9"
    assert answer["usage"]["completion_tokens"] == 4


def test_second_server_on_the_port_is_refused(served: Served) -> None:
    """The port is named, the exit code is the engine's, and no engine is started for it."""
    second = subprocess.run(
        [*SERVE, "--stock", "--port", str(served.port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 3
    assert f"headway: port {served.port} on 127.0.0.1 is taken" in second.stderr


def test_nothing_survives_a_kill_of_the_parent(served: Served, assert_ends: Callable[[int], None]) -> None:
    """Kill -9 of the command (last test: the server is gone after it): no process of vLLM is left."""
    tree = descendants(served.process.pid)
    assert len(tree) >= 4  # guard, API server, EngineCore, worker
    served.process.kill()
    served.process.wait()
    for pid in tree:
        assert_ends(pid)
