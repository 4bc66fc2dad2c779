"""Is an accepted request ever late in the twin, how much does the guarantee accept, and what does it refuse in vain?

1. Adversarial loads (_adversary.py), service times anywhere under the envelope: accepted requests and misses.
2. Azure code and conv at 1 to 3 times the capacity of stock vLLM: prompt tokens of the accepted requests against those
   of the clairvoyant test (true answer lengths, mean steps, no margin), the better of its two forms, same windows.
3. Small cases against brute force (tests/_oracle.py): false accepts (none) and false rejects.

Last line: RESULT {json} with accepted, accepted_misses, volume_vs_clairvoyant, false_accepts, false_rejects.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from _adversary import Case, case
from _loads import Load, capacity, every
from _report import arguments, finish
from headway.core import Accept, CostCoefficients, EngineView, RequestState, Slo, Verdict
from headway.twin import Scenario, simulate
from headway.twin.check import STRICT, attempted
from headway.twin.engine import StarvationError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

WANTED, REQUESTS = 1_000_000, 2_000
CLAIRVOYANT: dict[str, Any] = {"policy": "headway", "admission": "clairvoyant", "learn": False}
ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "strict": (STRICT, "reject"),
    "strict, class rule defer": (STRICT, "defer"),
    "default": ({"policy": "headway", "admission": "response_time", "learn": False}, "reject"),
    "clairvoyant, deadline order": ({**CLAIRVOYANT, "policy.jump": False, "admission.foresight": 0.0}, "reject"),
    "clairvoyant, foresight": (CLAIRVOYANT, "reject"),
}
BEST = ("clairvoyant, deadline order", "clairvoyant, foresight")


def adversarial(wanted: int, requests: int) -> dict[str, Any]:
    """Run cases until enough requests were accepted."""
    total: Counter[str] = Counter()
    shapes: dict[str, Counter[str]] = {}
    tightest: dict[str, float] = {}
    broken: list[dict[str, Any]] = []
    started, number = time.perf_counter(), 0
    while total["accepted"] < wanted:
        each: Case = case(number, requests)
        try:
            found = attempted(each.trace, each.scenario, each.course_name, each.course)
        except StarvationError:
            # Of what is deferred nothing can be promised on this engine, even when it is idle.
            total["cases_that_promise_nothing"] += 1
            number += 1
            continue
        counts = {
            key: getattr(found, key) for key in ("offered", "accepted", "unpromised", "refused", "missed", "steps")
        }
        total.update(counts)
        shapes.setdefault(each.shape, Counter()).update(counts)
        for target, margin in found.tightest.items():
            tightest[target] = min(tightest.get(target, 1.0), margin.relative)
        if found.missed:
            broken.append(
                {"case": number, "shape": each.shape, "cost": each.cost, "course": each.course_name, **counts}
            )
            print(f"MISSES: {broken[-1]} {each.engine}", flush=True)
        number += 1
        if number % 50 == 0:
            print(f"{number} cases, {total['accepted']:,} accepted, {total['missed']} missed, "
                  f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    return {
        "cases": number,
        "requests_a_case": requests,
        **total,
        "shapes": {shape: dict(counts) for shape, counts in shapes.items()},
        "tightest_margin": {key: round(value, 6) for key, value in tightest.items()},
        "broken": broken,
        "wall_s": round(time.perf_counter() - started, 1),
    }


def volumes(loads: list[Load], seeds: int) -> list[dict[str, Any]]:
    """Return a row for each trace, multiple of capacity and arm: requests and prompt tokens that met every target."""
    rows = []
    for load in loads:
        rate = capacity(load, 1 if seeds == 1 else 3)
        target = load.targets["default"]
        for factor in (1.0, 2.0, 3.0):
            traces = [load.make(rate * factor, seed) for seed in range(seeds)]
            for arm, (settings, rule) in ARMS.items():
                slos = {"default": Slo(ttft_s=target.ttft_s, tpot_s=target.tpot_s, on_miss=rule)}  # type: ignore[arg-type]
                counts: Counter[str] = Counter()
                for seed, trace in enumerate(traces):
                    scenario = Scenario(
                        profile=load.engine(),
                        slos=slos,
                        settings={**load.settings, **settings, "noise": "bounded"},
                        seed=seed,
                    )
                    frame = simulate(trace, scenario).frame
                    served = frame.filter(pl.col("status") == "ok")
                    good = served.filter("attained")
                    counts.update(
                        offered=frame.height,
                        accepted=served.height,
                        missed=served.height - good.height,
                        attained=good.height,
                        volume=int(good["input_tokens"].sum()),
                    )
                rows.append(
                    {"trace": load.name, "factor": factor, "rate": round(rate * factor, 3), "arm": arm, **counts}
                )
    return rows


def ratios(rows: list[dict[str, Any]], arm: str, key: str) -> Iterator[tuple[str, float, float]]:
    """Yield (trace, factor, `key` of the arm / that of the better clairvoyant)."""
    cells = {(row["trace"], row["factor"], row["arm"]): row[key] for row in rows}
    for trace, factor in sorted({(row["trace"], row["factor"]) for row in rows}):
        yield trace, factor, cells[trace, factor, arm] / max(1, *(cells[trace, factor, best] for best in BEST))


class Judge:
    """The strict test with brute force beside it; `seen` counts (accepted, feasible)."""

    name = "response_time"

    def __init__(self, unit: int) -> None:
        from headway.admission import create

        self.inner = create("response_time", strict=True, foresight=0.0)
        self.unit = unit
        self.seen: Counter[tuple[bool, bool | None]] = Counter()

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the strict verdict and count it."""
        from _oracle import Oracle, works

        verdict = self.inner.decide(view, request)
        known = works([*view.ledger.pending, *view.ledger.decoding.values(), request])
        self.seen[isinstance(verdict, Accept), Oracle(view, unit=self.unit).feasible(view.now_s, known)] += 1
        return verdict


