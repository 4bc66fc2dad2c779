"""Loads of the tournament: traces, the engine they meet, their targets, and their capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl

from headway.replay.targets import Targets
from headway.trace import SCHEMA, ReadReport, Trace, read, select
from headway.trace.synthetic import demo_trace
from headway.twin import Profile, Scenario, find_profile, simulate

CHAT = {"chat": Targets(ttft_s=1.0, tpot_s=0.12), "document": Targets(ttft_s=6.0, tpot_s=0.12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One kind of traffic. `make(rate, seed)` gives about `duration_s` seconds of it at `rate` requests/s."""

    name: str
    profile: str
    targets: Mapping[str, Targets]
    make: Callable[[float, int], Trace]
    settings: Mapping[str, object]
    highest_rate: float  # above any capacity, where the search for it begins
    budgets: tuple[int, ...]  # token budgets that an expert would try
    file: str | None = None  # needs this file of --traces
    duration_s: float = 60.0

    def engine(self) -> Profile:
        """Return the profile."""
        return find_profile(self.profile)


def _demo(kind: str, duration_s: float) -> Callable[[float, int], Trace]:
    return lambda rate, seed: demo_trace(rate=rate, seed=seed, duration_s=duration_s, kind=kind)


@lru_cache(maxsize=8)
def _read(path: str) -> Trace:
    return read(Path(path))


