"""Clients that wait as they are told, above capacity, with the real driver and admission test on the scripted engine.

Poisson arrivals for 40 s, log-normal lengths (medians 200 and 30 tokens); who is refused with a wait sends the same
request once more after exactly that wait. Capacity is what the engine finishes when everything is there at once.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

import pytest

from headway.config import Config
from headway.core import CostCoefficients
from headway.engine.fake import FakeEngine

TRUE = CostCoefficients(g=0.010, a=0.0005, b=0.0005)

#: Requests a second: 300 of the load below at once took 46 s under admit_all.
CAPACITY = 6.57


@dataclass
class Told:
    """What became of the requests: accepted at once, and those that came again as they were told."""

    offered: int = 0
    accepted: int = 0
    again: int = 0
    accepted_again: int = 0


def load(times: float, *, honour: float, seconds: bool = False, bookings: bool = True) -> Told:
    """Offer `times` the capacity; a share `honour` of the clients comes back, with `seconds` by whole seconds."""
    chat = {"ttft_ms": 1000, "tpot_ms": 60}
    config = Config.model_validate(
        {"front_ms": 0, "default_class": "chat", "bookings": bookings, "class": {"chat": chat}}
    )
    fake = FakeEngine(config, coefficients=TRUE, max_step_tokens=2048, max_running=256)
    rng, at, coming = random.Random(3), 0.0, []
    while (at := at + rng.expovariate(times * CAPACITY)) < 40.0:
        prompt, output = (max(2, int(size * rng.lognormvariate(0, 0.5))) for size in (200, 30))
        coming.append((at, len(coming), 0, prompt, output, rng.random() < honour))
    told, sent, read = Told(offered=len(coming)), {}, 0
    while coming or fake._live:
        if not fake._live:
            fake.now_s = max(fake.now_s, coming[0][0])
        while coming and coming[0][0] <= fake.now_s:
            row = heapq.heappop(coming)
            at, number, tries, prompt, output, _ = row
            name = f"{number} try {tries}"
            sent[name] = row
            fake.add(
                name,
                prompt_tokens=prompt,
                output_tokens=output,
                fingerprint=str(number),
                arrival_unix_s=at,
            )
            told.again += tries
        fake.step()
        for message in fake.messages[read:]:
            if message["kind"] not in ("accepted", "refused"):
                continue
            at, number, tries, prompt, output, honours = sent[message["group"]]
            if message["kind"] == "accepted":
                told.accepted += not tries
                told.accepted_again += tries
            elif honours and not tries and (wait := message["retry_after_s"]) is not None:
                wait = max(1, math.ceil(wait)) if seconds else math.ceil(wait * 1e3) / 1e3
                heapq.heappush(coming, (fake.now_s + wait, number, 1, prompt, output, honours))
        read = len(fake.messages)
    promised = [m for m in fake.messages if m["kind"] == "done" and m["promised"]]
    late = [m for m in promised if m["ttft_s"] > 1.0 + 1e-9 or (m["tpot_s"] or 0.0) > 0.06 + 1e-9]
    assert len(late) <= 0.005 * len(promised)
    return told


@pytest.mark.parametrize("times", [1.4, 2.0])
@pytest.mark.parametrize("seconds", [False, True])
def test_who_waits_as_told_is_accepted(times: float, seconds: bool) -> None:
    """At least 90 % of those who come back are accepted, and more is served than if nobody did."""
    told = load(times, honour=1.0, seconds=seconds)
    assert told.again > 0.15 * told.offered
    assert told.accepted_again >= 0.9 * told.again
    assert told.accepted + told.accepted_again > load(times, honour=0.0).accepted


def test_without_bookings_waiting_is_of_little_use() -> None:
    """What others took meanwhile is gone: the same waits, kept for nobody."""
    told = load(2.0, honour=1.0, bookings=False)
    assert told.accepted_again < 0.5 * told.again


@pytest.mark.parametrize("times", [1.4, 2.0])
def test_clients_that_never_come_back_cost_nothing(times: float) -> None:
    """Within 2 % as many are accepted as without bookings."""
    kept = load(times, honour=0.0)
    assert kept.accepted == pytest.approx(load(times, honour=0.0, bookings=False).accepted, rel=0.02)
