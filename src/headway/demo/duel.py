"""Interleaved runs of several systems over several loads and seeds, and what came of them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headway.demo.arena import Arena
from headway.demo.systems import System, tuned
from headway.demo.workload import Workload
from headway.replay.store import Run
from headway.replay.summary import summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: a system at a load with a seed."""

    system: System
    load: float  # multiple of capacity
    rate: float  # offered requests/s
    seed: int
    run: Run

    @property
    def summary(self) -> dict:
        """Summary of the run (`headway.replay.summary`)."""
        return summarise(self.run.frame)


def duel(
    arena: Arena,
    systems: Sequence[System],
    workload: Workload,
    *,
    capacity: float,
    loads: Sequence[float],
    seeds: Sequence[int],
    duration_s: float,
    on_run: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Run every system at every load with every seed, the systems one after the other on the same requests.

    The order of the systems rotates from run to run, so that a drift of the machine does not favour one.
    """
    cells = []
    for system, load, seed in order(systems, loads, seeds):
        trace = workload.offered(rate=capacity * load, seed=seed, duration_s=duration_s)
        label = f"{workload.kind}-{system.name}-{load:g}x-seed{seed}"
        # Prompts differ from run to run but not from system to system, so no prefix cache favours a later run.
        prompt_seed = 1000 * seed + round(100 * load)
        run = arena.run(system, trace, workload.targets, seed=prompt_seed, label=label, grace_s=workload.slack_s)
        cell = Cell(system=system, load=load, rate=capacity * load, seed=seed, run=run)
        cells.append(cell)
        on_run(cell)
    return cells


def order(
    systems: Sequence[System], loads: Sequence[float], seeds: Sequence[int]
) -> Iterator[tuple[System, float, int]]:
    """Yield the runs, interleaved: the system changes fastest and starts with another one each time."""
    turn = 0
    for seed in seeds:
        for load in loads:
            shift = turn % len(systems)
            for system in [*systems[shift:], *systems[:shift]]:
                yield system, load, seed
            turn += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, least and greatest of a number over seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


def spread(cells: Sequence[Cell], system: System, load: float, value: Callable[[dict], float | None]) -> Spread | None:
    """Return the spread over seeds of `value(summary)` for one system at one load; None when it never exists."""
    found = [value(c.summary) for c in cells if c.system.name == system.name and c.load == load]
    known = [v for v in found if v is not None]
    return Spread.of(known) if known else None


def expert(metrics: str, workload: Workload) -> System:
    """Return stock vLLM tuned by the rules an expert uses, from the step cost that Headway's metrics tell.

    Token budget: the largest multiple of 16 whose step keeps the tightest TPOT target. Queued tokens: tightest TTFT
    target x prefill rate at that budget, as vLLM documents the flag.
    """
    cost = {
        key: float(found.group(1))
        if (found := re.search(rf"^headway_step_cost_{key}_seconds (\S+)", metrics, re.M))
        else 0
        for key in ("base", "prefill_token")
    }
    pace = min(t.tpot_s or t.tbt_s or 1.0 for t in workload.targets.values())
    ttft = min(t.ttft_s or 10.0 for t in workload.targets.values())
    room = (0.9 * pace - cost["base"]) / max(cost["prefill_token"], 1e-9)
    budget = int(min(8192, max(16, room // 16 * 16)))
    rate = budget / (cost["base"] + budget * cost["prefill_token"])
    return tuned(budget, max(budget, int(ttft * rate // 50 * 50)))
