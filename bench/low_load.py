"""Below capacity nothing may get worse: stock vLLM, tuned stock vLLM, Headway, and Headway as a no-op at 0.7x.

`refused_servable` is the share of offered requests that Headway refused although stock vLLM with defaults met all
their targets in the paired run (same requests, same schedule).

Last line: RESULT {json} with attainment_minus_tuned, ttft_p50_ratio, tpot_p50_ratio, refused_servable, also by kind.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import polars as pl

from _report import arguments, finish, folder
from attainment import WORKLOADS, line, record
from headway.demo.arena import Arena
from headway.demo.capacity import measure
from headway.demo.duel import Cell, duel, spread
from headway.demo.systems import headway, no_op, stock, tuned


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=45.0, help="seconds of arrivals a run")
    parser.add_argument("--load", type=float, default=0.7, help="multiple of capacity")
    parser.add_argument("--kinds", default="single,mixed")
    parser.add_argument("--tuned", default="96,600", help="token budget, queued tokens of the tuned rival")
    parser.add_argument("--no-op", default="single", help="kinds that Headway as a no-op runs on as well")
    parser.add_argument("--capacity", default="", help="requests/s by kind, as found before: single=2.5,mixed=2.2")
    args = parser.parse_args()
    kinds = ["mixed"] if args.quick else args.kinds.split(",")
    seeds = range(1, 2 if args.quick else args.seeds + 1)
    out = folder("low-load", args.out)
    started = time.monotonic()
    log: dict[str, Any] = {"kinds": {}, "seeds": list(seeds), "load": args.load}
    known = dict(pair.split("=") for pair in args.capacity.split(",") if pair)

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", flush=True)

    result: dict[str, Any] = {}
    with Arena(out, model=args.model, say=say) as arena:
        budget, queued = (int(word) for word in args.tuned.split(","))
        base, hand = stock(), tuned(budget, queued)
        arena.start(base, hand)
        for kind in kinds:
            workload = WORKLOADS[kind]
            ours = headway(workload.targets, workload.weights)
            nothing = no_op(workload.targets)
            idle = [] if args.quick or kind not in args.no_op.split(",") else [nothing]
            arena.start(ours, *idle)
            capacity = float(known.get(kind, 0)) or measure(arena, base, workload, n=60 if args.quick else 120)[0]
            say(f"capacity on {kind}: {capacity:.2f} requests/s")
            cells = duel(
                arena,
                [base, hand, ours, *idle],
                workload,
                capacity=capacity,
                loads=[args.load],
                seeds=seeds,
                duration_s=25.0 if args.quick else args.duration,
                on_run=lambda cell, kind=kind: say(f"{kind} {line(cell)}"),
            )
            arena.stop(ours, *idle)
            log["kinds"][kind] = [record(cell) for cell in cells]
            (out / "low_load.json").write_text(json.dumps(log, indent=1), encoding="utf-8")
            scores = score(cells, base.name, hand.name, ours.name, nothing.name)
            say(f"{kind}: {scores}")
            result.update({f"{kind}_{key}": value for key, value in scores.items()})
            for system in (base, hand, ours, *idle):
                found = spread(cells, system, args.load, lambda s: s["total"]["attainment"])
                ttft = spread(cells, system, args.load, lambda s: s["total"]["ttft"]["p50_s"])
                tpot = spread(cells, system, args.load, lambda s: s["total"]["tpot"]["p50_s"])
                assert found
                assert ttft
                assert tpot
                print(
                    f"{kind:7s} {system.title:14s} attained {found.median:.3f} [{found.low:.3f}, {found.high:.3f}]  "
                    f"TTFT P50 {ttft.median:.3f} s [{ttft.low:.3f}, {ttft.high:.3f}]  "
                    f"TPOT P50 {1e3 * tpot.median:.1f} ms [{1e3 * tpot.low:.1f}, {1e3 * tpot.high:.1f}]"
                )
    worst = {"attainment_minus_tuned": min, "ttft_p50_ratio": max, "tpot_p50_ratio": max, "refused_servable": max}
    summary = {key: pick(result[f"{kind}_{key}"] for kind in kinds) for key, pick in worst.items()}
    finish("low_load", {**summary, **result, "seeds": len(seeds)}, log, quick=args.quick)


def score(cells: list[Cell], base: str, hand: str, ours: str, nothing: str) -> dict[str, float]:
    """Return medians over seeds of the paired differences and ratios."""
    by = {(c.system.name, c.seed): c for c in cells}
    seeds = sorted({c.seed for c in cells})

    def median(value: Any) -> float:
        return round(statistics.median(value(seed) for seed in seeds), 4)

    def total(name: str, seed: int) -> dict:
        return by[name, seed].summary["total"]

    def servable(seed: int) -> float:
        mine, theirs = by[ours, seed].run.frame, by[base, seed].run.frame
        both = mine.select("index", "status").join(theirs.select("index", "attained"), on="index")
        return both.filter((pl.col("status") == "refused") & pl.col("attained")).height / both.height

    scores = {
        "attainment_minus_tuned": median(lambda s: total(ours, s)["attainment"] - total(hand, s)["attainment"]),
        "ttft_p50_ratio": median(lambda s: total(ours, s)["ttft"]["p50_s"] / total(base, s)["ttft"]["p50_s"]),
        "tpot_p50_ratio": median(lambda s: total(ours, s)["tpot"]["p50_s"] / total(base, s)["tpot"]["p50_s"]),
        "refused_servable": median(servable),
    }
    if (nothing, seeds[0]) in by:
        for key in ("ttft", "tpot"):
            ratio = lambda s, key=key: total(nothing, s)[key]["p50_s"] / total(base, s)[key]["p50_s"]  # noqa: E731
            scores[f"noop_{key}_p50_ratio"] = median(ratio)
    return scores


if __name__ == "__main__":
    main()
