"""Filling a step with prefill chunks in a given order, up to a token budget."""

from __future__ import annotations

from collections.abc import Iterable

from headway.core import EngineView, Phase, RequestState, StepPlan


def fill(view: EngineView, order: Iterable[RequestState]) -> StepPlan:
    """Return a plan that runs every decode and spends the rest of the engine's budget in `order`."""
    ledger = view.ledger
    decodes = len(ledger.decoding) + sum(1 for r in ledger.pending if r.remaining_tokens == 0)
    left = view.max_step_tokens - decodes
    slots = view.max_running - len(ledger.decoding) - ledger.prefilling
    free = view.kv.free_blocks
    chunks: dict[str, int] = {}
    starts: list[str] = []
    for request in order:
        if left <= 0:
            break
        tokens = min(left, request.remaining_tokens)
        if tokens <= 0:
            continue
        if request.phase is Phase.WAITING:
            blocks = view.kv.blocks(request.target_tokens)
            if slots <= 0 or blocks > free:
                slots = 0  # no slot or no memory to start it; those that run already go on, nobody overtakes
                continue
            slots -= 1
            free -= blocks
            starts.append(request.id)
        chunks[request.id] = tokens
        left -= tokens
    return StepPlan(token_budget=max(1, view.max_step_tokens - max(left, 0)), chunks=chunks, starts=tuple(starts))
