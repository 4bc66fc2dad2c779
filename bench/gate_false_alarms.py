"""How often does the gate cry wolf, and how often does it see a real regression?

Pairs of scripted runs come from a queueing simulation: one FCFS server, arrivals in bursts and lengths shared by both
arms (the same trace), and in each run its own noise: jitter of every service time, a machine whose speed wanders for
seconds, and stalls that hit everything at once. Latencies are therefore autocorrelated, as on a real server.

A/A pairs differ in that noise only: every failing gate is a false alarm. `at_zero` puts the limit at +0 %, where the
nominal rate of one gate is 2.5 %. Power: all latencies of the candidate 10 % or 20 % longer (`latency_*`), or its
service times (`service_*`), which a queue amplifies. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from _report import finish
from headway.replay.arms import Arm
from headway.replay.compare import compare
from headway.replay.gate import CANNOT_TELL, FAIL, PASS, judge, parse
from headway.replay.record import SCHEMA
from headway.replay.store import Run

GATES = ("p99_ttft<=+5%", "p99_tpot<=+5%")
AT_ZERO = ("p99_ttft<=+0%", "p99_tpot<=+0%")
OUTPUT_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How busy and how noisy the scripted machine is."""

    utilisation: float
    wander_sd: float  # of the log of its speed
    memory_s: float  # how long the speed remembers
    stall_every: int  # requests between stalls, on average
    offset_sd: float = 0.0  # of the log of the speed of a whole run


ORDINARY = Machine(utilisation=0.6, wander_sd=0.02, memory_s=5.0, stall_every=1000)
#: A shared machine near saturation: one burst decides the P99 of a whole run.
HARD = Machine(utilisation=0.75, wander_sd=0.04, memory_s=20.0, stall_every=400)


def trace(seed: int, n: int, utilisation: float) -> tuple[np.ndarray, np.ndarray]:
    """Return arrivals (s) and mean service times (s): bursts of 2.5 times the quiet rate, lognormal prompts."""
    rng = np.random.default_rng([1, seed])
    service = 0.01 + 0.04 * rng.lognormal(0.0, 0.8, n)
    busy = np.repeat(rng.uniform(size=n) < 0.2, rng.geometric(1 / 15, n))[:n]
    gaps = rng.exponential(size=n) * np.where(busy, 0.5, 1.25)
    return np.cumsum(gaps / gaps.mean() * service.mean() / utilisation), service


def wander(rng: np.random.Generator, times: np.ndarray, sd: float, memory_s: float) -> np.ndarray:
    """Return an Ornstein-Uhlenbeck process at `times`, standard deviation `sd`."""
    keep = np.exp(-np.diff(times, prepend=times[0]) / memory_s)
    shocks = rng.normal(size=len(times)) * np.sqrt(1 - keep**2)
    shocks[0] = rng.normal()
    level, out = 0.0, np.empty(len(times))
    for i in range(len(times)):
        level = level * keep[i] + shocks[i]
        out[i] = level
    return sd * out


def run(
    number: int,
    seed: int,
    n: int,
    *,
    machine: Machine = ORDINARY,
    service_x: float = 1.0,
    latency_x: float = 1.0,
) -> Run:
    """Return one scripted run of trace `number` with the noise of `seed`."""
    arrivals, service = trace(number, n, machine.utilisation)
    rng = np.random.default_rng([2, number, seed])
    speed = np.exp(wander(rng, arrivals, machine.wander_sd, machine.memory_s) + machine.offset_sd * rng.normal())
    service = service * service_x * speed * rng.gamma(50, 1 / 50, n)
    stalls = rng.uniform(size=n) < 1 / machine.stall_every
    service[stalls] += rng.exponential(0.15, stalls.sum())
    done, free = np.empty(n), 0.0
    for i in range(n):
        free = max(free, arrivals[i]) + service[i]
        done[i] = free
    ttft = (done - arrivals) * latency_x
    waiting = np.arange(n) - np.searchsorted(done, arrivals)  # requests in the system at each arrival
    tpot = 0.03 * (1 + 0.05 * waiting) * speed * service_x * rng.gamma(60, 1 / 60, n) * latency_x
    last = arrivals + ttft + (OUTPUT_TOKENS - 1) * tpot
    columns = {
        "index": np.arange(n), "trace_row": np.arange(n), "slo_class": ["default"] * n, "status": ["ok"] * n,
        "scheduled_s": arrivals, "sent_s": arrivals, "first_token_s": arrivals + ttft, "last_token_s": last,
        "end_s": last, "ttft_s": ttft, "service_ttft_s": ttft, "tpot_s": tpot, "e2e_s": last - arrivals,
        "generated_tokens": [OUTPUT_TOKENS] * n, "attained": (ttft < 1.0) & (tpot < 0.06),
        "ttft_target_s": [1.0] * n, "tpot_target_s": [0.06] * n,
    }  # fmt: skip
    frame = pl.DataFrame(columns).select(
        (pl.col(name) if name in columns else pl.lit(None)).cast(dtype).alias(name) for name, dtype in SCHEMA.items()
    )
    meta = {
        "trace": {"sha256": f"scripted-{number}", "selection": None},
        "seed": 0,
        "valid": True,
        "state": "finished",
    }
    return Run(path=Path(f"scripted-{number}-{seed}"), meta=meta, frame=frame)


