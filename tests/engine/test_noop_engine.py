"""Headway plugged in changes no token: against stock vLLM, the same prompts, greedy.

In float32. In bfloat16 the same holds one by one, but not in a burst, and there stock vLLM differs from itself as well:
which requests share a step depends on the microsecond of their arrival, and changes the order of its sums.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_client import Client

from headway.engine.vllm.server import Server

pytestmark = pytest.mark.engine

FLOAT32 = ["--dtype", "float32"]
PROMPTS = [
    "The capital of France is",
    "1 2 3 4 5 6 7",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Roses are red, violets are",
    "The three primary colours are",
    "Water boils at",
    "To be or not to be, that is",
]


class Texts(NamedTuple):
    """What one server answered."""

    one_by_one: list[str]
    burst: list[str]
    burst_again: list[str]


def ask(server: Server, prompt: str) -> str:
    """Return 24 greedy tokens."""
    with Client(server) as client:
        answer = client.post("/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0})
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["text"]
    return text


def answers(server: Server) -> Texts:
    """Ask one by one, then all at once, twice."""

    def burst() -> list[str]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))

    one_by_one = [ask(server, prompt) for prompt in PROMPTS]
    texts = Texts(one_by_one, burst(), burst())
    server.stop()
    return texts


@pytest.fixture(scope="module")
def stock(start_server: Callable[..., Server]) -> Texts:
    """Stock vLLM."""
    return answers(start_server(stock=True, extra=FLOAT32))


@pytest.fixture(scope="module")
def no_op(stock: Texts, start_server: Callable[..., Server]) -> Texts:
    """Headway with policy fcfs and admission admit_all, by the flags of `headway serve`."""
    return answers(start_server(policy="fcfs", admission="admit_all", extra=FLOAT32))


@pytest.fixture(scope="module")
def default(no_op: Texts, start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Headway as it comes."""
    config: Path = tmp_path_factory.mktemp("default") / "headway.toml"
    config.write_text("[class.default]\nttft_ms = 60000\n")
    return answers(start_server(config=config, extra=FLOAT32))


def test_a_no_op_gives_the_tokens_of_stock_vllm(stock: Texts, no_op: Texts) -> None:
    """One by one: the steps are the same, so every token is."""
    assert stock.one_by_one == no_op.one_by_one


def test_the_default_policy_gives_the_tokens_of_stock_vllm(stock: Texts, default: Texts) -> None:
    """One by one: what it decides is when, never what."""
    assert stock.one_by_one == default.one_by_one


@pytest.mark.parametrize("which", ["no_op", "default"])
def test_a_burst_gives_the_tokens_of_stock_vllm(stock: Texts, which: str, request: pytest.FixtureRequest) -> None:
    """Eight at once, twice: whatever steps they share, as stock vLLM does one by one."""
    texts: Texts = request.getfixturevalue(which)
    assert stock.burst == stock.one_by_one
    assert texts.burst == texts.burst_again == stock.one_by_one
