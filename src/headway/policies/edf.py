"""Earliest deadline first: prefills by the deadline of their first token, the engine's whole budget.

Optimal on one preemptible resource when everything can be met (Liu and Layland 1973), and the first to miss
everything when not: a reference that shows what step sizing and admission add.
"""

from __future__ import annotations

from headway.core import EngineView, StepPlan
from headway.policies._fill import fill


class Edf:
    """Prefills by (deadline, sequence number)."""

    name = "edf"

    def plan(self, view: EngineView) -> StepPlan:
        """Return the plan that spends the whole budget in deadline order."""
        return fill(view, view.ledger.pending)