def oracle(cases: int) -> dict[str, Any]:
    """Judge random small cases; a search that was given up is counted apart."""
    from _loop import Arrival, Loop
    from headway.policies import create

    seen: Counter[tuple[bool, bool | None]] = Counter()
    for number in range(cases):
        draw = random.Random(number)
        cost = CostCoefficients(g=0.01, a=draw.choice([1e-4, 4e-4]), b=draw.choice([0.0, 1e-3]), k=1e-6, x=1e-7)
        factor = draw.choice([1.0, 1.3])
        known = [
            Slo(
                name=str(n),
                ttft_s=draw.choice([0.04, 0.08, 0.16, 0.3]),
                **{draw.choice(["tpot_s", "tbt_s"]): draw.choice([0.025, 0.04, 0.1])},
            )
            for n in range(2)
        ]
        arrivals = [
            Arrival(
                at_s=draw.choice([0.0, 0.0, 0.02, 0.06]),
                prompt=draw.choice([40, 80, 160, 400]),
                output=draw.randint(1, 3),
                slo=draw.choice(known),
            )
            for _ in range(draw.randint(1, 4))
        ]
        judge = Judge(40)
        Loop(
            coefficients=cost,
            policy=create("headway", jump=False),
            admission=judge,
            factor=factor,
            ratios=[factor],
            blocking_s=0.05,
            max_step_tokens=400,
        ).run(arrivals)
        seen.update(judge.seen)
    refused = sum(count for (accepted, _), count in seen.items() if not accepted)
    return {
        "cases": cases,
        "decisions": sum(seen.values()),
        "accepted": sum(count for (accepted, _), count in seen.items() if accepted),
        "false_accepts": seen[True, False],
        "accepts_not_settled": seen[True, None],
        "refused": refused,
        "false_rejects": seen[False, True],
        "rejects_not_settled": seen[False, None],
        "feasible_accepted": round(seen[True, True] / max(1, seen[True, True] + seen[False, True]), 4),
    }


def least(cells: list[tuple[str, float, float]]) -> float | None:
    """Return the least ratio, None without a trace."""
    return round(min(value for _, _, value in cells), 4) if cells else None


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--traces", type=Path, help="folder with the Azure 2023 files")
    parser.add_argument("--accepted", type=int, help=f"accepted requests to judge (default {WANTED:,}, quick 20,000)")
    options = parser.parse_args()
    quick: bool = options.quick
    small = oracle(60 if quick else 600)
    print(f"brute force, {small['cases']} small cases: {small}", flush=True)
    loads = [load for load in every(options.traces) if load.name in ("azure code", "azure conv")]
    rows = volumes(loads, 1 if quick else 6)
    for row in rows:
        print("{trace} {factor:g}x {arm}: {attained} of {offered} attained, {missed} missed, {volume:,} prompt tokens"
              .format(**row), flush=True)  # fmt: skip
    shares = {arm: list(ratios(rows, arm, "volume")) for arm in list(ARMS)[:3]}
    counts = {arm: list(ratios(rows, arm, "attained")) for arm in list(ARMS)[:3]}
    for arm, cells in shares.items():
        print(f"volume of {arm} / better clairvoyant: " + ", ".join(f"{t} {f:g}x {v:.3f}" for t, f, v in cells))
    adversary = adversarial(options.accepted or (20_000 if quick else WANTED), REQUESTS)
    strict = [row for row in rows if row["arm"].startswith("strict")]
    median = statistics.median([v for _, _, v in shares["strict"]]) if loads else None
    result = {
        "accepted": adversary["accepted"],
        "accepted_misses": adversary["missed"],
        "volume_vs_clairvoyant": least(shares["strict"]),
        "volume_vs_clairvoyant_median": None if median is None else round(median, 4),
        "volume_vs_clairvoyant_defer": least(shares["strict, class rule defer"]),
        "requests_vs_clairvoyant": least(counts["strict"]),
        "azure_accepted": sum(row["accepted"] for row in strict),
        "azure_misses": sum(row["missed"] for row in strict),
        "false_accepts": small["false_accepts"],
        "false_rejects": small["false_rejects"],
        "oracle_refused": small["refused"],
    }
    if not loads:
        print("skipped: azure code, azure conv: no --traces given")
    finish("guarantee_twin", result, {"adversary": adversary, "volumes": rows, "oracle": small}, quick=quick)


if __name__ == "__main__":
    main()