def outcomes(base: Arm, other: Arm, gates: tuple[str, ...], seed: int) -> list[str]:
    parsed = [parse(gate) for gate in gates]
    found = compare(base, other, names=[gate.metric.name for gate in parsed], seed=seed)
    return [result.outcome for gate in parsed for result in judge(gate, found, confidence=0.95)]


def study(
    pairs: int,
    n: int,
    *,
    gates: tuple[str, ...] = GATES,
    repeats: int = 1,
    paired: bool = True,
    machine: Machine = ORDINARY,
    **change: float,
) -> dict:
    """Return the share of pairs in which any gate fails, and the shares of gates that pass or cannot tell."""
    found = []
    for number in range(pairs):
        base = tuple(run(number, 2 * r, n, machine=machine) for r in range(repeats))
        other = tuple(
            run(number if paired else 10_000 + number, 2 * r + 1, n, machine=machine, **change) for r in range(repeats)
        )
        found.append(outcomes(Arm(name="A", runs=base), Arm(name="B", runs=other), gates, number))
    flat = [outcome for each in found for outcome in each]
    return {
        "pairs": pairs,
        "any_fails": round(sum(FAIL in each for each in found) / pairs, 4),
        "gates_pass": round(flat.count(PASS) / len(flat), 4),
        "gates_cannot_tell": round(flat.count(CANNOT_TELL) / len(flat), 4),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="fewer pairs, under a minute")
    options.add_argument("--requests", type=int, help="requests a run (3000; 1000 with --quick)")
    chosen = options.parse_args()
    n = chosen.requests or (1000 if chosen.quick else 3000)
    many, few, repeated = (40, 12, 3) if chosen.quick else (200, 100, 40)
    offset = replace(ORDINARY, offset_sd=0.01)
    cases = {
        "aa": lambda: study(many, n),
        "aa_at_zero": lambda: study(many, n, gates=AT_ZERO),
        "aa_hard": lambda: study(few, n, machine=HARD),
        "aa_unpaired": lambda: study(few, n, paired=False),
        "aa_5_repeats_at_zero": lambda: study(repeated, n, repeats=5, gates=AT_ZERO, machine=offset),
        "latency_10": lambda: study(few, n, latency_x=1.1),
        "latency_20": lambda: study(few, n, latency_x=1.2),
        "service_10": lambda: study(few, n, service_x=1.1),
        "service_20": lambda: study(few, n, service_x=1.2),
        "latency_10_5_repeats": lambda: study(repeated, n, repeats=5, machine=offset, latency_x=1.1),
        "latency_20_5_repeats": lambda: study(repeated, n, repeats=5, machine=offset, latency_x=1.2),
    }
    table = {}
    print(f"{n} requests a run; gates {' and '.join(GATES)}; an alarm is any gate that fails")
    print(f"{'case':22} {'pairs':>5} {'any fails':>9} {'pass':>6} {'cannot tell':>11} {'seconds':>8}")
    for name, case in cases.items():
        started = time.perf_counter()
        row = table[name] = case()
        took = time.perf_counter() - started
        print(
            f"{name:22} {row['pairs']:5} {row['any_fails']:9.1%} {row['gates_pass']:6.1%} "
            f"{row['gates_cannot_tell']:11.1%} {took:8.1f}",
            flush=True,
        )
    fails = {name: row["any_fails"] for name, row in table.items()}
    result = {
        "false_alarm_rate": fails["aa"],
        "false_alarm_rates": {name: rate for name, rate in fails.items() if name.startswith("aa")},
        "power": {name: rate for name, rate in fails.items() if not name.startswith("aa")},
        "pairs": many,
        "requests": n,
    }
    detail = {"gates": GATES, "cases": table}
    finish("gate_false_alarms", result, detail, quick=chosen.quick or chosen.requests is not None)


if __name__ == "__main__":
    main()
