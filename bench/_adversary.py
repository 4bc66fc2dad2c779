"""Loads that are bad for promises: bursts, equal deadlines, huge prompts, deadlines of hardly more than the cost.

Everything is small (short prompts and answers) so that many requests can be judged; what is large against what is
what counts. A case is drawn from its number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from headway.core import CostCoefficients, Line, Slo
from headway.trace import SCHEMA, ReadReport, Trace
from headway.twin import Profile, Scenario
from headway.twin.check import LOW, STRICT
from headway.twin.patterns import Course, alternating, constant, spells, uniform

#: Costs of a step: a CPU, a GPU, one where prefill attention is dear and one where decodes are.
COSTS = {
    "cpu": CostCoefficients(g=0.031, a=0.0014, b=0.0006, x=0.68e-6),
    "gpu": CostCoefficients(g=0.0125, a=9.4e-5, b=9.4e-5, k=8.6e-8, x=3e-9),
    "attention": CostCoefficients(g=0.004, a=2e-5, b=2e-5, k=1e-7, x=1e-6),
    "decodes": CostCoefficients(g=0.005, a=5e-5, b=8e-4, k=1e-7, x=1e-8),
}

#: Engine settings that a case may have beside the strict ones.
ENGINES: tuple[dict[str, Any], ...] = (
    {},
    {"async_lag": True},
    {"token_budget": 96},
    {"output_cap": 40},
    {"kv_blocks": 90},
    {"async_lag": True, "token_budget": 160, "output_cap": 24},
    {"prefix_cache": True},
    {"prefix_cache": True, "kv_blocks": 120, "async_lag": True},
    {"blocking_s": 0.0},  # tight: 3 steps with a smallest chunk
    {"max_running": 12},
    {"async_lag": True, "blocking_s": 1.0},  # wide: ten steps with a smallest chunk
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: what arrives, at what engine, and how long its steps take."""

    number: int
    shape: str
    cost: str
    engine: dict[str, Any]
    factor: float
    course_name: str
    course: Course
    trace: Trace
    scenario: Scenario


def case(number: int, requests: int) -> Case:
    """Return case `number`."""
    random = np.random.default_rng([number, 5])
    shape = ORDER[number % len(ORDER)]
    cost_name = str(random.choice(list(COSTS)))
    engine = dict(ENGINES[int(random.integers(len(ENGINES)))])
    factor = float(random.choice([1.05, 1.2, 1.5, 2.0]))
    cost = COSTS[cost_name]
    if "blocking_s" in engine:
        engine["blocking_s"] = (10 if engine["blocking_s"] else 3) * factor * (cost.g + 16 * cost.a)
    slos = classes(cost, factor, random)
    trace = SHAPES[shape](random, requests, cost, list(slos.values()), float(random.choice([0.4, 0.6, 0.8, 1.2, 2.0])))
    courses: list[tuple[str, Course]] = [
        ("envelope", constant(factor)),
        ("mean", constant(1.0)),
        ("alternating", alternating(1.0, factor, int(random.integers(1, 20)))),
        ("low and envelope", alternating(LOW, factor, int(random.integers(1, 20)))),
        ("random", uniform(LOW, factor, number)),
        ("spells", spells(LOW, factor, number)),
    ]
    name, course = courses[int(random.integers(len(courses)))]
    # Half of the engines know what steps in a row take, and the course keeps to it.
    burst = float(random.choice([0.0, 1.0, 4.0, 12.0])) * cost.g
    lines = (Line(float(random.choice([1.0, 1.05, 1.15])), burst),) if random.random() < 0.5 else ()
    settings = {"token_budget": 512, "max_running": 128, "max_model_len": 4096, "block_size": 16, "kv_blocks": 4096}
    return Case(
        number=number,
        shape=shape,
        cost=cost_name,
        engine=engine,
        factor=factor,
        course_name=name,
        course=course,
        trace=trace,
        scenario=Scenario(
            profile=Profile(name=cost_name, label="estimated", cost=cost, envelope_factor=factor, lines=lines),
            slos=slos,
            settings={**STRICT, **settings, **engine},
            seed=number,
        ),
    )


def classes(cost: CostCoefficients, factor: float, random: np.random.Generator) -> dict[str, Slo]:
    """Return three classes: short and long deadlines, banked and hard paces, every rule for what can't be promised."""
    prompt = cost.g + cost.work_s(60, 0)
    out = {}
    for name, deadline in (("a", 6.0), ("b", 20.0), ("c", 80.0)):
        pace = factor * (cost.g + 16 * cost.a) * float(random.choice([1.6, 3.0, 8.0, 20.0]))
        hard = bool(random.random() < 0.4)
        out[name] = Slo(
            name=name,
            ttft_s=factor * prompt * deadline * float(random.uniform(0.6, 1.4)),
            tpot_s=None if hard else pace,
            tbt_s=pace if hard else None,
            on_miss=str(random.choice(["reject", "defer", "best_effort"], p=[0.7, 0.25, 0.05])),  # type: ignore[arg-type]
        )
    return out


