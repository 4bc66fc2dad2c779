"""First come, first served, as stock vLLM does it: the engine's own order, budget and chunks. Changes nothing."""

from __future__ import annotations

from headway.core import EngineView, StepPlan


class Fcfs:
    """The no-op policy: reference and baseline of every comparison."""

    name = "fcfs"

    def plan(self, view: EngineView) -> StepPlan:
        """Return the whole token budget, everything else left to the engine."""
        return StepPlan(token_budget=view.max_step_tokens, open_chunks=True)
