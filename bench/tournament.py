"""Every policy x admission test on every load at 0.5 to 3 times capacity, and what overload does at 5 and 10 times.

Capacity is that of stock vLLM (fcfs, no valve, the profile's budget) on the load. Beside the product of policies and
tests stand: stock vLLM at the best point of a sweep over token budget x queued tokens (`tuned`), a token bucket that
admits the same volume as `response_time`, chronos' closed form, `clairvoyant`, and on a small case the bound of a
linear program. Attainment counts refused requests as not attained. Several seeds; for real traces a seed is a window.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from _loads import Load, capacity, every
from _report import finish
from headway.trace import Trace
from headway.twin import Scenario, simulate

POLICIES = ("fcfs", "edf", "priority", "sola", "headway")
TESTS = ("admit_all", "queue_depth", "queued_tokens", "response_time", "chronos", "token_bucket", "clairvoyant")
#: Arms of the short table (docs/tournament.md).
SHOWN = (
    "headway + response_time",
    "headway + response_time strict",
    "headway + token_bucket",
    "headway + chronos",
    "headway + queue_depth",
    "headway + admit_all",
    "edf + response_time",
    "sola + response_time",
    "sola + admit_all",
    "fcfs + response_time",
    "fcfs + tuned",
    "fcfs + queued_tokens",
    "fcfs + admit_all",
    "headway + clairvoyant",
)
#: Windows over which the closed form may average; for each cell it gets the best one (it needs no other parameter).
WINDOWS = (2.0, 5.0, 10.0, 20.0, 60.0)

#: Under the guarantee's assumption: the step cost is known and no step exceeds its envelope.
KNOWN = {"learn": False, "noise": "bounded"}

STRICT = {"policy": "headway", "policy.jump": False, "admission": "response_time", "admission.strict": True}

_loads: dict[str, Load] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One simulation. `settings` without its load's."""

    load: str
    arm: str
    factor: float  # times capacity
    rate: float
    seed: int
    settings: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What became of it: shares of all offered requests, misses and prompt tokens of the accepted ones."""

    task: Task
    offered: int
    attainment: float
    accepted: int
    missed: int
    volume: int
    span_s: float
    by_class: dict[str, float]
    wall_s: float


def prepare(traces: Path | None) -> None:
    """Make the loads known in this process."""
    _loads.update({load.name: load for load in every(traces)})


def play(task: Task) -> Score:
    """Run one simulation."""
    load = _loads[task.load]
    trace = load.make(task.rate, task.seed)
    scenario = Scenario(
        profile=load.engine(), targets=load.targets, settings={**load.settings, **task.settings}, seed=task.seed
    )
    outcome = simulate(trace, scenario)
    frame = outcome.frame
    served = frame.filter(frame["status"] == "ok")
    return Score(
        task=task,
        offered=frame.height,
        attainment=float(frame["attained"].mean()),  # type: ignore[arg-type]
        accepted=served.height,
        missed=served.height - int(served["attained"].sum()),
        volume=int(served["input_tokens"].sum()),
        span_s=trace.span_s,
        by_class={
            str(name): float(part["attained"].mean())  # type: ignore[arg-type]
            for (name,), part in sorted(frame.group_by("slo_class"), key=lambda item: str(item[0][0]))
        },
        wall_s=outcome.wall_s,
    )


def arms(load: Load, policies: Iterable[str], tests: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return arm -> settings; the valves have the values that their own documentation gives."""
    ttft = min(each.ttft_s for each in load.targets.values() if each.ttft_s)
    per_token = load.engine().cost.work_s(1000, 0) / 1000
    found = {}
    for policy, test in itertools.product(policies, tests):
        settings: dict[str, object] = {"policy": policy, "admission": test}
        if test == "queued_tokens":
            settings["admission.limit"] = max(1, round(ttft / per_token))
        found[f"{policy} + {test}"] = settings
    return found


def tuned(load: Load, *, quick: bool) -> list[dict[str, object]]:
    """Return the points that an expert would try on stock vLLM: token budget x queued tokens."""
    ttft = min(each.ttft_s for each in load.targets.values() if each.ttft_s)
    per_token = load.engine().cost.work_s(1000, 0) / 1000
    limits = [max(1, round(share * ttft / per_token)) for share in (0.25, 0.5, 1.0, 2.0)]
    return [
        {"policy": "fcfs", "admission": "admit_all", "token_budget": budget, "max_queued_tokens": limit}
        for budget in (load.budgets[1::2] if quick else load.budgets)
        for limit in (limits[1:3] if quick else limits)
    ]


