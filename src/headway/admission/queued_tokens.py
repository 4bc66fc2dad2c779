"""Refuse when too many prompt tokens are pending: vLLM's own `--max-num-queued-tokens`.

vLLM documents the limit as target TTFT x prefill throughput. Static, blind to class and deadline, and to the
candidate's own size: whole prompts of everything in prefill are counted, progress is not subtracted.
"""

from __future__ import annotations

from headway.core import Accept, EngineView, Reason, Reject, RequestState, Verdict


class QueuedTokens:
    """Accept while the prompts in prefill hold fewer than `limit` tokens."""

    name = "queued_tokens"

    def __init__(self, *, limit: int = 2048) -> None:
        if limit < 1:
            raise ValueError(f"limit = {limit!r}: expected at least 1")
        self.limit = limit

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return Accept or Reject by the prompt tokens in prefill."""
        _, remaining, computed, _ = view.ledger.columns()
        if remaining.sum() + computed.sum() < self.limit:
            return Accept()
        return Reject(reason=Reason.QUEUE_FULL)
