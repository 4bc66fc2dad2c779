"""Real vLLM on this machine and the twin on the same requests: `judge` compares what `_fidelity_runs.py` played.

The cost of a step, its scatter and the time outside the engine come from the runs called `fit`, at 0.7 and 1.3 times
capacity. Held-out runs have other seeds at 0.5, 1 and 2 times capacity; their seeds, also those of several folders, are
pooled. Some are played twice with requests of the same lengths on the same schedule: both count, and how far the real
system differs from itself (`again`) is the floor under any error of a model. Runs differ most in how fast the machine
was meanwhile, so errors stand there a second time for a twin that is told that one number of each run (`paced`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from _fidelity_runs import LOADS, MANIFEST, SYSTEMS, trace_of
from headway.core import CostCoefficients, Slo
from headway.demo.workload import MIXED, WEIGHTS
from headway.replay import store
from headway.replay.summary import summarise
from headway.trace import Trace
from headway.twin import Profile, Scenario, find_profile, simulate
from headway.twin.calibration import StepLog, calibrate
from headway.twin.decisions import Asked, Decisions, compare, read
from headway.twin.profile import TwinError
from headway.twin.rerun import rerun

#: Request -> time of its first token, of its last, number of tokens (`Decisions.tokens`).
Tokens = Mapping[int, tuple[float, float, int]]

QUANTILES = ("p50", "p99")

#: Seeds of the step noise; a prediction is the median over them.
NOISE = range(1, 10)

#: Arrivals so long before a run still count in what the decisions remember (core/demand.py keeps 60 s).
_MEMORY_S = 65.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run that was played: its requests, what its client measured, and the same on the engine's clock."""

    role: str
    load: float
    seed: int
    valid: bool  # the client was in time
    trace: Trace
    frame: pl.DataFrame
    asked: Mapping[int, Asked]  # index in the trace -> as the engine saw it
    zero_s: float  # the engine's clock when the schedule of the client began

    @property
    def end_s(self) -> float:
        """When its last answer ended, by the engine's clock."""
        return self.zero_s + float(self.frame["end_s"].max() or 0.0)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Everything that was played against one start of a server, and the profile fitted to the first part of it."""

    folder: Path
    real: Decisions
    runs: Sequence[Played]
    profile: Profile

    def held(self, load: float, *, roles: Sequence[str] = ("held", "again")) -> list[Played]:
        """Return the runs of a load that nothing was fitted to, those with the requests of another run included."""
        return [each for each in self.runs if each.load == load and each.role in roles]


def judge(folders: Sequence[Path], say: Callable) -> dict[str, Any]:
    """Return the errors of the twin on everything that was measured; writes a profile into each folder.

    Decisions are those of the code that runs here: judge with the commit that was measured.
    """
    manifests = {folder: json.loads((folder / MANIFEST).read_text()) for folder in folders}
    report: dict[str, Any] = {
        "paced": {},
        "capacity_req_s": [round(each["capacity_req_s"], 3) for each in manifests.values()],
        "commits": [each.get("commit") for each in manifests.values()],
        "loads": {},
        "again": {},
        "decisions": {},
        "fit_error": {},
        "speed": {},
        "late_client": {},
        "engine": {},
    }
    for name, (_, settings) in SYSTEMS.items():
        sessions = [
            _session(folder, name, known["systems"][name], known["capacity_req_s"])
            for folder, known in manifests.items()
            if name in known["systems"]
        ]
        if not sessions:
            continue
        entries = []
        for load in [each for each in LOADS if any(session.held(each) for session in sessions)]:
            found = _errors_of(sessions, load, None, settings)
            shipped = _errors_of(sessions, load, find_profile("cpu-smollm2"), settings)
            report["loads"][f"{name} {load:g}x"] = found | {
                "shipped": {key: shipped[key] for key in ("busy", "errors")}
            }
            paced = _errors_of(sessions, load, None, settings, paced=True)
            report["paced"][f"{name} {load:g}x"] = paced
            say(f"{name} {load:g}x: n = {found['n']}")
            for label in ("real", "twin", "errors"):
                say(f"  {label:8s} {_line(found[label])}")
            say(f"  told the speed of each run, error {_line(paced['errors'])}")
            say(f"  cpu-smollm2 as shipped, error {_line(shipped['errors'])}")
            entries.append(TwinError(load=f"{load:g}x", busy_max=found["busy"], errors=found["errors"]))
        for load in LOADS:
            if twice := _again(sessions, load):
                report["again"][f"{name} {load:g}x"] = twice
                say(f"{name} {load:g}x, the real system against itself, n = {twice['n']}: {_line(twice['errors'])}")
        entries[-1] = replace(entries[-1], busy_max=1.0)
        for session in sessions:
            profile = replace(session.profile, twin_error=tuple(entries))
            profile.save(session.folder / f"{name}.profile.toml")
        report["fit_error"][name] = [each.profile.fit_error for each in sessions]
        about = sessions[-1].real.about
        report["engine"][name] = {key: about[key] for key in ("device", "dtype", "engine", "config") if key in about}
        report["speed"][name] = {f"{s.folder.name} {_key(run)}": _speed(s, run) for s in sessions for run in s.runs}
        report["late_client"][name] = [
            f"{s.folder.name} {_key(run)}" for s in sessions for run in s.runs if not run.valid
        ]
        say(f"{name}, real step times over the fit, run by run: {list(report['speed'][name].values())}")
        report["decisions"][name] = {
            f"{session.folder.name} {key}": value
            for session in sessions
            for key, value in _decisions(session, say).items()
        }
    return report


def _key(run: Played) -> str:
    return f"{run.role} {run.load:g}x {run.seed}"


def _speed(session: Session, run: Played) -> float:
    """Return the time that the steps of a run took, over what the profile says of them, noise included."""
    price = session.profile.price
    steps = [each.step for each in session.real.steps if run.zero_s <= each.planned_s < run.end_s]
    prices = np.array([price.seconds(s.q, s.n, s.K, s.X) for s in steps])
    return round(sum(s.seconds for s in steps) / float(prices @ session.profile.noise.mean(prices)), 3)


def _times(cost: CostCoefficients, factor: float) -> CostCoefficients:
    return CostCoefficients(**{name: factor * getattr(cost, name) for name in ("g", "a", "b", "k", "x")})


def _line(values: Mapping[str, float]) -> str:
    return "  ".join(f"{key} {value:.4f}" for key, value in values.items() if value is not None)


def _session(folder: Path, name: str, runs: Sequence[Mapping[str, Any]], capacity: float) -> Session:
    real = read(folder / f"{name}.steps.jsonl")
    played = [_played(folder, each, capacity, real) for each in runs]
    return Session(folder=folder, real=real, runs=played, profile=fitted(real, played, name))


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
        valid=run["valid"],
        trace=trace_of(run, capacity),
        frame=kept.frame,
        asked=asked,
        zero_s=zero,
    )


def fitted(real: Decisions, played: Sequence[Played], name: str) -> Profile:
    """Return the profile of the runs called `fit`, nothing else."""
    fits = [each for each in played if each.role == "fit"]
    spans = [(run.zero_s, run.end_s) for run in fits]
    steps = [each for each in real.steps if any(start <= each.planned_s < end for start, end in spans)]
    log = StepLog(
        source=f"{name}.steps.jsonl",
        sha256="",
        terms=np.array([(s.step.q, s.step.n, s.step.K, s.step.X) for s in steps], dtype=float),
        seconds=np.array([s.step.seconds for s in steps]),
        about=real.about,
    )
    # From a client's schedule to the engine, where most wait for a step to end, so nearly the least; and from the
    # end of a step to the client.
    ends, inward, outward = real.tokens(), [], []
    for run in fits:
        rows = run.frame.filter(pl.col("status") == "ok").select("index", "scheduled_s", "first_token_s")
        for index, scheduled, first in rows.iter_rows():
            asked = run.asked[index]
            inward.append(asked.reached_s - run.zero_s - scheduled)
            outward.append(first + run.zero_s - ends[asked.number][0])
    front = max(0.0, float(np.quantile(inward, 0.01)) + float(np.median(outward)))
    return calibrate(log, name=name, engine={"front_s": round(front, 5)}, note="bench/twin_fidelity.py")


def _errors_of(
    sessions: Sequence[Session],
    load: float,
    profile: Profile | None,
    settings: Mapping[str, Any],
    *,
    paced: bool = False,
) -> dict[str, Any]:
    """Return the twin's errors on the pooled runs of one load; without a profile each session has its own.

    `paced`: every step takes as much more as the steps of that very run took over the profile, in total.
    """
    real, busy = [], []
    remembers_nothing = settings["admission"] == "admit_all"
    twins: dict[int, list[pl.DataFrame]] = {seed: [] for seed in NOISE}
    for session in sessions:
        # Who was refused and told when to come back has room kept, although nobody of a trace comes.
        told = {"bookings": bool(session.real.about.get("config", {}).get("bookings"))}
        for run in session.held(load):
            real.append(run.frame)
            # Stock order remembers nothing, and what a queue left over would spoil the run: the real one began empty.
            trace, skipped = (run.trace, 0) if remembers_nothing else _with_history(run, session.runs)
            known = profile or session.profile
            if paced:
                known = replace(known, cost=_times(known.cost, _speed(session, run)))
            for seed in NOISE:
                scenario = Scenario(profile=known, slos=_slos(), settings={**settings, **told}, seed=seed)
                outcome = simulate(trace, scenario)
                twins[seed].append(outcome.frame.filter(pl.col("index") >= skipped))
                busy.append(float(outcome.facts["busy_share"]))
    one = pl.concat(real)
    alone = [_values(pl.concat(frames)) for frames in twins.values()]
    # Not of all seeds in one heap: what differs between courses of the noise would count as spread within one.
    two = {key: None if None in (v := [a[key] for a in alone]) else float(np.median(v)) for key in alone[0]}
    spread = {key: [pick(v[key] for v in alone) for pick in (min, max)] for key in alone[0]}
    return {
        "n": one.height,
        "busy": round(float(np.mean(busy)), 3),
        "errors": errors(_values(one), two),
        "real": _values(one),
        "twin": two,
        "twin_by_noise_seed": {key: [round(value, 5) for value in pair] for key, pair in spread.items()},
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


def errors(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, float]:
    """Return metric -> error of `right`: percentiles of served requests relative to `left`, shares of all absolute."""
    return {
        key: round(abs(right[key] / left[key] - 1.0) if key[:4] in ("ttft", "tpot") else abs(right[key] - left[key]), 4)
        for key in left
        if left[key] is not None and right[key] is not None and (left[key] or key in ("attainment", "refused"))
    }


def _values(frame: pl.DataFrame) -> dict[str, Any]:
    total = summarise(frame)["total"]
    found = {f"{metric}_{q}": total[metric][f"{q}_s"] for metric in ("ttft", "tpot") for q in QUANTILES}
    return found | {"attainment": total["attainment"], "refused": total["refused"] / total["n"]}


def _again(sessions: Sequence[Session], load: float) -> dict[str, Any]:
    """Return how far the real system differs from itself on the same schedule; nothing where none was played twice."""
    first, second = [], []
    for session in sessions:
        again = {run.seed: run.frame for run in session.runs if run.role == "again" and run.load == load}
        first += [run.frame for run in session.held(load, roles=("held",)) if run.seed in again]
        second += again.values()
    if not second:
        return {}
    one, two = pl.concat(first), pl.concat(second)
    return {
        "n": one.height,
        "errors": errors(_values(one), _values(two)),
        "real": [_values(one), _values(two)],
    }


def _decisions(session: Session, say: Callable) -> dict[str, Any]:
    """Put every arrival of the log before the twin on the clock of the real steps; compare run by run."""
    real = session.real
    twin, _ = rerun(real)
    found = {}
    for run in session.runs:
        numbers = {each.number for each in run.asked.values()}
        one, two = (each.between(run.zero_s, run.end_s, numbers) for each in (real, twin))
        agreement = compare(one, two).as_dict()
        came = {each.number: each.reached_s for each in run.asked.values()}
        agreement["errors"] = _engine_errors(*(each.tokens() for each in (one, two)), came)
        key = _key(run)
        found[key] = agreement
        say(
            f"  {key}: {agreement['same_steps']} of {agreement['steps']} steps the same, first divergence after "
            f"{agreement['steps_before_first_divergence']}; {agreement['same_verdicts']} of {agreement['verdicts']} "
            f"verdicts; {agreement['first_divergence'] or _line(agreement['errors'])}"
        )
    return found


def _engine_errors(one: Tokens, two: Tokens, came: Mapping[int, float]) -> dict[str, float]:
    """Return the errors of TTFT and TPOT by the engine's clock over the requests that both served."""
    both = sorted(one.keys() & two.keys() & came.keys())
    found = {}
    for metric in ("ttft", "tpot"):
        for q in (50, 99):
            pair = []
            for times in (one, two):
                if metric == "ttft":
                    values = [times[i][0] - came[i] for i in both]
                else:
                    values = [(last - first) / (n - 1) for first, last, n in (times[i] for i in both) if n > 1]
                pair.append(float(np.percentile(values, q)))
            found[f"{metric}_p{q}"] = round(abs(pair[1] / pair[0] - 1.0), 4)
    return found