def bucket(base: dict[str, object], score: Score, load: Load) -> dict[str, object]:
    """Return a token bucket of the volume that `score` admitted, with the burst of one TTFT target."""
    rate = max(score.volume / max(score.span_s, 1e-9), 1.0)
    ttft = max(each.ttft_s for each in load.targets.values() if each.ttft_s)
    return {**base, "admission": "token_bucket", "admission.rate": rate, "admission.burst": max(rate * ttft, 1.0)}


def upper_bound(load: Load, trace: Trace) -> float:
    """Return a share of requests that no schedule can exceed, from a linear program over prefill work alone.

    For every release a and deadline d: the work of the accepted requests inside [a, d] fits d - a (processor demand;
    Baruah, Rosier and Howell 1990), in seconds of prefill without any fixed or decode cost, so it is generous.
    """
    cost, frame = load.engine().cost, trace.frame
    release = frame["arrival_s"].to_numpy()
    work = np.array([cost.work_s(tokens, 0) for tokens in frame["input_tokens"].to_list()])
    ttft = np.array(
        [(load.targets.get(name or "default") or load.targets["default"]).ttft_s for name in frame["slo_class"]]
    )
    due = release + ttft
    rows, columns, values, limits = [], [], [], []
    for a in np.unique(release):
        inside = np.flatnonzero(release >= a)
        for d in np.unique(due[inside]):
            chosen = inside[due[inside] <= d]
            if work[chosen].sum() > d - a:
                rows += [len(limits)] * len(chosen)
                columns += chosen.tolist()
                values += work[chosen].tolist()
                limits.append(d - a)
    possible = (work + cost.g <= ttft).astype(float)
    if not limits:
        return float(possible.mean())
    matrix = csr_matrix((values, (rows, columns)), shape=(len(limits), len(work)))
    solved = linprog(-np.ones(len(work)), A_ub=matrix, b_ub=limits, bounds=[(0, high) for high in possible])
    return float(-solved.fun / len(work))


def median(scores: list[Score], key: str = "attainment") -> tuple[float, float, float]:
    """Return median, least and largest."""
    values = [getattr(score, key) for score in scores]
    return statistics.median(values), min(values), max(values)


