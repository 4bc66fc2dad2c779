"""Promises while vLLM speculates: n-gram drafts beside the strict setting, on a real vLLM."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_client import Client

from headway.engine.vllm.server import Server
from headway.twin.decisions import read

pytestmark = pytest.mark.engine

CONFIG = """
default_class = "chat"
[policy_parameters]
jump = false
[admission_parameters]
strict = true
[class.chat]
ttft_ms = 20000
tpot_ms = 2000
"""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
OUTPUT = 40


def test_drafts_bring_tokens_and_keep_the_books(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Prompts that repeat themselves: some steps bring several tokens, every answer is counted to its last token,
    nothing fails open, and nobody who was promised a pace of two seconds misses it.
    """
    config, steps = tmp_path / "headway.toml", tmp_path / "steps.jsonl"
    config.write_text(CONFIG, encoding="utf-8")
    environ = {**os.environ, "HEADWAY_STEP_LOG": str(steps), "HEADWAY_PROFILE": str(tmp_path / "cost.json")}
    extra = ["--max-model-len", "1024", "--speculative-config", json.dumps(DRAFTS)]
    server = start_server(config=config, environ=environ, extra=extra)

    def ask(number: int) -> tuple[int, list[int]]:
        with Client(server) as client:
            body = {
                "prompt": [300 + number, 17, 23, 42, 99] * 12,
                "max_tokens": OUTPUT,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = client.post("/v1/completions", body)
            ids = answer.json["choices"][0]["token_ids"] if answer.status == 200 else []
            return answer.status, ids

    teach = [ask(number) for number in range(20)]  # one by one: the cost is learned from steps with drafts in them
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(ask, range(12)))
    with Client(server) as client:
        metrics = client.metrics()
    assert {status for status, _ in teach} == {200}
    assert {status for status, _ in crowd} <= {200, 429}
    assert all(len(ids) == OUTPUT for status, ids in (*teach, *crowd) if status == 200)
    accepted = sum(
        value for name, value in metrics.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_total")
    )
    assert accepted > 0
    assert metrics["headway_fail_open_total"] == 0
    assert not any(name.startswith("headway_misses_total") and value for name, value in metrics.items())
    server.stop()
    real = read(steps)
    served = [number for number, verdict in real.verdicts.items() if verdict == "accepted"]
    assert len(served) == sum(status == 200 for status, _ in (*teach, *crowd))
    assert {real.output[number] for number in served} == {OUTPUT}
    decodes = Counter(number for step in real.steps for number in step.decodes)
    # The first token comes from the prompt's step; each step with its decode brings one more, or more.
    assert all(decodes[number] <= OUTPUT - 1 for number in served)
    assert sum(decodes[number] for number in served) < (OUTPUT - 1) * len(served)
