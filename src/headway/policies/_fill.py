"""Filling a step with prefill chunks in a given order, up to a token budget."""

from __future__ import annotations

from collections.abc import Iterable

from headway.core import EngineView, Phase, RequestState, StepPlan


def fill(view: EngineView, order: Iterable[RequestState]) -> StepPlan:
    """Return a plan that runs every decode and spends the rest of the engine's budget in `order`."""
    ledger = view.ledger
    decodes = len(ledger.decoding) + sum(1 for r in ledger.pending if r.remaining_tokens == 0)
    left = view.max_step_tokens - decodes
    slots = view.max_running - len(ledger.decoding)
    chunks: dict[str, int] = {}
    starts: list[str] = []
    for request in order:
        if left <= 0 or slots <= 0:
            break
        slots -= 1
        tokens = min(left, request.remaining_tokens)
        if tokens <= 0:
            continue
        chunks[request.id] = tokens
        left -= tokens
        if request.phase is Phase.WAITING:
            starts.append(request.id)
    return StepPlan(token_budget=max(1, view.max_step_tokens - max(left, 0)), chunks=chunks, starts=tuple(starts))