class Tournament:
    """Runs the tasks of one invocation and keeps the scores."""

    def __init__(self, options: argparse.Namespace, pool: ProcessPoolExecutor | None) -> None:
        self.options = options
        self.pool = pool
        self.quick: bool = options.quick
        self.seeds = range(2 if self.quick else options.seeds)
        self.scores: list[Score] = []
        self.capacities: dict[str, float] = {}

    def map(self, tasks: list[Task]) -> list[Score]:
        """Run tasks, in order."""
        done = self.run(tasks)
        self.scores += done
        return done

    def run(self, tasks: list[Task]) -> list[Score]:
        """Run tasks, in order, without keeping their scores."""
        return list(self.pool.map(play, tasks, chunksize=2)) if self.pool else [play(task) for task in tasks]

    def tasks(self, load: Load, factor: float, arm: str, settings: dict[str, object]) -> list[Task]:
        """Return the task of every seed."""
        rate = self.capacities[load.name] * factor
        return [
            Task(load=load.name, arm=arm, factor=factor, rate=rate, seed=seed, settings=settings) for seed in self.seeds
        ]

    def cross(self, load: Load, factors: Iterable[float]) -> None:
        """Run the product of policies and tests, the tuned valve and the buckets."""
        policies = ("fcfs", "edf", "sola", "headway") if self.quick else POLICIES
        tests = ("admit_all", "queued_tokens", "response_time") if self.quick else TESTS
        for factor in factors:
            listed = arms(load, policies, [test for test in tests if test != "token_bucket"])
            if self.quick:
                listed |= arms(load, ["headway"], ["chronos", "clairvoyant"])
            listed["headway + response_time strict"] = dict(STRICT)
            scores = self.map([task for arm, each in listed.items() for task in self.tasks(load, factor, arm, each)])
            volumes = {(score.task.arm, score.task.seed): score for score in scores}
            buckets = []
            for policy in ("headway",) if self.quick else policies:
                for task in self.tasks(load, factor, f"{policy} + token_bucket", {"policy": policy}):
                    like = volumes[f"{policy} + response_time", task.seed]
                    buckets.append(replace(task, settings=bucket({"policy": policy}, like, load)))
            self.map(buckets)
            points = tuned(load, quick=self.quick)
            tries = [task for point in points for task in self.tasks(load, factor, "fcfs + tuned", point)]
            done = self.run(tries)
            groups = [done[i : i + len(self.seeds)] for i in range(0, len(done), len(self.seeds))]
            self.scores += max(groups, key=lambda group: median(group)[0])

    def overload(self, load: Load, factors: Iterable[float]) -> None:
        """Run 5 and 10 times capacity: guarantee, mean-rate forms, and nothing at all.

        Under the guarantee's assumption for every arm (KNOWN).
        """
        for factor in factors:
            listed = {
                "headway + response_time strict": dict(STRICT),
                "headway + response_time": {"policy": "headway", "admission": "response_time"},
                "headway + chronos": {"policy": "headway", "policy.jump": False, "admission": "chronos"},
                "headway + admit_all": {"policy": "headway", "admission": "admit_all"},
                "fcfs + admit_all": {"policy": "fcfs", "admission": "admit_all"},
            }
            scores = self.map([t for arm, each in listed.items() for t in self.tasks(load, factor, arm, each | KNOWN)])
            like = {score.task.seed: score for score in scores if score.task.arm == "headway + response_time strict"}
            base = {"policy": "headway", "policy.jump": False, **KNOWN}
            tasks = self.tasks(load, factor, "headway + token_bucket", base)
            self.map([replace(task, settings=bucket(base, like[task.seed], load)) for task in tasks])

    def closed_form(self, load: Load, factors: Iterable[float]) -> None:
        """Run the strict test and the closed form at its best window under KNOWN: what each admits at no miss.

        The best window: the most prompt tokens among those without a miss, else the fewest misses.
        """
        for factor in factors:
            self.map(self.tasks(load, factor, "known: strict", STRICT | KNOWN))
            base = {"policy": "headway", "policy.jump": False, "admission": "chronos", **KNOWN}
            groups = [
                self.run(self.tasks(load, factor, "known: chronos", base | {"admission.window_s": window}))
                for window in (WINDOWS[1::2] if self.quick else WINDOWS)
            ]
            self.scores += min(groups, key=lambda group: (sum(s.missed for s in group), -sum(s.volume for s in group)))

    def of(self, load: str, factor: float, arm: str) -> list[Score]:
        """Return the scores of one cell."""
        return [s for s in self.scores if (s.task.load, s.task.factor, s.task.arm) == (load, factor, arm)]


def table(run: Tournament, load: str, factors: list[float], only: Iterable[str] | None = None) -> list[str]:
    """Return a Markdown table by arm and multiple of capacity.

    A cell: median attainment in percent [least, largest seed], misses / accepted over all seeds. Bold: the best median
    of the arms shown, clairvoyant aside.
    """
    names = sorted({s.task.arm for s in run.scores if s.task.load == load and s.task.factor in factors})
    names = [name for name in names if only is None or name in only]
    best = {
        f: max(
            (median(run.of(load, f, a))[0] for a in names if "clairvoyant" not in a and run.of(load, f, a)), default=0
        )
        for f in factors
    }
    names.sort(key=lambda arm: -sum(median(run.of(load, f, arm))[0] for f in factors if run.of(load, f, arm)))
    lines = ["| arm | " + " | ".join(f"{f:g}x" for f in factors) + " |", "|---|" + "---|" * len(factors)]
    for arm in names:
        cells = []
        for factor in factors:
            scores = run.of(load, factor, arm)
            if not scores:
                cells.append("-")
                continue
            middle, least, most = median(scores)
            missed, accepted = sum(s.missed for s in scores), sum(s.accepted for s in scores)
            text = f"{middle * 100:.1f} [{least * 100:.0f}, {most * 100:.0f}] {missed}/{accepted}"
            cells.append(f"**{text}**" if middle >= best[factor] - 1e-9 and "clairvoyant" not in arm else text)
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return lines