def _window(path: str, duration_s: float, **cut: int) -> Callable[[float, int], Trace]:
    """Seeds are windows of the trace, a sixth of it apart; time is scaled to the rate inside the window."""

    def make(rate: float, seed: int) -> Trace:
        trace = _read(path)
        wanted = max(20, int(rate * duration_s))
        last = max(0, len(trace) - wanted - 1)
        first = min(last, len(trace) * (seed % 6) // 6)
        at = float(trace.frame["arrival_s"][first])
        return select(trace, start_s=at, limit=wanted, rate=rate, **cut)  # type: ignore[arg-type]

    return make


def invented(name: str, arrival: np.ndarray, inputs: np.ndarray, outputs: np.ndarray, classes: list[str]) -> Trace:
    """Return a trace of these columns."""
    order = np.argsort(arrival, kind="stable")
    frame = pl.DataFrame(
        {
            "arrival_s": arrival[order] - arrival.min(),
            "input_tokens": inputs[order],
            "output_tokens": outputs[order],
            "slo_class": [classes[i] for i in order],
        }
    )
    missing = [pl.lit(None, dtype=dtype).alias(key) for key, dtype in SCHEMA.items() if key not in frame.columns]
    frame = frame.with_columns(missing).select(pl.col(key).cast(dtype) for key, dtype in SCHEMA.items())
    report = ReadReport(read=len(frame), kept=len(frame))
    return Trace(frame=frame, format="synthetic", source=name, sha256="0" * 64, report=report)


def bursts(rate: float, seed: int, duration_s: float = 60.0) -> Trace:
    """Short chats in groups of 20 at one instant: equal deadlines, no warning."""
    random = np.random.default_rng([seed, 11])
    groups = max(2, int(rate * duration_s / 20))
    arrival = np.repeat(np.sort(random.uniform(0, duration_s, groups)), 20)
    n = len(arrival)
    inputs, outputs = random.integers(20, 120, n), random.integers(8, 60, n)
    return invented("bursts", arrival, inputs, outputs, ["chat"] * n)


def giants(rate: float, seed: int, duration_s: float = 60.0) -> Trace:
    """Half of the prompt tokens in a few huge prompts with patient deadlines, half in short impatient ones."""
    random = np.random.default_rng([seed, 12])
    n = max(20, int(rate * duration_s))
    big = random.random(n) < 0.04
    inputs = np.where(big, random.integers(1500, 2500, n), random.integers(20, 140, n))
    outputs = np.where(big, random.integers(4, 16, n), random.integers(8, 60, n))
    classes = ["document" if each else "chat" for each in big]
    return invented("giants", random.uniform(0, duration_s, n), inputs, outputs, classes)


def hogs(rate: float, seed: int, duration_s: float = 60.0) -> Trace:
    """Long answers that fill a small KV pool: memory, not compute, runs out first."""
    random = np.random.default_rng([seed, 13])
    n = max(20, int(rate * duration_s))
    return invented(
        "hogs",
        random.uniform(0, duration_s, n),
        random.integers(100, 500, n),
        random.integers(100, 400, n),
        ["chat"] * n,
    )


def tight(rate: float, seed: int, duration_s: float = 60.0) -> Trace:
    """Prompts whose time alone is 0.6 to 1 times their target: late by one step is late for good."""
    random = np.random.default_rng([seed, 14])
    n = max(20, int(rate * duration_s))
    return invented(
        "tight", random.uniform(0, duration_s, n), random.integers(350, 560, n), random.integers(4, 30, n), ["chat"] * n
    )


def every(traces: Path | None) -> list[Load]:
    """Return the loads that can be run: the generated ones, and those of files in `traces`."""
    cpu = {"profile": "cpu-smollm2", "targets": CHAT, "settings": {}, "budgets": (48, 64, 96, 128, 256)}
    gpu = {"profile": "estimated:a100-80g/llama-3.1-8b", "budgets": (256, 512, 1024, 2048, 4096)}
    one = {"default": Targets(ttft_s=2.0, tpot_s=0.12)}
    loads = [
        Load(name="demo mixed", make=_demo("mixed", 90), highest_rate=16, duration_s=90, **cpu),
        Load(name="demo single", make=_demo("single", 90), highest_rate=16, duration_s=90, **cpu | {"targets": one}),
        Load(name="bursts", make=bursts, highest_rate=24, **cpu),
        Load(name="giants", make=giants, highest_rate=24, **cpu),
        Load(name="hogs", make=hogs, highest_rate=12, **cpu | {"settings": {"kv_blocks": 60}}),
        Load(name="tight", make=tight, highest_rate=12, **cpu),
    ]
    if traces is None:
        return loads
    files = [
        ("azure code", "AzureLLMInferenceTrace_code.csv", Targets(ttft_s=2.0, tpot_s=0.05), 60, 24, {}, {}),
        ("azure conv", "AzureLLMInferenceTrace_conv.csv", Targets(ttft_s=1.0, tpot_s=0.05), 60, 40, {}, {}),
        (
            *("mooncake synthetic", "synthetic_trace.jsonl", Targets(ttft_s=15.0, tpot_s=0.1), 120, 6),
            *({"prefix_cache": True}, {"max_input": 65_536}),
        ),
    ]
    for name, file, targets, duration, highest, settings, cut in files:
        found = next(iter(sorted(traces.rglob(file))), None)
        if found is None:
            print(f"skipped: {name}: no {file} under {traces}")
            continue
        make = _window(str(found), duration, **cut)
        loads.append(
            Load(
                name=name, make=make, targets={"default": targets}, settings=settings, highest_rate=highest, file=file,
                duration_s=duration, **gpu,
            )
        )  # fmt: skip
    return loads


def capacity(load: Load, seeds: int) -> float:
    """Return the highest rate at which stock vLLM with defaults finishes work as fast as it arrives.

    As fast: for most seeds the last answer ends within 6 % of the duration after the last arrival, plus what the
    longest tenth of the requests takes alone on an idle engine.
    """
    low, high = 0.0, load.highest_rate
    cost = load.engine().cost
    scenario = Scenario(
        profile=load.engine(),
        targets=load.targets,
        settings={"policy": "fcfs", "admission": "admit_all", **load.settings},
    )
    for _ in range(8):
        rate = (low + high) / 2
        kept_up = 0
        for seed in range(seeds):
            trace = load.make(rate, seed)
            outcome = simulate(trace, replace(scenario, seed=seed))
            sizes = zip(trace.frame["input_tokens"], trace.frame["output_tokens"], strict=True)
            alone = np.quantile([cost.work_s(i, 0) + o * cost.seconds(0, 1, i, 0) for i, o in sizes], 0.9)
            kept_up += outcome.facts["end_s"] - trace.span_s < 0.06 * load.duration_s + alone
        low, high = (rate, high) if 2 * kept_up > seeds else (low, rate)
    return low
