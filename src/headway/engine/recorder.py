"""Step recorder: what was in each engine step and how long it took.

Steps are issued and completed in order. With asynchronous scheduling one is issued while the previous runs, so a
step's time counts from the later of its own issue and the end of the step before; on a busy engine that includes
the engine's own overhead between steps, which requests wait for as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway.core import Step
from headway.engine.step_log import StepLog


class _Flight(NamedTuple):
    issued_s: float
    q: int
    n: int
    K: int
    X: float
    ids: tuple[str, ...]
    planned_s: float
    chunks: Mapping[str, int]


class StepRecorder:
    """Pairs issued and completed steps.

    Args:
        log: file for a step log (step_log.py), appended to; None keeps none.

    Attributes:
        log: the step log, for those who know what else happened.
    """

    def __init__(self, log: str | Path | None = None) -> None:
        self._flights: deque[_Flight] = deque()
        self._ended_s: float | None = None  # end of the last step, None after the engine ran idle
        self.log = StepLog(log) if log else None

    def issued(
        self,
        now_s: float,
        *,
        q: int,
        n: int,
        K: int,
        X: float,
        ids: tuple[str, ...],
        planned_s: float | None = None,
        chunks: Mapping[str, int] | None = None,
    ) -> None:
        """A step was handed to the workers: planned at `planned_s`, with `chunks` of prompt tokens among `ids`."""
        self._flights.append(_Flight(now_s, q, n, K, X, ids, now_s if planned_s is None else planned_s, chunks or {}))

    def completed(self, now_s: float, *, idle: bool) -> tuple[Step, tuple[str, ...]] | None:
        """The oldest step in flight ended; return it with the ids that took part, None when none was in flight."""
        if not self._flights:
            return None
        flight = self._flights.popleft()
        start = flight.issued_s if self._ended_s is None else self._ended_s
        # Between two steps of a busy engine the wait before the issue is its own overhead, not idleness. A step that
        # is still in flight when nothing is left to serve was issued behind this one, so its time starts here too.
        self._ended_s = None if idle and not self._flights else now_s
        step = Step(q=flight.q, n=flight.n, K=flight.K, X=flight.X, seconds=max(now_s - start, 1e-6))
        if self.log is not None:
            if step.q or step.n:
                self.log.step(step, ended_s=now_s, planned_s=flight.planned_s, chunks=flight.chunks, ids=flight.ids)
            if idle:
                self.log.flush()
        return step, flight.ids

    def residual_s(self, now_s: float, predicted_s: float) -> float:
        """Return what the newest step in flight still needs when it is predicted to take `predicted_s`."""
        if not self._flights:
            return 0.0
        start = max(self._flights[-1].issued_s, self._ended_s or 0.0)
        return max(0.0, start + predicted_s - now_s)

    @property
    def in_flight(self) -> Step | None:
        """The newest step in flight, its time unknown (0)."""
        if not self._flights:
            return None
        f = self._flights[-1]
        return Step(q=f.q, n=f.n, K=f.K, X=f.X, seconds=0.0)

    def close(self) -> None:
        """Close the log."""
        if self.log is not None:
            self.log.close()
            self.log = None
