"""What the twin learns from a real vLLM: a profile through `headway calibrate URL`, and every decision of its log."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_client import Client
from typer.testing import CliRunner

from headway.cli.main import build
from headway.engine.vllm.server import Server
from headway.twin.decisions import compare, read
from headway.twin.profile import load
from headway.twin.rerun import rerun

pytestmark = pytest.mark.engine

CONFIG = """
default_class = "chat"
[class.chat]
ttft_ms = 1500
tpot_ms = 150
"""


class Served(NamedTuple):
    """A server, its step log, and a place for files."""

    server: Server
    steps: Path
    folder: Path


@pytest.fixture(scope="module")
def served(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One vLLM with Headway and a step log."""
    folder = tmp_path_factory.mktemp("twin")
    config = folder / "headway.toml"
    config.write_text(CONFIG)
    steps = folder / "steps.jsonl"
    environ = {**os.environ, "HEADWAY_STEP_LOG": str(steps), "HEADWAY_PROFILE": str(folder / "cost.json")}
    return Served(start_server(config=config, environ=environ, extra=["--max-model-len", "1024"]), steps, folder)


def test_calibrate_sweeps_a_running_server(served: Served) -> None:
    """One round: a profile whose settings and origin the server told, and a fit that predicts the steps held out."""
    out = served.folder / "mine.toml"
    command = ["calibrate", "--out", str(out), "--rounds", "1", served.server.url]
    result = CliRunner().invoke(build(command), command)
    assert result.exit_code == 0, result.output
    profile = load(out)
    assert profile.engine["max_model_len"] == 1024
    assert profile.engine["kv_blocks"] > 0
    assert profile.provenance["vllm_version"].endswith("0.32.0")
    assert profile.fit_error["all"]["n"] > 50
    assert abs(profile.fit_error["all"]["bias"]) < 0.5


def test_the_twin_decides_as_the_server_did(served: Served) -> None:
    """A burst that is partly refused: the same requests in every step with the same chunks, and the same verdicts."""

    def ask(number: int) -> int:
        with Client(served.server) as client:
            prompt = [100 + number, *range(200, 240 + 7 * number)]
            body = {"prompt": prompt, "max_tokens": 4 + number % 9, "temperature": 0, "ignore_eos": True}
            return client.post("/v1/completions", body).status

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    assert set(answers) <= {200, 429}
    served.server.stop()
    real = read(served.steps)
    twin, _ = rerun(real)
    found = compare(real, twin)
    assert found.same_verdicts == found.verdicts, found.differing
    assert found.same / found.steps > 0.98, found.divergence
