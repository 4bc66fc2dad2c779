"""Real vLLM on this machine and the twin on the same requests: `measure` plays and keeps, `judge` compares.

The cost of a step, its scatter and the time outside the engine come from everything before the first held-out run of a
server (its start-up sweep and the runs called `fit`). Held-out runs have other seeds at 0.5, 1 and 2 times capacity;
their seeds are pooled. One load is played twice with the very same requests: how far the real system differs from
itself there (`again`) is the floor under any error of a model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from headway.core import Slo
from headway.demo.arena import Arena
from headway.demo.capacity import measure as measure_capacity
from headway.demo.systems import System, headway, no_op
from headway.demo.workload import MIXED, WEIGHTS, Workload
from headway.replay import store
from headway.replay.summary import summarise
from headway.trace import Trace
from headway.twin import Profile, Scenario, find_profile, simulate
from headway.twin.calibration import StepLog, calibrate
from headway.twin.decisions import Asked, Decisions, compare, read
from headway.twin.profile import TwinError
from headway.twin.rerun import rerun

MANIFEST = "fidelity.json"
WORKLOAD = Workload(kind="mixed")
QUANTILES = ("p50", "p99")
LOADS = (0.5, 1.0, 2.0)

#: The load that is played twice.
AGAIN = 1.0

#: Seeds of the step noise whose predictions are pooled.
NOISE = range(1, 6)

#: Arrivals so long before a run still count in what the decisions remember (core/demand.py keeps 60 s).
_MEMORY_S = 65.0

SYSTEMS: dict[str, tuple[System, dict[str, Any]]] = {
    "no-op": (no_op(MIXED), {"policy": "fcfs", "admission": "admit_all"}),
    "headway": (headway(MIXED, WEIGHTS), {"policy": "headway", "admission": "response_time"}),
}


# Playing


def plan(*, quick: bool) -> list[dict[str, Any]]:
    """Return the runs against one server, in order."""
    fits = [{"role": "fit", "load": load, "seed": 900, "duration_s": 22.0 if quick else 40.0} for load in (0.7, 1.3)]
    lengths = {0.5: 30.0, 1.0: 25.0, 2.0: 20.0} if quick else {0.5: 60.0, 1.0: 45.0, 2.0: 30.0}
    seeds = (901,) if quick else (901, 902)
    held = [{"role": "held", "load": load, "seed": s, "duration_s": lengths[load]} for load in LOADS for s in seeds]
    again = [each | {"role": "again"} for each in held if each["load"] == AGAIN]
    return fits + held + again


def measure(
    out: Path, *, model: str | None, quick: bool, capacity: float | None, systems: Sequence[str], say: Callable
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
            for each in plan(quick=quick):
                label = f"{name}-{each['role']}-{each['load']:g}x-{each['seed']}"
                say(label)
                run = arena.run(
                    system,
                    trace_of(each, capacity),
                    WORKLOAD.targets,
                    seed=each["seed"],
                    label=label,
                    grace_s=600.0,
                )
                runs.append(each | {"label": label, "valid": run.valid})
            arena.stop(system)
            known["systems"][name] = runs
            known |= {"capacity_req_s": capacity, "quick": quick}
            path.write_text(json.dumps(known, indent=1))


def trace_of(run: Mapping[str, Any], capacity: float) -> Trace:
    """Return the requests of a run."""
    return WORKLOAD.offered(rate=run["load"] * capacity, seed=run["seed"], duration_s=run["duration_s"])


# Comparing


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run that was played: its requests, what its client measured, and the same on the engine's clock."""

    role: str
    load: float
    seed: int
    trace: Trace
    frame: pl.DataFrame
    asked: Mapping[int, Asked]  # index in the trace -> as the engine saw it
    zero_s: float  # the engine's clock when the schedule of the client began

    @property
    def end_s(self) -> float:
        """When its last answer ended, by the engine's clock."""
        return self.zero_s + float(self.frame["end_s"].max() or 0.0)  # type: ignore[arg-type]


