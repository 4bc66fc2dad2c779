"""SOLA: every step serves the less fulfilled of TTFT and TPOT, subject to the other (docs/design.md, section 6).

    p_TTFT = max over pending r of  waiting(r) / TTFT(r)
    p_TPOT = max over decodes r of  mean pace(r) / TPOT(r)

    p_TTFT >= p_TPOT, prefill mode: the largest multiple of `tile` prompt tokens such that every decode stays within
        its pace: t_TPOT(r) + C_step / out(r) <= TPOT(r).
    p_TPOT > p_TTFT, decode mode: the fewest prompt tokens such that every pending r still makes its target when the
        rest is put off by one step: t_TTFT(r) + C_step + C_decode + C_prefill(r) <= TTFT(r).
    Both above 1: the `percentile` of the decodes bounds the step instead of the worst one.

Prefills go by deadline. After Hong et al., SOLA: Optimizing SLO Attainment for LLM Serving with State-aware
Scheduling (MLSys 2025), rewritten from its description; costs are the learned mean, without an envelope.
"""

from __future__ import annotations

import math

from headway.core import EngineView, Phase, RequestState, StepPlan


class Sola:
    """State-aware step size between two constraints.

    Args:
        tile: prompt tokens are given in multiples of this, except the end of a prompt.
        percentile: share of the decodes whose pace bounds the step when both targets are broken.
    """

    name = "sola"

    def __init__(self, *, tile: int = 16, percentile: float = 0.5) -> None:
        if tile < 1:
            raise ValueError(f"tile = {tile!r}: expected at least 1")
        if not 0 < percentile <= 1:
            raise ValueError(f"percentile = {percentile!r}: expected a share in (0, 1]")
        self.tile = tile
        self.percentile = percentile

    def plan(self, view: EngineView) -> StepPlan:
        """Return the plan of the next step."""
        ledger, cost = view.ledger, view.cost.mean
        pending = [r for r in ledger.pending if r.remaining_tokens > 0]
        decodes = len(ledger.decoding) + len(ledger.pending) - len(pending)
        if not pending:
            return StepPlan(token_budget=max(1, decodes), starts=())
        start = view.now_s + view.residual_s
        base = cost.g + cost.b * decodes + cost.k * ledger.context_tokens
        slacks = sorted(r.next_due_s - start for r in ledger.decoding.values())
        waited = (
            max((start - r.arrival_s) / r.slo.ttft_s for r in pending if r.slo.ttft_s)
            if any(r.slo.ttft_s for r in pending)
            else 0.0
        )
        paced = max((self._pace(r, start) for r in ledger.decoding.values()), default=0.0)
        broken = waited > 1.0 and paced > 1.0
        room = self._room(slacks, base, broken=broken)
        if paced > waited and not broken:
            room = min(room, self._least(view, pending, start, base))
        return self._fill(view, pending, decodes, room)

    @staticmethod
    def _pace(request: RequestState, now: float) -> float:
        """Mean pace of a decode if its next token came now, over its target; 0 without one."""
        pace, first = request.slo.pace_s, request.first_token_s
        if first is None or not math.isfinite(pace):
            return 0.0
        return (now - first) / request.output_tokens / pace

    def _room(self, slacks: list[float], base: float, *, broken: bool) -> float:
        """Seconds of prefill work that keep the decodes within their pace; inf without decodes."""
        if not slacks:
            return math.inf
        at = math.ceil((1.0 - self.percentile) * len(slacks)) if broken else 0
        return slacks[min(at, len(slacks) - 1)] - base

    def _least(self, view: EngineView, pending: list[RequestState], start: float, base: float) -> float:
        """Fewest seconds of prefill work now such that nobody who can still be on time is late for being put off."""
        cost = view.cost.mean
        need = backlog = 0.0
        for request in pending:
            work = cost.work_s(request.remaining_tokens, request.computed_tokens)
            backlog += work
            left = request.due_s - start
            if request.has_target and left >= work:
                # One step of `need` and one decode step pass before the rest of the backlog runs.
                need = max(need, min(backlog, backlog + 2.0 * base - left))
        return need

    def _fill(self, view: EngineView, pending: list[RequestState], decodes: int, room: float) -> StepPlan:
        cost = view.cost.mean
        left = view.max_step_tokens - decodes
        slots = view.max_running - decodes - sum(r.phase is Phase.PREFILL for r in pending)
        free = view.kv.free_blocks
        chunks: dict[str, int] = {}
        starts: list[str] = []
        for request in pending:
            whole, context = request.remaining_tokens, request.computed_tokens
            tokens = whole if math.isinf(room) else min(whole, cost.tokens_within(room, context))
            tokens = min(tokens, left)
            if tokens < whole:
                tokens -= tokens % self.tile
            if tokens <= 0:
                # A step without decodes must do something, and so must one that nothing else bounds.
                if chunks or decodes:
                    break
                tokens = min(whole, self.tile, max(left, 1))
            if request.phase is Phase.WAITING:
                blocks = view.kv.blocks(request.target_tokens)
                if slots <= 0 or blocks > free:
                    slots = 0  # the engine would not start it; those that run already go on
                    continue
                slots -= 1
                free -= blocks
                starts.append(request.id)
            chunks[request.id] = tokens
            left -= tokens
            room -= cost.work_s(tokens, context)
        return StepPlan(token_budget=max(1, decodes + sum(chunks.values())), chunks=chunks, starts=tuple(starts))
