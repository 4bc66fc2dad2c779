"""Many what-ifs at once: a grid of settings, run in parallel processes, summed up in rows."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import InputError
from headway.replay.summary import summarise
from headway.trace.record import Trace
from headway.twin.profile import TwinError
from headway.twin.scenario import Outcome, Scenario, Value, check_key, merged, parse_value, save, simulate

_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One point of a sweep: what was set, the summary (`headway.replay.summary`), engine facts, the twin's error."""

    settings: Mapping[str, Value]
    summary: Mapping[str, Any]
    facts: Mapping[str, Any]
    error: TwinError | None
    path: Path | None
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the serialised form."""
        error = None if self.error is None else {"load": self.error.load, **self.error.errors}
        return {
            "settings": dict(self.settings),
            "summary": self.summary,
            "engine": dict(self.facts),
            "twin_error": error,
            "run": None if self.path is None else str(self.path),
            "wall_s": self.wall_s,
        }


def grid(text: str) -> list[dict[str, Value]]:
    """Return the points of `token_budget=64,128;policy=fcfs,headway`; `64..512/64` is a range of whole numbers.

    Raises `InputError` on anything else.
    """
    axes: dict[str, list[Value]] = {}
    for part in text.split(";"):
        key, equals, raw = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not raw:
            raise InputError(f"--sweep {text!r}: {part!r}: expected KEY=VALUE,VALUE;KEY=LOW..HIGH/STEP")
        check_key(key)
        if key in axes:
            raise InputError(f"--sweep {text!r}: {key} is given twice")
        axes[key] = [value for piece in raw.split(",") for value in _values(text, piece.strip())]
        if len(set(map(str, axes[key]))) < len(axes[key]):
            raise InputError(f"--sweep {text!r}: {key} has a value twice")
    if (total := math.prod(map(len, axes.values()))) > _MOST:
        raise InputError(f"--sweep {text!r}: {total} points: expected at most {_MOST}")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _values(text: str, piece: str) -> list[Value]:
    bounds, slash, step = piece.partition("/")
    low, dots, high = bounds.partition("..")
    if not dots:
        if not piece:
            raise InputError(f"--sweep {text!r}: an empty value")
        return [parse_value(piece)]
    if not (low.isdigit() and high.isdigit() and slash and step.isdigit() and int(step)) or int(low) > int(high):
        raise InputError(f"--sweep {text!r}: {piece!r}: expected LOW..HIGH/STEP in whole numbers")
    values = range(int(low), int(high) + 1, int(step))
    if len(values) > _MOST:
        raise InputError(f"--sweep {text!r}: {piece!r}: {len(values)} values: expected at most {_MOST}")
    return list(values)


#: Runs scenarios on a trace somewhere; yields their outcomes in order.
Pool = Callable[[Trace, Sequence[Scenario]], Iterator[Outcome]]


def run(
    trace: Trace,
    scenario: Scenario,
    points: Sequence[Mapping[str, Value]],
    *,
    jobs: int = 1,
    pool: Pool | None = None,
    out: Path | None = None,
    optional: Collection[str] = (),
) -> Iterator[Prediction]:
    """Yield a prediction for each point, in their order: the same here, in `jobs` processes, and in `pool`.

    With `out` the folder of each run is kept there. `optional` are parameters of the scenario's policy and admission
    test that go when a point replaces that.
    """
    scenarios = [
        replace(scenario, settings=merged(scenario.settings, point, optional), label=name_of(point) or scenario.label)
        for point in points
    ]
    if pool is not None:
        yield from _predictions(trace, scenarios, points, pool(trace, scenarios), out)
        return
    if jobs == 1 or len(points) == 1:
        outcomes: Iterator[Outcome] = (simulate(trace, each) for each in scenarios)
        yield from _predictions(trace, scenarios, points, outcomes, out)
        return
    # Spawned, not forked: a fork would copy the threads of polars in an unknown state.
    context = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(min(jobs, len(points)), context, initializer=_take, initargs=(trace,))
    try:
        yield from _predictions(trace, scenarios, points, workers.map(_simulate, scenarios), out)
    except BaseException:
        # Ctrl-C, or whoever reads this goes away: what has not begun never does.
        workers.shutdown(wait=False, cancel_futures=True)
        raise
    workers.shutdown()


_trace: Trace | None = None


def _take(trace: Trace) -> None:
    global _trace  # one copy a worker process instead of one a point
    _trace = trace


def _simulate(scenario: Scenario) -> Outcome:
    assert _trace is not None
    return simulate(_trace, scenario)


def _predictions(
    trace: Trace,
    scenarios: Sequence[Scenario],
    points: Sequence[Mapping[str, Value]],
    outcomes: Iterator[Outcome],
    out: Path | None,
) -> Iterator[Prediction]:
    for number, (scenario, point, outcome) in enumerate(zip(scenarios, points, outcomes, strict=True)):
        path = None
        if out is not None:
            path = folder_of(out, number, len(points))
            save(path, trace, scenario, outcome)
        yield Prediction(
            settings=point,
            summary=summarise(outcome.frame),
            facts=outcome.facts,
            error=scenario.profile.error_for(outcome.facts["busy_share"]),
            path=path,
            wall_s=outcome.wall_s,
        )


def folder_of(out: Path, number: int, total: int) -> Path:
    """Return the folder of one of `total` runs kept in `out`."""
    return out if total == 1 else out / f"{number:04d}"


def name_of(point: Mapping[str, Value]) -> str:
    """Return a point as text."""
    return ", ".join(f"{key}={value}" for key, value in point.items())


def pareto(predictions: Sequence[Prediction]) -> list[bool]:
    """Return which points no other one beats in P99 TTFT, P99 TPOT and goodput at once."""
    keys = []
    for each in predictions:
        total = each.summary["total"]
        worst = float("inf")
        ttft, tpot = total["ttft"]["p99_s"], total["tpot"]["p99_s"]
        keys.append(
            (worst if ttft is None else ttft, worst if tpot is None else tpot, -(total["goodput_req_s"] or 0.0))
        )
    return [
        not any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in keys)
        for mine in keys
    ]