def against_closed_form(run: Tournament, load: str) -> list[str]:
    """Return a Markdown table of what the strict test and the closed form admit, all seeds together."""
    lines = [
        "| | offered | strict: requests, tokens | closed form: requests, tokens, window | tokens | requests |",
        "|---|---|---|---|---|---|",
    ]
    for factor, (mine, form) in closed_form_cells(run, load).items():
        cells = [f"| {factor:g}x | {sum(s.offered for s in mine)} "]
        for scores in (mine, form):
            text = f"{sum(s.accepted for s in scores)}, {sum(s.volume for s in scores):,}"
            if scores is form:
                text += f", {scores[0].task.settings['admission.window_s']:g} s"
            if missed := sum(s.missed for s in scores):
                text += f" ({missed} misses)"
            cells.append(f"| {text} ")
        tokens = sum(s.volume for s in mine) / max(1, sum(s.volume for s in form))
        requests = sum(s.accepted for s in mine) / max(1, sum(s.accepted for s in form))
        lines.append("".join(cells) + f"| x{tokens:.2f} | x{requests:.2f} |")
    return lines


def closed_form_cells(run: Tournament, load: str) -> dict[float, tuple[list[Score], list[Score]]]:
    """Return multiple of capacity -> scores of the strict test and of the closed form."""
    factors = sorted({s.task.factor for s in run.scores if (s.task.load, s.task.arm) == (load, "known: strict")})
    return {f: (run.of(load, f, "known: strict"), run.of(load, f, "known: chronos")) for f in factors}


