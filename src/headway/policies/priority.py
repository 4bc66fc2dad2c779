"""Static priorities: the request's own priority, then the weight of its class, then arrival."""

from __future__ import annotations

from headway.core import EngineView, StepPlan
from headway.policies._fill import fill


class Priority:
    """Prefills by (priority, -class weight, sequence number); smaller priority is served sooner, as in vLLM."""

    name = "priority"

    def plan(self, view: EngineView) -> StepPlan:
        """Return the plan that spends the whole budget in priority order."""
        order = sorted(view.ledger.pending, key=lambda r: (r.priority, -r.slo.weight, r.seq))
        return fill(view, order)