def judge(out: Path, say: Callable) -> dict[str, Any]:
    """Return the errors of the twin on everything that was measured in `out`; writes a profile for each system."""
    known = json.loads((out / MANIFEST).read_text())
    report: dict[str, Any] = {"capacity_req_s": round(known["capacity_req_s"], 3), "loads": {}, "decisions": {}}
    for name, runs in known["systems"].items():
        real = read(out / f"{name}.steps.jsonl")
        played = [_played(out, each, known["capacity_req_s"], real) for each in runs]
        profile = fitted(real, played, name)
        _, settings = SYSTEMS[name]
        entries = []
        for load in LOADS:
            held = [each for each in played if each.load == load and each.role == "held"]
            found = _errors_of(held, played, profile, settings)
            shipped = _errors_of(held, played, find_profile("cpu-smollm2"), settings)
            report["loads"][f"{name} {load:g}x"] = found | {"shipped_profile": shipped["errors"]}
            say(f"{name} {load:g}x: {found['errors']} (n = {found['n']})")
            say(f"{name} {load:g}x, shipped profile: {shipped['errors']}")
            entries.append(TwinError(load=f"{load:g}x", busy_max=found["busy"], errors=found["errors"]))
        report["again"] = report.get("again", {}) | {name: _again(played)}
        say(f"{name}: the real system against itself at {AGAIN:g}x: {report['again'][name]['errors']}")
        entries[-1] = replace(entries[-1], busy_max=1.0)
        replace(profile, twin_error=tuple(entries)).save(out / f"{name}.profile.toml")
        report["decisions"][name] = _decisions(real, played, say)
        report["fit_error"] = report.get("fit_error", {}) | {name: profile.fit_error}
    return report


def _played(out: Path, run: Mapping[str, Any], capacity: float, real: Decisions) -> Played:
    kept = store.load(out / "runs" / run["label"])
    pattern = re.compile(rf"-{re.escape(kept.meta['run_id'])}-(\d+)-")
    asked = {int(found[1]): each for each in real.asked if (found := pattern.search(each.id))}
    sent = dict(kept.frame.select("index", "sent_s").iter_rows())
    zero = float(np.median([each.arrival_s - sent[index] for index, each in asked.items()]))
    return Played(
        role=run["role"],
        load=run["load"],
        seed=run["seed"],
        trace=trace_of(run, capacity),
        frame=kept.frame,
        asked=asked,
        zero_s=zero,
    )


def fitted(real: Decisions, played: Sequence[Played], name: str) -> Profile:
    """Return the profile of everything before the first held-out run."""
    until = min(each.zero_s for each in played if each.role == "held")
    steps = [each for each in real.steps if each.planned_s < until]
    log = StepLog(
        source=f"{name}.steps.jsonl",
        sha256="",
        terms=np.array([(s.step.q, s.step.n, s.step.K, s.step.X) for s in steps], dtype=float),
        seconds=np.array([s.step.seconds for s in steps]),
        about=real.about,
    )
    # From a client's schedule to the engine, and from the end of a step to the client.
    ends, outside = real.tokens(), []
    for run in played:
        if run.role == "fit":
            ttfts = run.frame.filter(pl.col("status") == "ok").select("index", "ttft_s").iter_rows()
            outside += [
                ttft - (ends[run.asked[i].number][0] - run.asked[i].reached_s) for i, ttft in ttfts if i in run.asked
            ]
    front = max(0.0, float(np.median(outside)))
    return calibrate(log, name=name, engine={"front_s": round(front, 5)}, note="bench/twin_fidelity.py")


