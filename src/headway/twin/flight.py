"""An executed step of the twin: on its way, as a listener sees it, and with a measured time instead of a priced one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from headway.core import Step
from headway.twin.batch import Batch
from headway.twin.job import Job


class StepTimes(Protocol):
    """Measured times of steps, in place of price and noise."""

    def __call__(self, now: float, q: int, n: int, K: int, X: float) -> tuple[float, float, float] | None:
        """Return when tokens come out, when the next step is planned, what is learned from; None: it has its price."""
        ...

    def after_refusal(self, now: float) -> float | None:
        """Return when an engine that has just refused somebody plans anew; None: at once."""
        ...


class Issued(NamedTuple):
    """An executed step as a listener sees it; `decoding` holds everybody who decodes, `batch.held` included."""

    number: int
    start_s: float
    end_s: float
    step: Step
    batch: Batch
    decoding: Iterable[Job]


StepListener = Callable[[Issued], None]


class Flight(NamedTuple):
    """The step in flight: what it carries and how long it takes."""

    batch: Batch
    q: int
    n: int
    K: int
    X: float
    seconds: float

    def step(self) -> Step:
        """Return it as the step cost learns from it."""
        return Step(q=self.q, n=self.n, K=self.K, X=self.X, seconds=self.seconds)
