"""Refuse when too many requests wait: the valve of most gateways. Blind to size, class and deadline."""

from __future__ import annotations

from headway.core import Accept, EngineView, Phase, Reason, Reject, RequestState, Verdict


class QueueDepth:
    """Accept while fewer than `limit` accepted requests wait for their first step."""

    name = "queue_depth"

    def __init__(self, *, limit: int = 16) -> None:
        if limit < 1:
            raise ValueError(f"limit = {limit!r}: expected at least 1")
        self.limit = limit

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return Accept or Reject by the number of waiting requests."""
        waiting = sum(1 for r in view.ledger.pending if r.phase is Phase.WAITING)
        return Accept() if waiting < self.limit else Reject(reason=Reason.QUEUE_FULL)
