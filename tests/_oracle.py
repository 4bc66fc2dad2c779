"""A brute-force scheduler for small cases: does ANY schedule keep every promise, the candidate's included?

It enumerates how many tokens each pending prefill gets in each step (in units of `unit` tokens) and which decodes skip
the step, with every step at its envelope. It knows nothing of walks, bounds, policies or deadlines first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headway.core import EngineView, RequestState

#: Steps that are tried before the search gives up.
NODES = 20_000


@dataclass(frozen=True, slots=True)
class Work:
    """One request: what is left of it and when its next token is due."""

    remaining: int  # prompt tokens; 0: decodes
    computed: int
    left: int  # output tokens to come
    due: float  # deadline of the next token
    tpot: float
    tbt: float

    def after_token(self, now: float) -> Work:
        """Return it after a token at `now`; paces run on from the deadline of a pace or from the token."""
        first = self.remaining > 0
        banked = (now if first else self._anchor) + self.tpot
        due = min(banked, now + self.tbt)
        return Work(0, self.computed + self.remaining + 1, self.left - 1, due, self.tpot, self.tbt)

    @property
    def _anchor(self) -> float:
        # With a banked pace, the deadline of token m + 1 is one pace after that of token m.
        return self.due if math.isfinite(self.tpot) else math.inf


class Oracle:
    """Feasibility by enumeration. `nodes` counts the steps that were tried."""

    def __init__(self, view: EngineView, *, unit: int) -> None:
        self.cost, self.factor = view.cost.mean, view.cost.factor
        self.budget = view.max_step_tokens
        self.unit = unit
        self.nodes = 0

    def feasible(self, now: float, works: Iterable[Work]) -> bool | None:
        """Whether every promise can be kept from `now` on; None when the search was given up."""
        self.nodes = 0
        found = self._search(now, tuple(works))
        return None if not found and self.nodes > NODES else found

    def _search(self, now: float, works: tuple[Work, ...]) -> bool:
        works = tuple(work for work in works if work.left)
        if not works:
            return True
        if any(work.due < now for work in works):
            return False
        for granted, running in self._steps(works):
            self.nodes += 1
            if self.nodes > NODES:
                return False
            after = self._run(now, works, granted, running)
            if after is not None and self._search(*after):
                return True
        return False

    def _steps(self, works: tuple[Work, ...]) -> Iterator[tuple[tuple[int, ...], tuple[bool, ...]]]:
        """Every step: tokens of each prefill, large ones first, and which decodes run, all of them first."""
        tokens = [range(-(-w.remaining // self.unit), -1, -1) if w.remaining else range(1) for w in works]
        decodes = [(False,) if w.remaining else (True, False) for w in works]
        for running in itertools.product(*decodes):
            for units in itertools.product(*tokens):
                granted = tuple(min(u * self.unit, w.remaining) for u, w in zip(units, works, strict=True))
                if 0 < sum(granted) + sum(running) <= self.budget:
                    yield granted, running

    def _run(
        self, now: float, works: tuple[Work, ...], granted: tuple[int, ...], running: tuple[bool, ...]
    ) -> tuple[float, tuple[Work, ...]] | None:
        """Execute a step at its envelope; None when a token comes late."""
        K = sum(w.computed for w, runs in zip(works, running, strict=True) if runs)
        X = sum(q * (w.computed + q / 2) for q, w in zip(granted, works, strict=True))
        end = now + self.factor * self.cost.seconds(sum(granted), sum(running), K, X)
        out = []
        for work, q, runs in zip(works, granted, running, strict=True):
            if runs or (q and q == work.remaining):
                if end > work.due + 1e-9:
                    return None
                out.append(work.after_token(end))
            else:
                out.append(Work(work.remaining - q, work.computed + q, work.left, work.due, work.tpot, work.tbt))
        return end, tuple(out)


def works(requests: Iterable[RequestState]) -> list[Work]:
    """Return what is left of accepted requests (and of a candidate)."""
    out = []
    for r in requests:
        tpot, tbt = r.slo.tpot_s or math.inf, r.slo.tbt_s or math.inf
        decoding = r.first_token_s is not None
        due = r.next_due_s if decoding else r.due_s
        computed = r.target_tokens + r.output_tokens if decoding else r.computed_tokens
        out.append(Work(0 if decoding else r.remaining_tokens, computed, r.remaining_output, due, tpot, tbt))
    return out