def main() -> None:
    """Run the tournament."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few arms, loads and seeds: under 2 minutes")
    parser.add_argument("--traces", type=Path, help="folder with the Azure 2023 and Mooncake files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--loads", help="comma-separated names; default: all")
    parser.add_argument("--out", type=Path, help="write the tables (Markdown) and scores (JSON) here")
    options = parser.parse_args()
    started = time.perf_counter()
    prepare(options.traces)
    if options.traces is None:
        print("skipped: azure code, azure conv, mooncake synthetic: no --traces given")
    names = options.loads.split(",") if options.loads else list(_loads)
    if options.quick and not options.loads:
        names = [name for name in names if name in ("demo mixed", "azure conv")]
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.jobs, context, prepare, (options.traces,)) if options.jobs > 1 else None
    run = Tournament(options, pool)
    factors = [1.0, 2.0] if options.quick else [0.5, 1.0, 1.5, 2.0, 3.0]
    overloads = [5.0, 10.0]
    lines: list[str] = []
    short: list[str] = []
    for name in names:
        load = _loads[name]
        run.capacities[name] = capacity(load, len(run.seeds))
        run.cross(load, factors)
        title = f"### {name} (capacity {run.capacities[name]:.2f} requests/s)"
        lines += ["", title, "", *table(run, name, factors)]
        short += ["", title, "", *table(run, name, factors, SHOWN)]
        if name in ("demo mixed", "demo single", "azure conv"):
            run.overload(load, overloads)
            over = ["", "Overload:", "", *table(run, name, overloads)]
            run.closed_form(load, [*([] if options.quick else [0.5]), 1.0, 2.0, *overloads])
            over += ["", "Against the closed form:", "", *against_closed_form(run, name)]
            lines, short = lines + over, short + over
        print(f"{name}: {len(run.scores)} scores after {time.perf_counter() - started:.0f} s", flush=True)
    small = replace(_loads["demo mixed"], duration_s=20.0)
    trace = small.make(2.0 * run.capacities.get("demo mixed", 2.7), 0)
    trace = replace(trace, frame=trace.frame.head(90))
    shares = {}
    for arm in ("response_time", "clairvoyant"):
        scenario = Scenario(profile=small.engine(), targets=small.targets, settings={"admission": arm})
        shares[arm] = float(simulate(trace, scenario).frame["attained"].mean())  # type: ignore[arg-type]
    shares["upper bound (LP)"] = upper_bound(small, trace)
    lines += ["", "Small case (first 90 requests of demo mixed at 2x): attained "]
    lines[-1] += ", ".join(f"{key} {value * 100:.1f} %" for key, value in shares.items()) + "."
    result = summary(run, names, factors, overloads) | {"small_case": {k: round(v, 4) for k, v in shares.items()}}
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tournament.md").write_text("\n".join(lines).lstrip("\n") + "\n")
        (options.out / "short.md").write_text("\n".join(short).lstrip("\n") + "\n")
        scores = [{**vars_of(score), "task": vars_of(score.task)} for score in run.scores]
        (options.out / "tournament.json").write_text(json.dumps({"result": result, "scores": scores}, indent=1) + "\n")
    print(f"{len(run.scores)} scores, {time.perf_counter() - started:.0f} s")
    if pool:
        pool.shutdown()
    whole = not options.quick and not options.loads and options.traces is not None
    detail = {"capacity_req_s": run.capacities, "seeds": list(run.seeds), "cells": cells(run)}
    finish("tournament", result, detail, quick=not whole)


def cells(run: Tournament) -> dict[str, str]:
    """Return load, multiple of capacity and arm -> the cell of the tables, and the prompt tokens admitted."""
    keys = dict.fromkeys((s.task.load, s.task.factor, s.task.arm) for s in run.scores)
    found = {}
    for load, factor, arm in keys:
        scores = run.of(load, factor, arm)
        middle, least, most = (100 * each for each in median(scores))
        missed, accepted, volume = (sum(getattr(s, key) for s in scores) for key in ("missed", "accepted", "volume"))
        found[f"{load} {factor:g}x {arm}"] = (
            f"{middle:.1f} [{least:.1f}, {most:.1f}] {missed}/{accepted} of {sum(s.offered for s in scores)}, {volume}"
        )
    return found


def vars_of(value: object) -> dict[str, object]:
    """Return the fields of a slotted dataclass."""
    return {name: getattr(value, name) for name in value.__slots__}  # type: ignore[attr-defined]


def summary(run: Tournament, names: list[str], factors: list[float], overloads: list[float]) -> dict[str, object]:
    """Return the numbers of the RESULT line."""
    guard, default, slack = "headway + response_time strict", "headway + response_time", "headway + token_bucket"
    over = [(name, f) for name in names for f in overloads if run.of(name, f, guard)]
    total = lambda arm, key: sum(getattr(s, key) for cell in over for s in run.of(*cell, arm))  # noqa: E731
    volumes: dict[str, float] = {}
    for name in names:
        for factor, (mine, form) in closed_form_cells(run, name).items():
            if not any(s.missed for s in (*mine, *form)):
                ratio = sum(s.volume for s in mine) / max(1, sum(s.volume for s in form))
                volumes[f"{name} {factor:g}x"] = round(ratio, 3)
    gains, losses = [], []
    for name, factor in itertools.product(names, factors):
        mine = median(run.of(name, factor, default))[0]
        rivals = {
            arm: median(run.of(name, factor, arm))[0]
            for arm in sorted({s.task.arm for s in run.scores if (s.task.load, s.task.factor) == (name, factor)})
            if "clairvoyant" not in arm and not arm.startswith("known") and arm not in (default, guard)
        }
        best = max(rivals, key=lambda arm: rivals[arm])
        gains.append(mine / max(median(run.of(name, factor, "fcfs + tuned"))[0], 1e-3))
        if rivals[best] > mine + 0.01:
            losses.append(f"{name} {factor:g}x: {mine:.3f} against {rivals[best]:.3f} of {best}")
    return {
        "response_time_misses": total(guard, "missed"),
        "response_time_accepted": total(guard, "accepted"),
        "default_misses": total(default, "missed"),
        "token_bucket_misses": total(slack, "missed"),
        "chronos_misses": total("headway + chronos", "missed"),
        "admit_all_attainment": round(
            statistics.fmean(s.attainment for c in over for s in run.of(*c, "fcfs + admit_all")) if over else 0.0, 4
        ),
        # Prompt tokens admitted where neither misses; at overload, because below it the offered load caps the ratio.
        "volume_vs_chronos": min((volumes[k] for k in volumes if k.endswith((" 5x", " 10x"))), default=0.0),
        "volumes_vs_chronos": volumes,
        "x_tuned_median": round(statistics.median(gains), 3),
        "x_tuned_worst": round(min(gains), 3),
        "losses": losses,
    }


if __name__ == "__main__":
    main()
