"""Clairvoyant: the response-time test of somebody who knows every answer's true length and every step's mean time.

An upper reference that only a simulator can run: the twin tells it the true output lengths in place of the declared
ones (attribute `clairvoyant`), and no margin is kept for steps that take longer than their mean.
"""

from __future__ import annotations

from dataclasses import replace

from headway.admission.response_time import ResponseTime
from headway.core import EngineView, RequestState, StepCost, Verdict


class Clairvoyant:
    """`response_time` with true output lengths and no envelope.

    Args:
        foresight: as in `response_time`.
    """

    name = "clairvoyant"
    clairvoyant = True

    def __init__(self, *, foresight: float = 1.0) -> None:
        self._test = ResponseTime(foresight=foresight)

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the verdict on the exact view."""
        return self._test.decide(replace(view, cost=StepCost.fixed(view.cost.mean)), request)
