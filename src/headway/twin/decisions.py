"""What an engine decided, step by step: read from its step log, or watched in the twin, and held against each other.

A step log (engine/step_log.py) names who took part in each step with how many prompt tokens, who was refused and why,
and when. `twin/rerun.py` puts the same arrivals before the twin. Two such records are compared here:

    steps     the same requests with the same chunks, and the same decodes; in order up to the first divergence,
              behind it by the longest matching runs, so that one step more or less does not make all others differ
    verdicts  served or refused, and for which reason
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from headway.core import Slo, Step
from headway.errors import InputError
from headway.twin.calibration import parse_line
from headway.twin.flight import Issued

ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """One executed step: when it was planned and ended, what it learned from, who took part."""

    planned_s: float
    ended_s: float
    next_s: float  # when the engine could plan again: on a busy one a little later
    step: Step
    chunks: Mapping[int, int]  # request -> prompt tokens
    decodes: frozenset[int]

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two steps the same."""
        return (tuple(sorted(self.chunks.items())), self.decodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as it reached the engine (`reached_s`) after it had reached the server (`arrival_s`).

    `seen_s` is when the engine next planned a step. Requests of one `fingerprint` are the same, sent again; None: the
    log does not say.
    """

    number: int
    id: str
    reached_s: float
    seen_s: float
    arrival_s: float
    due_s: float
    prompt_tokens: int
    max_output_tokens: int
    cached_tokens: int
    slo: Slo
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What one engine did. Requests by number, times in seconds on one clock.

    Attributes:
        verdicts: request -> `accepted` or the reason of its refusal. Without one: cut off before any.
        output: request -> output tokens it had at its end.
        refusals: when somebody was refused, in order.
        about: what the engine said of itself when it started.
    """

    steps: Sequence[StepTaken]
    verdicts: Mapping[int, str]
    asked: Sequence[Asked] = ()
    output: Mapping[int, int] = field(default_factory=dict)
    refusals: Sequence[float] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def between(self, start_s: float, end_s: float, numbers: Collection[int]) -> Decisions:
        """Return the part of it that was planned in a window, and the verdicts of these requests."""
        return Decisions(
            steps=[each for each in self.steps if start_s <= each.planned_s < end_s],
            verdicts={number: verdict for number, verdict in self.verdicts.items() if number in numbers},
            asked=[each for each in self.asked if each.number in numbers],
            output=self.output,
            about=self.about,
        )

    def tokens(self) -> dict[int, tuple[float, float, int]]:
        """Return request -> end of the step of its first token, of its last one, and number of tokens."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        count: dict[int, int] = {}
        for each in self.steps:
            for number in each.chunks:
                if not count.get(number):  # the last chunk before the first decode brings the first token
                    first[number] = last[number] = each.ended_s
            for number in each.decodes:
                if number in first:
                    count[number] = count.get(number, 0) + 1
                    last[number] = each.ended_s
        return {number: (first[number], last[number], count.get(number, 0) + 1) for number in first}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two records agree, `first` of them the reference.

    Attributes:
        steps: steps of the reference.
        same: of these, with the same requests and chunks as one of the other record, in the same order.
        same_until: steps before the first divergence.
        divergence: the first one in words, None when there is none.
        verdicts: requests with a verdict in both; same_verdicts: of these, with the same.
        differing: request -> (verdict of the reference, of the other).
    """

    steps: int
    same: int
    same_until: int
    divergence: str | None
    verdicts: int
    same_verdicts: int
    differing: Mapping[int, tuple[str, str]]

    def as_dict(self) -> dict[str, Any]:
        """Return the serialised form."""
        return {
            "steps": self.steps,
            "same_steps": self.same,
            "same_steps_share": round(self.same / self.steps, 4) if self.steps else None,
            "steps_before_first_divergence": self.same_until,
            "first_divergence": self.divergence,
            "verdicts": self.verdicts,
            "same_verdicts": self.same_verdicts,
            "same_verdicts_share": round(self.same_verdicts / self.verdicts, 4) if self.verdicts else None,
            "differing_verdicts": {str(number): list(pair) for number, pair in self.differing.items()},
        }


class Watch:
    """Takes the steps of a twin (`on_step` of `simulate`); `decisions` gives the record."""

    def __init__(self) -> None:
        self._steps: list[StepTaken] = []

    def __call__(self, issued: Issued) -> None:
        """One step was issued."""
        held = {job.row for job in issued.batch.held}
        self._steps.append(
            StepTaken(
                planned_s=issued.start_s,
                ended_s=issued.end_s,
                next_s=issued.end_s,
                step=issued.step,
                chunks={chunk.job.row: chunk.tokens for chunk in issued.batch.chunks},
                decodes=frozenset(job.row for job in issued.decoding if job.row not in held),
            )
        )

    def decisions(self, frame: pl.DataFrame) -> Decisions:
        """Return the record of a finished simulation; `frame` is its table of requests."""
        verdicts = {
            row: ACCEPTED if status == "ok" else str(reason)
            for row, status, reason in frame.select("index", "status", "reason").iter_rows()
            if status != "cut_off"
        }
        return Decisions(steps=tuple(self._steps), verdicts=verdicts)


def compare(first: Decisions, second: Decisions) -> Agreement:
    """Return how far `second` agrees with `first`."""
    one, two = [each.key for each in first.steps], [each.key for each in second.steps]
    until = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    rest = difflib.SequenceMatcher(None, one[until:], two[until:], autojunk=False)
    same = until + sum(block.size for block in rest.get_matching_blocks())
    both = first.verdicts.keys() & second.verdicts.keys()
    differing = {
        number: (first.verdicts[number], second.verdicts[number])
        for number in sorted(both)
        if first.verdicts[number] != second.verdicts[number]
    }
    return Agreement(
        steps=len(one),
        same=same,
        same_until=until,
        divergence=_why(first, second, until),
        verdicts=len(both),
        same_verdicts=len(both) - len(differing),
        differing=differing,
    )


def _why(first: Decisions, second: Decisions, at: int) -> str | None:
    """Return what differs in step `at`, in words."""
    if at >= len(first.steps) and at >= len(second.steps):
        return None
    if at >= len(first.steps) or at >= len(second.steps):
        more, less = ("second", "first") if at >= len(first.steps) else ("first", "second")
        return f"step {at}: the {less} record ends here, the {more} goes on"
    one, two = first.steps[at], second.steps[at]
    found = []
    for number in sorted(one.chunks.keys() ^ two.chunks.keys()):
        here, there = ("first", second) if number in one.chunks else ("second", first)
        tokens = one.chunks.get(number) or two.chunks.get(number)
        verdict = there.verdicts.get(number, ACCEPTED)
        why = "" if verdict == ACCEPTED else f", the other one refused it ({verdict})"
        found.append(f"request {number} gets {tokens} prompt tokens in the {here} only{why}")
    found += [
        f"request {number} gets {one.chunks[number]} prompt tokens in the first, {two.chunks[number]} in the second"
        for number in sorted(one.chunks.keys() & two.chunks.keys())
        if one.chunks[number] != two.chunks[number]
    ]
    for number in sorted(one.decodes ^ two.decodes):
        found.append(f"request {number} decodes in the {'first' if number in one.decodes else 'second'} only")
    late = two.planned_s - one.planned_s
    return f"step {at}, planned at {one.planned_s:.3f} s ({late * 1e3:+.1f} ms in the second): {'; '.join(found)}"


# Reading a step log


def read(path: Path) -> Decisions:
    """Return the decisions in a step log, of its last start.

    Raises:
        InputError: the file cannot be read or is no step log with decisions.
    """
    about: dict[str, Any] | None = None
    steps: list[StepTaken] = []
    asked: dict[int, Asked] = {}
    verdicts: dict[int, str] = {}
    output: dict[int, int] = {}
    refusals: list[float] = []
    live: set[int] = set()
    rested = True  # the engine had nothing to do at some time since the last step
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                entry = parse_line(path, line, raw)
                event = entry.get("event")
                try:
                    if event == "started":
                        about = entry
                        steps, asked, verdicts, output = [], {}, {}, {}
                        refusals.clear()
                        live.clear()
                    elif event == "arrived":
                        asked[entry["r"]] = _asked(entry)
                        live.add(entry["r"])
                    elif event == "refused":
                        verdicts[entry["r"]] = str(entry["reason"])
                        refusals.append(float(entry["t_s"]))
                        live.discard(entry["r"])
                    elif event == "finished":
                        output[entry["r"]] = int(entry["output_tokens"])
                        live.discard(entry["r"])
                    elif event is None:
                        step = _step(entry)
                        if steps and not rested:
                            # Between the steps of a busy engine nothing can be decided, unless it refused somebody.
                            looks = [step.planned_s, *refusals[bisect.bisect_left(refusals, steps[-1].ended_s) :]]
                            steps[-1] = replace(steps[-1], next_s=max(min(looks), steps[-1].ended_s))
                        steps.append(step)
                        rested = False
                    rested = rested or not live
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(f"{path}:{line}: not a line of a step log with decisions: {error!r}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if about is None or not steps:
        raise InputError(f"{path}: no start of an engine and steps after it: expected a step log (HEADWAY_STEP_LOG)")
    for each in steps:
        for number in each.chunks:
            verdicts.setdefault(number, ACCEPTED)
    looks = sorted({*(each.planned_s for each in steps), *refusals})

    def seen(request: Asked) -> Asked:
        at = bisect.bisect_left(looks, request.reached_s)
        return replace(request, seen_s=looks[at]) if at < len(looks) else request

    return Decisions(
        steps=tuple(steps),
        verdicts=verdicts,
        asked=tuple(seen(request) for request in asked.values()),
        output=output,
        refusals=tuple(refusals),
        about=about,
    )


def _step(entry: Mapping[str, Any]) -> StepTaken:
    step = Step(
        q=int(entry["q"]),
        n=int(entry["n"]),
        K=int(entry["K"]),
        X=float(entry["X"]),
        seconds=float(entry["seconds"]),
    )
    return StepTaken(
        planned_s=float(entry["planned_s"]),
        ended_s=float(entry["t_s"]),
        next_s=float(entry["t_s"]),
        step=step,
        chunks={int(number): int(tokens) for number, tokens in entry["chunks"].items()},
        decodes=frozenset(entry["decodes"]),
    )


def _asked(entry: Mapping[str, Any]) -> Asked:
    slo = Slo(
        name=entry["class"],
        ttft_s=entry.get("ttft_s"),
        tpot_s=entry.get("tpot_s"),
        tbt_s=entry.get("tbt_s"),
        weight=entry["weight"],
        on_miss=entry["on_miss"],
    )
    return Asked(
        number=entry["r"],
        id=entry["id"],
        reached_s=entry["t_s"],
        seen_s=entry["t_s"],
        arrival_s=entry["arrival_s"],
        due_s=entry["due_s"],
        prompt_tokens=entry["prompt_tokens"],
        max_output_tokens=entry["max_output_tokens"],
        cached_tokens=entry["cached_tokens"],
        slo=slo,
        fingerprint=entry.get("same"),
    )
