"""The guarantee on real vLLM: misses among accepted requests of the strict setting, beside static admission.

Strict setting: policy `headway` with jump = false, admission `response_time` with strict = true, eps = 0.001; classes
with the rule `reject`, and a second server with `defer` (not with `--quick`), which asks again while a promise is still
possible. At 1x and 2x the capacity of stock vLLM, interleaved runs of the same requests. Traffic (`--kind`): `mixed`,
four short chats to one document of six times the length and a later deadline, or `short`, chats only. Every miss is
explained from its server's step log (_misses.py). Runs whose client was late are repeated once; what is still invalid
then is counted all the same, and `invalid_runs` says so.

Then the same with answers three times as long, at CHANGED_LOAD: traffic that no limit was set for. Nothing is set anew.

The rivals admit without looking at deadlines and serve in vLLM's order with the token budget that an expert sets from
the TPOT target (less a third for decodes): `queue_depth`, `queued_tokens`, and `token_bucket`. Each takes the limit
(bucket: burst) of a sweep at 2x on other requests, by goodput; the first two also the limit that accepts as many
requests there as the strict setting, or the widest of the sweep (not with `--quick`, nor with longer answers). The
bucket's rate lets as many prompt tokens through there as the strict setting. With `--quick` it is that volume itself:
less gets through, because a bucket refuses long prompts first.

Last line: RESULT {json} with accepted, accepted_miss, goodput and the alternatives beside it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from _misses import Record
from _report import arguments, describe, finish, folder
from headway.demo.arena import Arena
from headway.demo.capacity import measure
from headway.demo.duel import Cell, duel, expert
from headway.demo.systems import System, headway, stock
from headway.demo.workload import Workload
from headway.engine.vllm.messages import ENV_EVENT_LOG, ENV_STEP_LOG
from headway.replay.targets import Targets
from headway.trace.synthetic import Lengths, Shape, TrafficClass, demo_trace

EPS = 0.001

#: No run is repeated after this time.
REPEAT_UNTIL_S = 3300.0
LOADS = (1.0, 2.0)

CHAT = TrafficClass(
    slo_class="chat",
    share=1.0,
    inputs=Lengths(median=40, sigma=0.7, low=8, high=200),
    outputs=Lengths(median=12, sigma=0.5, low=4, high=32),
)
DOCUMENT = TrafficClass(
    slo_class="document",
    share=0.2,
    inputs=Lengths(median=250, sigma=0.4, low=120, high=500),
    outputs=Lengths(median=8, sigma=0.4, low=4, high=16),
)
SHAPES = {"short": Shape(classes=(CHAT,)), "mixed": Shape(classes=(replace(CHAT, share=0.8), DOCUMENT))}
TARGETS = {
    "short": {"chat": Targets(ttft_s=2.0, tpot_s=0.2)},
    "mixed": {"chat": Targets(ttft_s=2.0, tpot_s=0.2), "document": Targets(ttft_s=8.0, tpot_s=0.2)},
}

#: Traffic may change after the limits were set: answers get so many times as long.
ANSWERS = 3
CHANGED_LOAD = 2.0


def longer(shape: Shape) -> Shape:
    """Return the same traffic with longer answers."""
    classes = [
        replace(each, outputs=replace(out, median=ANSWERS * out.median, low=ANSWERS * out.low, high=ANSWERS * out.high))
        for each in shape.classes
        for out in (each.outputs,)
    ]
    return replace(shape, classes=tuple(classes))


SHAPES |= {f"{kind}-long": longer(shape) for kind, shape in SHAPES.items()}

#: Static limits that the sweep tries: waiting requests, queued prompt tokens, seconds of the bucket's rate.
SWEEP: dict[str, dict[str, tuple[float, ...]]] = {
    "short": {"queue_depth": (2, 6, 16), "queued_tokens": (200, 500, 1200), "token_bucket": (0.5, 1.5)},
    "mixed": {"queue_depth": (2, 4, 8, 16), "queued_tokens": (200, 500, 1200, 2000), "token_bucket": (0.5, 1.5, 4.0)},
}
ACCEPTED = pl.col("status") != "refused"

#: A quick run takes these as they are, and this capacity (of the embedded model on two cores of an EPYC), unless told.
QUICK = {"short": {"queue_depth": 6, "token_bucket": 1.5}, "mixed": {"queue_depth": 2, "token_bucket": 1.5}}
QUICK_CAPACITY = {"short": 8.4, "mixed": 6.0}


class Traffic(Workload):
    """Requests of one of the shapes."""

    def offered(self, *, rate: float, seed: int, duration_s: float | None = None, n: int | None = None) -> Any:
        """Return requests offered at `rate` per second, for a duration or a number of them."""
        return demo_trace(rate=rate, seed=seed, duration_s=duration_s, n=n, shape=SHAPES[self.kind])


def strict(workload: Workload) -> System:
    """Return Headway in the form that is proved."""
    settings = {
        "eps": EPS,
        "policy_parameters.jump": False,
        "admission_parameters.strict": True,
    }
    return replace(headway(workload.targets, **settings), name="strict", title="Headway strict")


def deferring(workload: Workload) -> System:
    """Return the same with the class rule `defer`."""
    system = strict(workload)
    config = re.sub(r"(\[class\.\w+\]\n)", r'\1on_miss = "defer"\n', system.config or "")
    return replace(system, name="strict-defer", title="Headway strict, defer", config=config)


def rival(workload: Workload, admission: str, limit: float, *, budget: tuple[str, ...], rate: float) -> System:
    """Return vLLM's order with a static admission test; the token bucket's limit is in seconds of its rate."""
    parameters = {"limit": int(limit)} if admission != "token_bucket" else {"rate": rate, "burst": limit * rate}
    settings = {f"admission_parameters.{key}": value for key, value in parameters.items()}
    system = headway(workload.targets, policy="fcfs", admission=admission, **settings)
    return replace(system, name=f"{admission}-{limit:g}", title=f"{admission} {limit:g}", extra=budget)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kind", choices=sorted(TARGETS), default="mixed")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals a run")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests/s, as found before")
    args = parser.parse_args()
    seeds = range(1, 2 if args.quick else args.seeds + 1)
    duration = 12.0 if args.quick else args.duration
    known = args.capacity or (QUICK_CAPACITY[args.kind] if args.quick else 0.0)
    workload = Traffic(kind=args.kind, targets=TARGETS[args.kind], weights={})
    changed = replace(workload, kind=f"{args.kind}-long")
    out = folder("guarantee-engine", args.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    log: dict[str, Any] = {"sweep": {}, "runs": [], "misses": [], "seeds": list(seeds), "duration_s": duration}

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)

    ours, later, base = strict(workload), deferring(workload), stock()
    proved = (ours,) if args.quick else (ours, later)
    with Arena(out, model=args.model, say=say) as arena:
        for system in proved:
            for variable, what in ((ENV_STEP_LOG, "steps"), (ENV_EVENT_LOG, "events")):
                os.environ[variable] = str(out / f"{system.name}.{what}.jsonl")
            arena.start(system)
        del os.environ[ENV_STEP_LOG], os.environ[ENV_EVENT_LOG]
        if not known:
            arena.start(base)
        capacity = known or measure(arena, base, workload, n=300)[0]
        if not known:
            arena.stop(base)
        say(f"capacity: {capacity:.2f} requests/s")
        log["capacity_req_s"] = capacity
        budget = token_budget(expert(arena.metrics(ours), workload).extra)

        def run(
            systems: list[System], loads: tuple[float, ...], numbers: Any, seconds: float, traffic: Workload = workload
        ) -> list[Cell]:
            return duel(
                arena,
                systems,
                traffic,
                capacity=capacity,
                loads=loads,
                seeds=numbers,
                duration_s=seconds,
                on_run=lambda cell: say(line(cell)),
            )

        # The volume that the bucket is given: prompt tokens that the strict setting accepts at 2x. In runs as long as
        # those that count: what a short one accepts is for the larger part what fills an empty engine.
        rivals: list[System] = []
        matched: list[System] = []
        (first,) = run([ours], (2.0,), [100], duration)
        rate = volume(first, ACCEPTED)
        say(f"strict accepts {rate:.0f} prompt tokens/s; rivals run with {' '.join(budget)}")
        if args.quick:
            rivals = [
                rival(workload, name, limit, budget=budget, rate=rate) for name, limit in QUICK[args.kind].items()
            ]
            arena.start(*rivals)
        else:

            def points(name: str, rates: dict[float, float] | None = None) -> list[System]:
                limits = SWEEP[args.kind][name]
                return [rival(workload, name, x, budget=budget, rate=(rates or {}).get(x, rate)) for x in limits]

            wanted = first.summary["total"]["accepted"]
            for name in ("queue_depth", "queued_tokens"):
                found = sweep(arena, run, points(name), duration, log["sweep"])
                rivals.append(max(found, key=goodput).system)
                limit = round(between(wanted, [accepted(cell) for cell in found], SWEEP[args.kind][name]))
                most = max(accepted(cell) for cell in found)
                say(f"{name}: accepts at most {most}, the strict setting {wanted}; limit {limit} is played too")
                same = rival(workload, name, limit, budget=budget, rate=rate)
                if same.name != rivals[-1].name:
                    matched.append(same)
                arena.stop(*(cell.system for cell in found if cell.system is not rivals[-1]))
            probes = [replace(each, name=f"{each.name}-probe") for each in points("token_bucket")]
            arena.start(*probes)
            got = [volume(cell, ACCEPTED) for cell in run(probes, (2.0,), [100], duration)]
            arena.stop(*probes)
            rates = {x: rate * rate / v for x, v in zip(SWEEP[args.kind]["token_bucket"], got, strict=True)}
            say("bucket rates for that volume: " + ", ".join(f"burst {x:g} s {r:.0f}/s" for x, r in rates.items()))
            log["bucket_rates"] = {f"{x:g}": round(r, 1) for x, r in rates.items()}
            found = sweep(arena, run, points("token_bucket", rates), duration, log["sweep"])
            rivals.append(max(found, key=goodput).system)
            arena.stop(*(cell.system for cell in found if cell.system is not rivals[-1]))
        if matched:  # not before: nine servers at once are more than 24 GB hold
            arena.start(*matched)
        if later in proved:
            run([later], (2.0,), [100], duration)  # it has seen traffic too, as the others have by now
        systems = [*proved, *rivals]
        cells = run([*systems, *matched], LOADS, seeds, duration)
        after = run(systems, (CHANGED_LOAD,), seeds, duration, changed)
        for played, traffic in ((cells, workload), (after, changed)):
            for at, cell in enumerate(played):
                # A client that is late measures itself: such a run says nothing and is repeated, once.
                if not cell.run.valid and time.monotonic() - started < REPEAT_UNTIL_S:
                    cell.run.path.rename(cell.run.path.with_name(f"{cell.run.path.name}-invalid"))
                    (played[at],) = run([cell.system], (cell.load,), [cell.seed], duration, traffic)
    records = {each.name: Record(out / f"{each.name}.steps.jsonl", eps=EPS) for each in proved}
    record = records[ours.name]
    for cell, traffic in [*((cell, workload) for cell in cells), *((cell, changed) for cell in after)]:
        log["runs"].append({"traffic": traffic.kind, **describe(cell)})
        if cell.system.name in records:
            for miss in records[cell.system.name].explain(cell.run):
                where = {"system": cell.system.name, "traffic": traffic.kind, "load": cell.load}
                log["misses"].append({**miss.as_dict(), **where})
    log["step_envelope_exceeded"] = record.exceedance
    log["stretch_exceeded"] = record.stretch_exceedance
    log["steps"] = len(record.over_s)
    (out / "guarantee_engine.json").write_text(json.dumps(log, indent=1), encoding="utf-8")
    for row in table(cells, [*systems, *matched], LOADS):
        print(row)
    print(f"answers {ANSWERS} times as long, limits as before:")
    for row in table(after, systems, (CHANGED_LOAD,)):
        print(row)
    for miss in log["misses"]:
        print(f"miss: {json.dumps(miss)}")
    mine = totals(cells, ours)
    result = {
        "kind": args.kind,
        "accepted": mine["accepted"],
        "accepted_miss": mine["accepted_miss"],
        "unexplained": unexplained(log["misses"], workload),
        "failed_or_cut_off": mine["failed"],
        **{key: mine[key] for key in ("goodput_req_s", "accepted_prompt_tok_s", "goodput_prompt_tok_s", "attainment")},
        "with_defer": totals(cells, later) if later in proved else None,
        "alternatives": {system.title: totals(cells, system) for system in rivals},
        "wider_limits": {system.title: totals(cells, system) for system in matched},
        "longer_answers": {
            "times": ANSWERS,
            "unexplained": unexplained(log["misses"], changed),
            **{system.title: totals(after, system) for system in systems},
        },
        "step_envelope_exceeded": round(record.exceedance, 5),
        "stretch_exceeded": round(record.stretch_exceedance, 5),
        "steps": len(record.over_s),
        "eps": EPS,
        "capacity_req_s": round(capacity, 3),
        "loads": list(LOADS),
        "seeds": len(seeds),
        "invalid_runs": sum(not cell.run.valid for cell in (*cells, *after)),
        "wall_s": round(time.monotonic() - started),
    }
    finish("guarantee_engine", result, log, quick=args.quick)


def unexplained(misses: list[dict[str, Any]], traffic: Workload) -> int:
    """Return how many misses of the strict setting with this traffic the step log does not explain."""
    return sum(miss["cause"] == "unexplained" for miss in misses if miss["traffic"] == traffic.kind)


def token_budget(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the expert's flags with two thirds of the budget, which leaves room for the decodes of a step.

    With the whole of it nearly every accepted request missed its TPOT. The queue limit is the admission test's.
    """
    tokens = str(max(16, int(flags[1]) * 2 // 3 // 16 * 16))
    return ("--max-num-batched-tokens", tokens, "--max-num-seqs", tokens)


def sweep(arena: Arena, run: Any, points: list[System], seconds: float, log: dict[str, Any]) -> list[Cell]:
    """Return one run of each at 2x; the servers stay up."""
    arena.start(*points)
    cells: list[Cell] = run(points, (2.0,), [100], seconds)
    log |= {cell.system.name: totals([cell], cell.system) for cell in cells}
    return cells


def goodput(cell: Cell) -> float:
    """Return the requests a second that met their targets."""
    return float(cell.summary["total"]["goodput_req_s"])


def accepted(cell: Cell) -> int:
    """Return how many requests were accepted."""
    return int(cell.summary["total"]["accepted"])


def between(wanted: int, counts: Sequence[int], limits: Sequence[float]) -> float:
    """Return the limit that accepts as many as wanted, on straight lines between those tried, and not beyond them."""
    for low, high, least, most in zip(counts, counts[1:], limits, limits[1:], strict=False):
        if wanted <= high:
            return least + (most - least) * min(max((wanted - low) / max(high - low, 1), 0.0), 1.0)
    return limits[-1]


def volume(cell: Cell, which: pl.Expr) -> float:
    """Return the prompt tokens of some requests per second of arrivals."""
    frame = cell.run.frame
    return float(frame.filter(which)["input_tokens"].sum() / max(frame["scheduled_s"].max(), 1e-9))


def totals(cells: list[Cell], system: System) -> dict[str, Any]:
    """Return counts over all runs of a system, and medians over runs by load: goodput, in requests and in the prompt
    tokens of those that met their targets, and attainment by class."""
    own = [cell for cell in cells if cell.system.name == system.name]
    summaries = [cell.summary for cell in own]
    parts = [each["total"] for each in summaries]
    accepted, missed = sum(p["accepted"] for p in parts), sum(p["missed"] for p in parts)

    def medians(values: Sequence[float]) -> dict[str, float]:
        by_load: dict[float, list[float]] = {}
        for cell, value in zip(own, values, strict=True):
            by_load.setdefault(cell.load, []).append(value)
        return {f"{load:g}x": round(statistics.median(each), 3) for load, each in by_load.items()}

    classes = sorted(summaries[0]["classes"])
    return {
        "offered": sum(p["n"] for p in parts),
        "accepted": accepted,
        "missed": missed,
        "accepted_miss": round(missed / max(accepted, 1), 5),
        "failed": sum(p["failed"] + p["cut_off"] for p in parts),
        "goodput_req_s": medians([part["goodput_req_s"] for part in parts]),
        "accepted_prompt_tok_s": medians([volume(cell, ACCEPTED) for cell in own]),
        "goodput_prompt_tok_s": medians([volume(cell, pl.col("attained")) for cell in own]),
        "attainment": {name: medians([each["classes"][name]["attainment"] for each in summaries]) for name in classes},
    }


def table(cells: list[Cell], systems: list[System], loads: tuple[float, ...]) -> list[str]:
    """Return the rows of the table: by load and system, sums over seeds, goodput as median over seeds."""
    rows = [
        "load  system              offered accepted  missed  missed/accepted  attainment  goodput req/s  prompt tok/s"
    ]
    for load in loads:
        for system in systems:
            own = [c for c in cells if c.load == load]
            found = totals(own, system)
            attained = found["accepted"] - found["missed"]
            rows.append(
                f"{load:g}x    {system.title:20s}{found['offered']:7d} {found['accepted']:8d} {found['missed']:7d}"
                f"  {100 * found['accepted_miss']:14.2f} %  {attained / max(found['offered'], 1):10.3f}"
                f"  {found['goodput_req_s'][f'{load:g}x']:13.2f}  {found['goodput_prompt_tok_s'][f'{load:g}x']:12.0f}"
            )
    return rows


def line(cell: Cell) -> str:
    """Return one run in a line."""
    total = cell.summary["total"]
    return (
        f"{cell.load:g}x seed {cell.seed} {cell.system.name}: {total['accepted']}/{total['n']} accepted, "
        f"{total['missed']} missed" + ("" if cell.run.valid else " (client late)")
    )


if __name__ == "__main__":
    main()
