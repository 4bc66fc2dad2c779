"""The wait that a refusal tells: by hand, and kept by an engine to which nothing else comes."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from _build import decoding, request, view
from headway.admission import create
from headway.admission._retry import departure_wait_s, first_token_wait_s
from headway.config import Config
from headway.core import CostCoefficients, Ledger, Reason, Reject
from headway.engine.fake import FakeEngine

TRUE = CostCoefficients(g=0.010, a=0.0005, b=0.0005)


def wait(finish: list[float], dues: list[float], due: float, behind: int = 0) -> float | None:
    """`first_token_wait_s` of lists."""
    return first_token_wait_s(np.array(finish), np.array(dues), due, behind)


def test_waits_by_hand() -> None:
    """Due at 1. Alone in its place done at 1.4: wait 0.4, unless others are due before that and go ahead of it."""
    assert wait([1.4], [], 1.0) == pytest.approx(0.4)
    # One is due at 1.2: at 1.4 it would be ahead, and then this one is done at 1.9.
    assert wait([1.4, 1.9], [1.2], 1.0) == pytest.approx(0.9)
    # One is due at 3: it stays behind.
    assert wait([1.4, 1.9], [3.0], 1.0) == pytest.approx(0.4)
    # In time itself (0.8), but it would break the promise due at 1.5: it has to be due after that one.
    assert wait([0.8, 1.3], [1.5], 1.0, behind=1) == pytest.approx(0.5)
    # Never done: unknown.
    assert wait([math.inf], [], 1.0) is None


def test_departures_by_hand() -> None:
    """Streams that end in 1, 2 and 3 s at their pace; two must end for 250 tokens of room."""
    ledger = Ledger()
    decoding(ledger, *(request(n, tpot=0.1, prompt=100 * n, output=10 * n + 1) for n in (3, 1, 2)))
    assert departure_wait_s(ledger, lambda ended, tokens: tokens >= 250) == pytest.approx(2.0)
    assert departure_wait_s(ledger, lambda ended, tokens: ended >= 4) is None


def test_a_refusal_for_the_pace_tells_lengths_not_moments() -> None:
    """At any time on the clock: the longest gap that could be promised, and when enough streams have ended."""
    ledger = Ledger()
    decoding(ledger, *(request(n, tpot=0.05, output=20 + n) for n in range(26)), first_s=5000.0)
    cost = CostCoefficients(g=0.010, a=0.001, b=0.001)
    verdict = create("response_time").decide(
        view(ledger, cost, now=5000.0), request(99, ttft=30.0, arrival=5000.0, tpot=0.05)
    )
    assert isinstance(verdict, Reject)
    assert verdict.reason is Reason.TBT
    assert verdict.bound_s == pytest.approx(0.010 + 16 * 0.001 + 27 * 0.001)
    assert verdict.retry_after_s == pytest.approx(21 * 0.05)  # three must end; the third has 21 tokens left


def test_waiting_that_long_is_enough_when_nothing_else_comes() -> None:
    """120 bursts that fill an engine; who is refused and told a wait passes after it in at least 95 % of cases."""
    passed = []
    for seed in range(120):
        rng = random.Random(seed)
        prompt = rng.randint(50, 800)
        chat = {"ttft_ms": rng.choice([500, 1000, 2000]), "tpot_ms": rng.choice([40, 60, 200])}
        config = Config.model_validate({"front_ms": 0, "default_class": "chat", "class": {"chat": chat}})
        fake = FakeEngine(config, coefficients=TRUE, blocks=rng.choice([60, 10_000]), max_running=32)
        for number in range(rng.randint(5, 40)):
            fake.add(str(number), prompt_tokens=rng.randint(10, 400), output_tokens=rng.randint(1, 60))
            if rng.random() < 0.3:
                fake.step()
        fake.add("asked", prompt_tokens=prompt, output_tokens=20)
        told = answer(fake, "asked")
        if told["kind"] == "refused" and told["retry_after_s"] is not None:
            fake.run(until_s=fake.now_s + told["retry_after_s"])
            fake.add("again", prompt_tokens=prompt, output_tokens=20)
            passed.append(answer(fake, "again")["kind"] == "accepted")
    assert len(passed) > 60
    assert sum(passed) >= 0.95 * len(passed)


def answer(fake: FakeEngine, name: str) -> dict[str, Any]:
    """Step until the request has its verdict; return the message."""
    while True:
        found = [m for m in fake.messages if m.get("group") == name and m["kind"] in ("refused", "accepted")]
        if found:
            return found[0]
        fake.step()
