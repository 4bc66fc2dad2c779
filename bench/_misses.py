"""Why accepted requests missed: each miss of a replay beside what the server's step log recorded in its life.

The step log holds every step; the learned step cost is run over it again, so that for each step it is known whether it
exceeded the envelope that promises were made with. A miss is explained by

    envelope  at least one step of its life exceeded its envelope, or ended a stretch of steps that exceeded its own
    host      the engine kept the promise: what came too late lay outside it (the client was late, the server's
              event loops or the socket stood still for longer than the front that promises leave room for)

Client and engine read the same clock (CLOCK_MONOTONIC), so times of both can be compared.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from headway.core import CostCoefficients, StepCost
from headway.replay.store import Run
from headway.twin.decisions import Asked, Decisions, read

#: Most seconds between the send of a request and its arrival at the server for the two to be the same one.
MATCH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """One accepted request that broke a target. `late_s`: by how much, as the client saw it.

    Attributes:
        steps: engine steps between its arrival and its last token (TTFT: first token).
        exceeded: of these, steps over their envelope, and by how many seconds in sum.
        stretches: of these, steps that ended a stretch over its envelope, and by how many seconds at most.
        outside_s: client's latency less the engine's: TTFT counted from the schedule against arrival to step end.
        front_s: of that, what the promise left room for.
        cause: "envelope", "host", or "unexplained".
    """

    run: str
    index: int
    target: str
    late_s: float
    steps: int = 0
    exceeded: int = 0
    excess_s: float = 0.0
    stretches: int = 0
    stretch_s: float = 0.0
    outside_s: float | None = None
    front_s: float | None = None
    cause: str = "unexplained"

    def as_dict(self) -> dict[str, Any]:
        """Return the serialised form, seconds rounded to 0.1 ms."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


class Record:
    """The step log of one server, with the envelope of each step."""

    def __init__(self, path: Path, *, eps: float) -> None:
        self.decisions = read(path)
        self.over_s, self.stretch_s = envelope_excess(self.decisions, eps=eps)
        self._tokens = self.decisions.tokens()
        self._ends = [step.ended_s for step in self.decisions.steps]
        self._asked: dict[tuple[int, int], list[Asked]] = {}
        for each in self.decisions.asked:
            self._asked.setdefault((each.prompt_tokens, each.max_output_tokens), []).append(each)

    @property
    def exceedance(self) -> float:
        """Share of all steps that exceeded their envelope."""
        return sum(over > 0 for over in self.over_s) / max(len(self.over_s), 1)

    @property
    def stretch_exceedance(self) -> float:
        """Share of all steps that ended a stretch over its envelope."""
        return sum(over > 0 for over in self.stretch_s) / max(len(self.stretch_s), 1)

    def find(self, sent_s: float, prompt_tokens: int, max_tokens: int) -> Asked | None:
        """Return the request of these lengths that reached the server closest to `sent_s`."""
        found = self._asked.get((prompt_tokens, max_tokens), [])
        best = min(found, key=lambda each: abs(each.arrival_s - sent_s), default=None)
        return best if best is not None and abs(best.arrival_s - sent_s) <= MATCH_S else None

    def explain(self, run: Run) -> list[Miss]:
        """Return every miss among the accepted requests of a run with its cause."""
        zero = float(run.meta["clock"]["zero_s"])
        missed = run.frame.filter(~pl.col("attained") & (pl.col("status") == "ok"))
        return [self._explain(run.path.name, row, zero) for row in missed.iter_rows(named=True)]

    def _explain(self, run: str, row: Mapping[str, Any], zero: float) -> Miss:
        target = next(
            key
            for key, measured in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("tbt", "tbt_max_s"))
            if row[f"{key}_target_s"] is not None and row[measured] > row[f"{key}_target_s"]
        )
        measured = row["tbt_max_s" if target == "tbt" else f"{target}_s"]
        late = measured - row[f"{target}_target_s"]
        plain = Miss(run=run, index=row["index"], target=target, late_s=late)
        asked = self.find(zero + row["sent_s"], row["prompt_tokens"], row["max_tokens"])
        if asked is None or asked.number not in self._tokens:
            return plain
        first, last, count = self._tokens[asked.number]
        life = slice(
            bisect.bisect_left(self._ends, asked.arrival_s),
            bisect.bisect_right(self._ends, first if target == "ttft" else last),
        )
        over, long = ([each for each in all_[life] if each > 0] for all_ in (self.over_s, self.stretch_s))
        if target == "ttft":
            kept = first <= asked.due_s
            outside = row["ttft_s"] - (first - asked.arrival_s)
            front = asked.arrival_s + (asked.slo.ttft_s or 0.0) - asked.due_s
        else:
            kept = count > 1 and target == "tpot" and (last - first) / (count - 1) <= row["tpot_target_s"]
            outside = front = None
        cause = "host" if kept else "envelope" if over or long else "unexplained"
        return Miss(
            run=run,
            index=row["index"],
            target=target,
            late_s=late,
            steps=len(self._ends[life]),
            exceeded=len(over),
            excess_s=sum(over),
            stretches=len(long),
            stretch_s=max(long, default=0.0),
            outside_s=outside,
            front_s=front,
            cause=cause,
        )


def envelope_excess(decisions: Decisions, *, eps: float) -> tuple[Sequence[float], Sequence[float]]:
    """Return by how many seconds each step exceeded its envelope (negative: not), and a stretch that ended with it.

    The step cost learns from the same steps in the same order as in the engine, from the same start.
    """
    prior = decisions.about.get("cost")
    cost = StepCost(CostCoefficients(**prior) if prior else None, eps=eps)
    found, stretches = [], []
    for each in decisions.steps:
        step = each.step
        if not (step.q or step.n):
            found.append(-1.0)
            stretches.append(0.0)
            continue
        found.append(step.seconds - cost.envelope(step.q, step.n, step.K, step.X))
        cost.observe(step)
        stretches.append(cost.stretches.over_s)
    return found, stretches
