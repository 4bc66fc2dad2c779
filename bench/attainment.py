"""How many requests meet their targets above capacity: stock vLLM, stock vLLM at its best tuned point, Headway.

Capacity is that of stock vLLM with defaults on the same traffic. The tuned rival is the best point of a sweep over
token budget x queued tokens, chosen for each load on runs of its own. All ratios come from interleaved runs of the
same requests; medians over seeds. Two kinds of traffic: `single` (one heavy-tailed class) and `mixed` (chat and
documents, both classes shown).

Last line: RESULT {json} with x_stock, x_tuned, accepted_miss, and the same for each kind.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from _report import arguments, describe, finish, folder
from headway.demo.arena import Arena
from headway.demo.capacity import measure
from headway.demo.duel import Cell, duel, spread
from headway.demo.systems import System, headway, stock, tuned
from headway.demo.workload import MIXED, SINGLE, WEIGHTS, Workload

BUDGETS = (64, 96, 160)
QUEUED = (300, 600, 1200)
LOADS = (1.4, 2.0)

WORKLOADS = {
    "single": Workload(kind="single", targets=SINGLE, weights={}),
    "mixed": Workload(kind="mixed", targets=MIXED, weights=WEIGHTS),
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of arrivals a run")
    parser.add_argument("--sweep-duration", type=float, default=30.0, help="seconds of arrivals a sweep run")
    parser.add_argument("--kinds", default="single,mixed")
    parser.add_argument("--capacity", default="", help="requests/s by kind, as found before: single=2.5,mixed=2.2")
    parser.add_argument("--sweep-from", type=Path, default=None, help="attainment.json of an earlier sweep")
    parser.add_argument("--high-duration", type=float, default=0.0, help="seconds of arrivals at 2x, 0: as --duration")
    args = parser.parse_args()
    kinds = ["mixed"] if args.quick else args.kinds.split(",")
    seeds = range(1, 2 if args.quick else args.seeds + 1)
    loads = LOADS[1:] if args.quick else LOADS
    duration = 25.0 if args.quick else args.duration
    out = folder("attainment", args.out)
    started = time.monotonic()
    known = dict(pair.split("=") for pair in args.capacity.split(",") if pair)
    log: dict[str, Any] = {"sweep": {}, "kinds": {}, "capacity_req_s": {}, "seeds": list(seeds), "duration_s": duration}

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)

    def keep() -> None:
        (out / "attainment.json").write_text(json.dumps(log, indent=1), encoding="utf-8")

    with Arena(out, model=args.model, say=say) as arena:
        base = stock()
        arena.start(base)
        capacity = {}
        for kind in kinds:
            n = 60 if args.quick else 120
            capacity[kind] = float(known.get(kind, 0)) or measure(arena, base, WORKLOADS[kind], n=n)[0]
            say(f"capacity on {kind}: {capacity[kind]:.2f} requests/s")
        log["capacity_req_s"] = capacity
        if args.quick:
            best = {(kind, load): tuned(96, 600) for kind in kinds for load in loads}
        else:
            if args.sweep_from is not None:
                log["sweep"] = json.loads(args.sweep_from.read_text(encoding="utf-8"))["sweep"]
            best = sweep(arena, kinds, capacity, loads, args.sweep_duration, say, log["sweep"])
            keep()
        rivals = {system.name: system for system in best.values()}
        arena.start(*rivals.values())
        result: dict[str, float] = {}
        for kind in kinds:
            ours = headway(WORKLOADS[kind].targets, WORKLOADS[kind].weights)
            arena.start(ours)
            cells: list[Cell] = []
            for load in loads:
                high = args.high_duration and load > loads[0]
                cells += duel(
                    arena,
                    [base, best[kind, load], ours],
                    WORKLOADS[kind],
                    capacity=capacity[kind],
                    loads=[load],
                    seeds=seeds,
                    duration_s=args.high_duration if high else duration,
                    on_run=lambda cell, kind=kind: say(f"{kind} {line(cell)}"),
                )
                log["kinds"][kind] = [record(cell) for cell in cells]
                keep()
            arena.stop(ours)
            log.setdefault("table", []).extend(table(kind, cells, base, best, ours, loads))
            scores = score(kind, cells, base, best, ours, loads)
            result.update({f"{kind}_{key}": value for key, value in scores.items()})
    first = kinds[0]
    result = {
        "x_stock": min(result[f"{kind}_x_stock"] for kind in kinds),
        "x_tuned": min(result[f"{kind}_x_tuned"] for kind in kinds),
        "accepted_miss": max(result[f"{kind}_accepted_miss"] for kind in kinds),
        **result,
        "capacity_req_s": round(capacity[first], 3),
        "seeds": len(seeds),
        "invalid_runs": sum(not row["valid"] for rows in log["kinds"].values() for row in rows),
    }
    for row in log["table"]:
        print(row)
    finish("attainment", result, log, quick=args.quick)


def sweep(
    arena: Arena,
    kinds: list[str],
    capacity: dict[str, float],
    loads: tuple[float, ...],
    duration: float,
    say: Any,
    log: dict[str, Any],
) -> dict[tuple[str, float], System]:
    """Return the best tuned point for each kind and load; points that `log` holds already are not run again.

    All points run at the first load. At higher loads the three best of it run, and beside each the one with the next
    shorter queue: the more is offered, the less may wait.
    """
    points = [tuned(budget, queued) for budget, queued in itertools.product(BUDGETS, QUEUED)]
    by_name = {point.name: point for point in points}

    def run(wanted: list[tuple[str, float, str]]) -> None:
        wanted = [w for w in wanted if key(*w) not in log]
        names = sorted({name for _, _, name in wanted})
        for first in range(0, len(names), 3):
            batch = [by_name[name] for name in names[first : first + 3]]
            arena.start(*batch)
            for kind, load, name in wanted:
                if by_name[name] not in batch:
                    continue
                cells = duel(
                    arena,
                    [by_name[name]],
                    WORKLOADS[kind],
                    capacity=capacity[kind],
                    loads=[load],
                    seeds=[100],
                    duration_s=duration,
                    on_run=lambda cell, kind=kind: say(f"sweep {kind} {line(cell)}"),
                )
                log[key(kind, load, name)] = cells[0].summary["total"]["attainment"]
            arena.stop(*batch)

    run([(kind, loads[0], name) for name in by_name for kind in kinds])
    for load in loads[1:]:
        run([(kind, load, name) for kind in kinds for name in candidates(kind, loads[0], log)])
    return {(kind, load): by_name[best_name(log, kind, load)] for kind in kinds for load in loads}


def key(kind: str, load: float, name: str) -> str:
    """Return the name of one point of the sweep in the log."""
    return f"{kind} {load:g}x {name}"


def best_name(found: dict[str, float], kind: str, load: float) -> str:
    """Return the best point that a sweep found for a kind at a load; of equals the one found first."""
    prefix = key(kind, load, "")
    return max((k for k in found if k.startswith(prefix)), key=lambda k: found[k]).removeprefix(prefix)


def candidates(kind: str, load: float, found: dict[str, float]) -> list[str]:
    """Return the points to try above `load`: the three best there, and each with the next shorter queue."""
    prefix = key(kind, load, "")
    names = [k.removeprefix(prefix) for k in found if k.startswith(prefix)]
    chosen: list[str] = []
    for name in sorted(names, key=lambda n: -found[prefix + n])[:3]:
        budget, queued = (int(word) for word in name.removeprefix("tuned-").split("-"))
        shorter = [q for q in QUEUED if q < queued]
        chosen += [name, *([tuned(budget, max(shorter)).name] if shorter else [])]
    return list(dict.fromkeys(chosen))


def score(kind: str, cells: list[Cell], base: System, best: Any, ours: System, loads: Any) -> dict[str, float]:
    """Return the ratios of medians over seeds, the worse of the loads, and the misses among accepted."""
    ratios_stock, ratios_tuned = [], []
    for load in loads:
        mine, theirs, rival = (
            spread(cells, system, load, lambda s: s["total"]["attainment"]) for system in (ours, base, best[kind, load])
        )
        assert mine
        assert theirs
        assert rival
        n = statistics.median(c.summary["total"]["n"] for c in cells if c.load == load)
        # A rival that met no target at all counts as half a request, or the ratio would be infinite.
        ratios_stock.append(mine.median / max(theirs.median, 0.5 / n))
        ratios_tuned.append(mine.median / max(rival.median, 0.5 / n))
    accepted = sum(c.summary["total"]["accepted"] for c in cells if c.system.name == ours.name)
    missed = sum(c.summary["total"]["missed"] for c in cells if c.system.name == ours.name)
    return {
        "x_stock": round(min(ratios_stock), 2),
        "x_tuned": round(min(ratios_tuned), 3),
        "accepted_miss": round(missed / max(accepted, 1), 4),
        "accepted": accepted,
    }


def table(kind: str, cells: list[Cell], base: System, best: Any, ours: System, loads: Any) -> list[str]:
    rows = [f"{kind}: attainment over all offered requests, median [least, greatest] over seeds; by class: medians"]
    for load in loads:
        for system in (base, best[kind, load], ours):
            found = spread(cells, system, load, lambda s: s["total"]["attainment"])
            assert found
            classes = sorted(next(c for c in cells if c.load == load).summary["classes"])
            parts = []
            for name in classes:
                part = spread(cells, system, load, lambda s, name=name: s["classes"].get(name, {}).get("attainment"))
                parts.append(f"{name} {part.median:.2f}" if part else f"{name} -")
            missed = spread(cells, system, load, lambda s: s["total"]["miss_share"])
            rows.append(
                f"  {load:g}x  {system.title:14s} {found.median:.3f} [{found.low:.3f}, {found.high:.3f}]  "
                f"{', '.join(parts)}  missed of accepted {missed.median:.3f}"
                if missed
                else f"  {load:g}x  {system.title:14s} {found.median:.3f}"
            )
    return rows


def record(cell: Cell) -> dict[str, Any]:
    classes = {name: part["attainment"] for name, part in cell.summary["classes"].items()}
    return {**describe(cell), "classes": classes}


def line(cell: Cell) -> str:
    total = cell.summary["total"]
    return (
        f"{cell.load:g}x seed {cell.seed} {cell.system.name}: {total['attained']}/{total['n']} attained, "
        f"{total['refused']} refused, {total['missed']} missed of {total['accepted']}"
        + ("" if cell.run.valid else " (client late)")
    )


if __name__ == "__main__":
    main()