def _times(random: np.random.Generator, work_s: np.ndarray, load: float, burst: int = 1) -> np.ndarray:
    """Arrivals whose work is `load` seconds a second, in groups of `burst` at one instant."""
    groups = -(-len(work_s) // burst)
    return np.repeat(np.sort(random.uniform(0, work_s.sum() / load, groups)), burst)[: len(work_s)]


def _trace(
    name: str,
    arrival: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    which: np.ndarray,
    random: np.random.Generator,
) -> Trace:
    names = np.array(["a", "b", "c"])[which]
    # A prefix of a few contents in ids of 16 tokens, so that a prefix cache has something to hit and to evict.
    topic = random.integers(0, 40, len(inputs))
    hashes = [[int(t) * 1000 + i for i in range(int(n) // 16)] for t, n in zip(topic, inputs, strict=True)]
    frame = pl.DataFrame(
        {
            "arrival_s": arrival - arrival.min(),
            "input_tokens": inputs,
            "output_tokens": outputs,
            "slo_class": names,
            "hash_ids": hashes,
        }
    ).sort("arrival_s", maintain_order=True)
    missing = [pl.lit(None, dtype=dtype).alias(key) for key, dtype in SCHEMA.items() if key not in frame.columns]
    frame = frame.with_columns(missing).select(pl.col(key).cast(dtype) for key, dtype in SCHEMA.items())
    report = ReadReport(read=len(frame), kept=len(frame))
    return Trace(frame=frame, format="synthetic", source=name, sha256="0" * 64, report=report, block_size=16)


def _work(cost: CostCoefficients, inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    return np.array(
        [cost.work_s(int(i), 0) + 0.1 * cost.g + cost.b * int(o) for i, o in zip(inputs, outputs, strict=True)]
    )


def _bursts(random: np.random.Generator, n: int, cost: CostCoefficients, slos: list[Slo], load: float) -> Trace:
    """Groups at one instant, many of one class and size: equal deadlines."""
    size = int(random.choice([5, 20, 80]))
    inputs = np.repeat(random.integers(2, 90, -(-n // size)), size)[:n]
    outputs = random.integers(1, 9, n)
    which = np.repeat(random.integers(0, 3, -(-n // size)), size)[:n]
    return _trace("bursts", _times(random, _work(cost, inputs, outputs), load, size), inputs, outputs, which, random)


def _giants(random: np.random.Generator, n: int, cost: CostCoefficients, slos: list[Slo], load: float) -> Trace:
    """One huge prompt with a patient deadline among fifty short ones."""
    big = random.random(n) < 0.02
    inputs = np.where(big, random.integers(300, 1500, n), random.integers(1, 60, n))
    outputs = random.integers(1, 9, n)
    which = np.where(big, 2, random.integers(0, 2, n))
    return _trace("giants", _times(random, _work(cost, inputs, outputs), load), inputs, outputs, which, random)


def _tight(random: np.random.Generator, n: int, cost: CostCoefficients, slos: list[Slo], load: float) -> Trace:
    """Prompts whose time alone is 0.3 to 1 times their deadline; some take it to the last token."""
    which = random.integers(0, 2, n)
    most = np.array([max(1, cost.tokens_within((slo.ttft_s or 1.0) - cost.g, 0)) for slo in slos])[which]
    share = np.where(random.random(n) < 0.2, 1.0, random.uniform(0.3, 1.0, n))
    inputs = np.clip((most * share).astype(int), 1, 1500)
    outputs = random.integers(1, 9, n)
    return _trace("tight", _times(random, _work(cost, inputs, outputs), load), inputs, outputs, which, random)


def _streams(random: np.random.Generator, n: int, cost: CostCoefficients, slos: list[Slo], load: float) -> Trace:
    """Answers of very different length: departures are what later promises count on."""
    inputs = random.integers(1, 80, n)
    outputs = np.where(random.random(n) < 0.1, random.integers(30, 120, n), random.integers(1, 6, n))
    which = random.integers(0, 3, n)
    return _trace("streams", _times(random, _work(cost, inputs, outputs), load, 3), inputs, outputs, which, random)


def _tiny(random: np.random.Generator, n: int, cost: CostCoefficients, slos: list[Slo], load: float) -> Trace:
    """Prompts of 1 to 16 tokens, below the smallest chunk, in front of and behind longer ones."""
    inputs = np.where(random.random(n) < 0.8, random.integers(1, 17, n), random.integers(60, 200, n))
    outputs = random.integers(1, 5, n)
    which = random.integers(0, 3, n)
    return _trace("tiny", _times(random, _work(cost, inputs, outputs), load, 8), inputs, outputs, which, random)


Shape = Callable[[np.random.Generator, int, CostCoefficients, list[Slo], float], Trace]

SHAPES: dict[str, Shape] = {
    "bursts": _bursts,
    "giants": _giants,
    "tight": _tight,
    "streams": _streams,
    "tiny": _tiny,
}

#: Shapes in turn; few tight ones, of which little can be accepted.
ORDER = ("bursts", "tiny", "streams", "bursts", "tiny", "giants", "streams", "tiny", "bursts", "tight")
