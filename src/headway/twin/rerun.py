"""The arrivals of a step log once more, through the twin, on the clock of the real steps.

Same settings, policy, admission test, classes and belief in the step cost as the engine had when it started, so every
difference is one of the twin's model. A step takes the time that the real step of the same content took, so that the
two clocks agree; one that has no like near it takes its price by a fit to the log.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from headway import admission, policies
from headway.core import CostCoefficients, StepCost
from headway.core.slo import blocking_s
from headway.errors import InputError
from headway.trace.record import SCHEMA
from headway.twin.calibration import fit
from headway.twin.config import EngineConfig
from headway.twin.decisions import Asked, Decisions, Watch
from headway.twin.engine import Engine
from headway.twin.noise import Noise, NoiseModel
from headway.twin.price import Price
from headway.twin.recorder import Recorder
from headway.twin.router import create
from headway.twin.simulation import Simulation
from headway.twin.source import Arrival

#: Real steps of the same content are looked for among so many around the time of the twin's.
_NEAR = 40

#: The twin's clock follows the real one where the two steps began at most this far apart, in seconds.
_SNAP_S = 0.1


class MeasuredTimes:
    """Times of real steps for the steps of a twin (`StepTimes` of engine.py)."""

    def __init__(self, real: Decisions) -> None:
        self._steps = real.steps
        self._planned = [each.planned_s for each in real.steps]
        self._refusals = sorted(set(real.refusals))
        self.found = 0
        self.missing = 0

    def __call__(self, now: float, q: int, n: int, K: int, X: float) -> tuple[float, float, float] | None:
        """Return when the step ends, when the next one is planned, and what it took by the real engine's own count."""
        at = bisect.bisect_left(self._planned, now)
        near = range(max(0, at - _NEAR), min(len(self._steps), at + _NEAR))
        same = [i for i in near if (s := self._steps[i].step).q == q and s.n == n and s.K == K and abs(s.X - X) < 1.0]
        if not same:
            self.missing += 1
            return None
        self.found += 1
        each = self._steps[min(same, key=lambda i: abs(self._planned[i] - now))]
        if abs(each.planned_s - now) <= _SNAP_S and each.ended_s > now:
            return each.ended_s, each.next_s, each.step.seconds
        late = now - each.planned_s
        return each.ended_s + late, each.next_s + late, each.step.seconds

    def after_refusal(self, now: float) -> float | None:
        """Return when the real engine decided next, if it refused at this very time.

        It sends a refusal with an empty step and plans anew for those who stay; who came meanwhile may be refused too.
        """
        at, refused = bisect.bisect_left(self._planned, now), bisect.bisect_left(self._refusals, now)
        if self._refusals[refused : refused + 1] != [now] or at == len(self._planned):
            return None
        then = min([self._planned[at], *self._refusals[refused + 1 : refused + 2]])
        return then if 0 < then - now <= _SNAP_S else None


def rerun(real: Decisions, **changes: Any) -> tuple[Decisions, pl.DataFrame]:
    """Return what the twin decides about the arrivals of `real`, and its table of requests.

    `changes` override settings of the engine (`EngineConfig`), `policy`, `admission`, and their parameters by the
    names `policy_parameters` and `admission_parameters`.

    Raises:
        InputError: the log does not say enough of its engine.
    """
    if not real.asked:
        raise InputError("a step log without arrivals: nothing to put before the twin")
    told = dict(real.about.get("config", {}))
    told |= {key: changes.pop(key) for key in list(changes) if key in told}
    engine = {**real.about.get("engine", {}), **changes}
    engine["bookings"] = bool(told.get("bookings"))
    engine["prefix_cache"] = False  # the log has no contents, only what it held (or was about to, behind a sibling)
    config = EngineConfig(
        **engine, front_s=(told["front_ms"] or 0.0) / 1e3, patience_s=told["patience_s"], eps=told["eps"], fast=False
    )
    belief = real.about.get("cost")
    terms = np.array([(s.step.q, s.step.n, s.step.K, s.step.X) for s in real.steps], dtype=float)
    watch, recorder, times = Watch(), Recorder(front_s=config.front_s), MeasuredTimes(real)
    twin = Engine(
        config=config,
        truth=Price(cost=fit(terms, np.array([s.step.seconds for s in real.steps]))),
        noise=Noise(NoiseModel(), np.random.default_rng(0)),
        policy=policies.create(told["policy"], **told["policy_parameters"]),
        admission=admission.create(told["admission"], **told["admission_parameters"]),
        belief=StepCost(None if belief is None else CostCoefficients(**belief), eps=told["eps"]),
        recorder=recorder,
        blocking_s=_blocking_s(real, told),
        on_step=watch,
        times=times,
    )
    simulation = Simulation(engines=[twin], router=create("round_robin"), source=_arrivals(real), recorder=recorder)
    simulation.run()
    frame = recorder.frame(_frame(real.asked))
    return watch.decisions(frame), frame


def _arrivals(real: Decisions) -> Iterator[Arrival]:
    for asked in sorted(real.asked, key=lambda each: (each.seen_s, each.number)):
        yield Arrival(
            row=asked.number,
            time_s=asked.seen_s,
            input_tokens=asked.prompt_tokens,
            output_tokens=max(1, real.output.get(asked.number) or asked.max_output_tokens),
            slo_class=asked.slo.name,
            slo=asked.slo,
            asked_s=asked.arrival_s,
            declared=asked.max_output_tokens,
            due_s=asked.due_s,
            cached_tokens=asked.cached_tokens,
            fingerprint=asked.fingerprint,
            reached_s=asked.reached_s,
        )


def _frame(asked: Sequence[Asked]) -> pl.DataFrame:
    """Return the columns of a trace that the recorder joins to its rows, by request number."""
    by_number: Mapping[int, Asked] = {each.number: each for each in asked}
    rows = [by_number.get(number) for number in range(max(by_number) + 1)]
    return pl.DataFrame(
        {
            "slo_class": [None if row is None else row.slo.name for row in rows],
            "session_id": [None] * len(rows),
            "input_tokens": [0 if row is None else row.prompt_tokens for row in rows],
        },
        schema={key: SCHEMA[key] for key in ("slo_class", "session_id", "input_tokens")},
    )


def _blocking_s(real: Decisions, told: Mapping[str, Any]) -> float:
    """Return the longest step while nothing is pressing, as the driver has it."""
    if told.get("blocking_ms") is not None:
        return float(told["blocking_ms"]) / 1e3
    targets = [each["ttft_ms"] / 1e3 for each in told.get("class", {}).values() if each.get("ttft_ms")]
    targets += [each.slo.ttft_s for each in real.asked if each.slo.ttft_s is not None]
    return blocking_s(targets)
