"""Chronos' closed form: a response-time bound from a mean rate of admitted work.

    WCRT <= rho D / (1 - rho) + C        rho: share of time that work admitted in the last `window_s` takes
                                         D: the request's relative deadline, C: its own time alone

Accept iff WCRT <= D, that is, rho <= (D - C) / (2 D - C). At equal misses a step-by-step walk admits more: the form
has to assume that all admitted work of a deadline's length may stand before the request, and cannot look at what
really does. Reference for `response_time`.
"""

from __future__ import annotations

from collections import deque

from headway.core import Accept, EngineView, Reason, Reject, RequestState, Verdict


class Chronos:
    """The closed form over admitted work, in engine time at its envelope.

    The engine time of a request is that of its prefill at the rate at which steps carry prefill beside today's
    decodes: its prefill work times pace / (pace - decode part of a step). Stateful: it remembers what it admitted.

    Args:
        window_s: time over which the admitted work is averaged.
    """

    name = "chronos"

    def __init__(self, *, window_s: float = 10.0) -> None:
        if not window_s > 0:
            raise ValueError(f"window_s = {window_s!r}: expected seconds above 0")
        self.window_s = window_s
        self._admitted: deque[tuple[float, float]] = deque()  # (time, engine seconds)
        self._sum = 0.0

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return Accept with the closed form as its bound, or Reject."""
        now = view.now_s
        tokens = request.reserved_tokens
        kv, ledger = view.kv, view.ledger
        if request.prompt_tokens >= view.max_model_len or kv.blocks(tokens) > kv.total_blocks:
            return Reject(reason=Reason.NEVER_FITS)
        served = len(ledger.pending) + len(ledger.decoding)
        if kv.blocks(ledger.reserved_tokens + tokens) + served + 1 > kv.total_blocks or served >= view.max_running:
            return Reject(reason=Reason.KV)
        if not request.has_target:
            return Accept()
        while self._admitted and self._admitted[0][0] < now - self.window_s:
            self._sum -= self._admitted.popleft()[1]
        own = self._engine_s(view, request)
        if own is None:
            return Reject(reason=Reason.TBT)
        deadline = request.due_s - request.arrival_s
        rho = max(self._sum, 0.0) / self.window_s
        bound = rho * deadline / (1.0 - rho) + own if rho < 1.0 else float("inf")
        waited = now + view.residual_s - request.arrival_s
        if bound > deadline - waited:
            return Reject(reason=Reason.TTFT, bound_s=now + bound)
        self._admitted.append((now, own))
        self._sum += own
        return Accept(bound_s=now + bound)

    @staticmethod
    def _engine_s(view: EngineView, request: RequestState) -> float | None:
        """Return the engine time of the prefill beside today's decodes, None when steps have no room for any."""
        cost, ledger, factor = view.cost.mean, view.ledger, view.cost.factor
        pace = min(ledger.pace_s, request.slo.pace_s, view.blocking_s)
        base = factor * cost.seconds(0, len(ledger.decoding) + len(ledger.pending) + 1, ledger.reserved_tokens, 0)
        if base >= pace:
            return None
        work = factor * cost.work_s(request.remaining_tokens, request.computed_tokens)
        steps = max(1, -(-work // (pace - base)))
        return steps * pace