def _errors_of(
    held: Sequence[Played], played: Sequence[Played], profile: Profile, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the twin's errors on the pooled runs of one load."""
    frames, busy = [], []
    for run in held:
        trace, skipped = _with_history(run, played)
        for seed in NOISE:
            scenario = Scenario(profile=profile, slos=_slos(), settings=dict(settings), seed=seed)
            outcome = simulate(trace, scenario)
            frames.append(outcome.frame.filter(pl.col("index") >= skipped))
            busy.append(float(outcome.facts["busy_share"]))
    real, twin = pl.concat([run.frame for run in held]), pl.concat(frames)
    return {
        "n": real.height,
        "busy": round(float(np.mean(busy)), 3),
        "errors": errors(real, twin),
        "real": _values(real),
        "twin": _values(twin),
    }


def _with_history(run: Played, played: Sequence[Played]) -> tuple[Trace, int]:
    """Return the requests of a run behind those of the minute before it, and the number of those."""
    earlier = []
    for other in played:
        if other.zero_s < run.zero_s:
            shifted = other.trace.frame.with_columns(pl.col("arrival_s") + (other.zero_s - run.zero_s))
            earlier.append(shifted.filter(pl.col("arrival_s") > -_MEMORY_S))
    before = pl.concat([*earlier, run.trace.frame.clear()]).sort("arrival_s")
    frame = pl.concat([before, run.trace.frame])
    start = float(frame["arrival_s"].min())  # type: ignore[arg-type]
    frame = frame.with_columns(pl.col("arrival_s") - min(start, 0.0))
    return replace(run.trace, frame=frame), before.height


def _slos() -> dict[str, Slo]:
    return {name: Slo(name=name, **each.as_dict(), weight=WEIGHTS[name]) for name, each in MIXED.items()}


def errors(real: pl.DataFrame, twin: pl.DataFrame) -> dict[str, float]:
    """Return metric -> error: percentiles of served requests relative to the real value, shares of all absolute."""
    left, right = _values(real), _values(twin)
    return {
        key: round(abs(right[key] / left[key] - 1.0) if key[:4] in ("ttft", "tpot") else abs(right[key] - left[key]), 4)
        for key in left
        if left[key] is not None and right[key] is not None and (left[key] or key in ("attainment", "refused"))
    }


def _values(frame: pl.DataFrame) -> dict[str, Any]:
    total = summarise(frame)["total"]
    found = {f"{metric}_{q}": total[metric][f"{q}_s"] for metric in ("ttft", "tpot") for q in QUANTILES}
    return found | {"attainment": total["attainment"], "refused": total["refused"] / total["n"]}


def _again(played: Sequence[Played]) -> dict[str, Any]:
    """Return how far the real system differs from itself on the same requests."""
    second = [each for each in played if each.role == "again"]
    first = [each for each in played if each.role == "held" and each.load == AGAIN]
    one, two = (pl.concat([each.frame for each in part]) for part in (first, second))
    return {"load": f"{AGAIN:g}x", "n": one.height, "errors": errors(one, two)}


def _decisions(real: Decisions, played: Sequence[Played], say: Callable) -> dict[str, Any]:
    """Put every arrival of the log before the twin on the clock of the real steps; compare run by run."""
    twin, _ = rerun(real)
    found = {}
    for run in played:
        numbers = {each.number for each in run.asked.values()}
        one, two = (each.between(run.zero_s, run.end_s, numbers) for each in (real, twin))
        agreement = compare(one, two).as_dict()
        mine, other = one.tokens(), two.tokens()
        both = sorted(mine.keys() & other.keys() & numbers)
        came = {each.number: each.reached_s for each in run.asked.values()}
        for q in (50, 99):
            a, b = (np.percentile([ends[i][0] - came[i] for i in both], q) for ends in (mine, other))
            agreement[f"ttft_p{q}_error"] = round(abs(float(b / a) - 1.0), 4)
        key = f"{run.role} {run.load:g}x {run.seed}"
        found[key] = agreement
        say(
            f"  {key}: {agreement['same_steps']} of {agreement['steps']} steps the same, first divergence after "
            f"{agreement['steps_before_first_divergence']}; {agreement['same_verdicts']} of {agreement['verdicts']} "
            f"verdicts; {agreement['first_divergence']}"
        )
    return found
