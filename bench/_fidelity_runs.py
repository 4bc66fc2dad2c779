"""Plays the runs of `bench/twin_fidelity.py` against real vLLM, with Headway and in stock order, and keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _report import machine
from headway.demo.arena import Arena
from headway.demo.capacity import measure as measure_capacity
from headway.demo.systems import System, headway, no_op
from headway.demo.workload import MIXED, WEIGHTS, Workload
from headway.trace import Trace

MANIFEST = "fidelity.json"
WORKLOAD = Workload(kind="mixed")
LOADS = (0.5, 1.0, 2.0)

SYSTEMS: dict[str, tuple[System, dict[str, Any]]] = {
    "no-op": (no_op(MIXED), {"policy": "fcfs", "admission": "admit_all"}),
    "headway": (headway(MIXED, WEIGHTS), {"policy": "headway", "admission": "response_time"}),
}


def plan(
    *, quick: bool, seed: int, seeds: int, twice: int, again: Sequence[float], loads: Sequence[float] = LOADS
) -> list[dict[str, Any]]:
    """Return the runs against one server, in order; held-out ones at `loads` only.

    Runs that are fitted to lie between those that are held out, so that both see the same hour of the machine. Every
    load gets about as many requests: a P99 of a few hundred is one bad moment of the machine. The first `twice` runs at
    each load of `again` are played a second time at the end.
    """

    def run(role: str, load: float, number: int, duration_s: float) -> dict[str, Any]:
        return {"role": role, "load": load, "seed": number, "duration_s": duration_s}

    fit_s, held_s = 22.0, ({0.5: 30.0, 1.0: 25.0, 2.0: 20.0} if quick else {0.5: 120.0, 1.0: 60.0, 2.0: 30.0})
    # The first long queue touches memory that was never used before; steps are slower until then.
    runs = [] if quick else [run("warm", 2.0, seed - 1, 20.0)]
    repeated = []
    for number in range(1 if quick else seeds):
        fit, held = seed + 10 * number, seed + 1 + number
        held_out = [run("held", load, held, held_s[load]) for load in LOADS if load in loads]
        low = [each for each in held_out if each["load"] < 0.7]
        runs += [run("fit", 0.7, fit, fit_s), *low, run("fit", 1.3, fit, fit_s), *held_out[len(low) :]]
        if number < twice:
            repeated += [run("again", load, held, held_s[load]) for load in again]
    return runs + repeated


def measure(
    out: Path,
    *,
    model: str | None,
    quick: bool,
    capacity: float | None,
    systems: Sequence[str],
    seed: int,
    seeds: int,
    twice: int,
    again: Sequence[float],
    loads: Sequence[float] = LOADS,
    say: Callable,
) -> None:
    """Play every run of the plan against each system; what is there from an earlier call is kept."""
    path = out / MANIFEST
    known = json.loads(path.read_text()) if path.exists() else {"systems": {}}
    capacity = capacity or known.get("capacity_req_s")
    with Arena(out, model=model, say=say) as arena:
        for name in systems:
            system, _ = SYSTEMS[name]
            log = out / f"{name}.steps.jsonl"
            log.unlink(missing_ok=True)
            os.environ["HEADWAY_STEP_LOG"] = str(log)
            arena.start(system)
            if capacity is None:
                capacity, _ = measure_capacity(arena, system, WORKLOAD, n=120)
            runs = []
            planned = plan(quick=quick, seed=seed, seeds=seeds, twice=twice, again=again, loads=loads)
            for number, each in enumerate(planned):
                label = f"{name}-{each['role']}-{each['load']:g}x-{each['seed']}"
                say(label)
                run = arena.run(
                    system,
                    trace_of(each, capacity),
                    WORKLOAD.targets,
                    seed=1000 * each["seed"] + number,  # prompts of its own: none is in the prefix cache already
                    label=label,
                    grace_s=600.0,
                )
                runs.append(each | {"label": label, "valid": run.valid})
            arena.stop(system)
            known["systems"][name] = runs
            known |= {"capacity_req_s": capacity, "quick": quick, "commit": machine()["commit"]}
            path.write_text(json.dumps(known, indent=1))


def trace_of(run: Mapping[str, Any], capacity: float) -> Trace:
    """Return the requests of a run."""
    return WORKLOAD.offered(rate=run["load"] * capacity, seed=run["seed"], duration_s=run["duration_s"])
