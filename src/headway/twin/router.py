"""Which replica a request goes to. Routers see what a front end can know: queues, not the future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headway.errors import InputError
from headway.twin.engine import Engine
from headway.twin.source import Arrival


def pending_work_s(engine: Engine) -> float:
    """Return the seconds of work that is taken and not done: prefill tokens, and decode tokens to the maximum."""
    cost, ledger = engine.belief.mean, engine.ledger
    _, remaining, context, _ = ledger.columns()
    work = sum(cost.work_s(r, c) for r, c in zip(remaining, context, strict=True))
    fresh = [*(job.state for job in engine.gate.inbox), *ledger.undecided.values()]
    work += sum(cost.work_s(state.remaining_tokens, state.computed_tokens) for state in fresh)
    tokens = sum(state.remaining_output for state in (*ledger.pending, *fresh))
    for job in engine.batcher.decoding.values():
        tokens += max(0, job.state.max_output_tokens - job.out_shift - engine.step)
    return work + cost.b * tokens


def expected_first_token_s(engine: Engine, now: float, arrival: Arrival, due_s: float) -> float:
    """Return when a request that arrives now would get its first token there, served in deadline order."""
    cost, ledger = engine.belief.mean, engine.ledger
    dues, remaining, context, _ = ledger.columns()
    ahead = sum(cost.work_s(r, c) for due, r, c in zip(dues, remaining, context, strict=True) if due <= due_s)
    ahead += sum(cost.work_s(job.state.remaining_tokens, 0) for job in engine.gate.inbox if job.state.due_s <= due_s)
    base = cost.seconds(0, len(engine.batcher.decoding), engine.batcher.context, 0)
    pace = min(ledger.pace_s, arrival.slo.pace_s, engine.blocking_s)
    share = max(1.0 - base / pace, 0.05)  # of a step that prefill may have
    if not engine.batcher.decoding:
        share = 1.0
    work = ahead + cost.work_s(arrival.input_tokens, 0)
    return now + base + work / share + engine.config.front_s


class Router(Protocol):
    """Picks one of several engines. Ties go to the lowest number."""

    name: str

    def pick(self, engines: Sequence[Engine], now: float, arrival: Arrival) -> int:
        """Return the position of the engine that gets `arrival`."""
        ...


class RoundRobin:
    """One after the other."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = -1

    def pick(self, engines: Sequence[Engine], now: float, arrival: Arrival) -> int:
        """Return the next engine in turn."""
        self._turn = (self._turn + 1) % len(engines)
        return self._turn


class LeastWork:
    """The engine with the least pending work: seconds of prefill not computed and of decode not produced."""

    name = "least_work"

    def pick(self, engines: Sequence[Engine], now: float, arrival: Arrival) -> int:
        """Return the engine with the least pending work."""
        return min(range(len(engines)), key=lambda i: (pending_work_s(engines[i]), i))


class Deadline:
    """The engine where the request's first token is expected first among those that keep its deadline.

    Only prefill work with an earlier deadline counts as ahead of it. Among engines that are in time by that estimate
    the one with the least pending work is taken, so that tight requests do not pile up on the quickest one; when none
    is in time, the earliest.
    """

    name = "deadline"

    def pick(self, engines: Sequence[Engine], now: float, arrival: Arrival) -> int:
        """Return the engine with the best chance."""
        due = arrival.time_s + (arrival.slo.ttft_s if arrival.slo.ttft_s is not None else float("inf"))
        finish = [expected_first_token_s(engine, now, arrival, due) for engine in engines]
        in_time = [i for i in range(len(engines)) if finish[i] <= due]
        if in_time:
            return min(in_time, key=lambda i: (pending_work_s(engines[i]), i))
        return min(range(len(engines)), key=lambda i: (finish[i], i))


#: name -> factory.
ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_work": LeastWork,
    "deadline": Deadline,
}


def create(name: str) -> Router:
    """Return a new router; `InputError` for an unknown name."""
    if name not in ROUTERS:
        raise InputError(f"router = {name!r}: expected one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
