"""Token bucket: refuse when the prompt tokens of the last while exceed a fixed rate. Blind to state and deadline.

The limiter of most gateways. `rate` can be set to the volume that another test admitted, which makes it the fair
opponent: the same work, chosen without looking.
"""

from __future__ import annotations

from headway.core import Accept, EngineView, Reason, Reject, RequestState, Verdict


class TokenBucket:
    """Accept while the bucket holds the request's prompt tokens; it fills at `rate` tokens a second up to `burst`.

    Stateful, unlike the other tests: it counts what it accepted. A prompt larger than the bucket is accepted when the
    bucket is full, and leaves it in debt.
    """

    name = "token_bucket"

    def __init__(self, *, rate: float = 500.0, burst: float = 2000.0) -> None:
        for key, value in (("rate", rate), ("burst", burst)):
            if not value > 0:
                raise ValueError(f"{key} = {value!r}: expected tokens above 0")
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at_s: float | None = None

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return Accept or Reject by the level of the bucket now."""
        elapsed = 0.0 if self._at_s is None else max(0.0, view.now_s - self._at_s)
        self._at_s = view.now_s
        self._level = min(self.burst, self._level + self.rate * elapsed)
        need = min(request.prompt_tokens, self.burst)
        if self._level < need:
            return Reject(reason=Reason.QUEUE_FULL, retry_after_s=(need - self._level) / self.rate)
        self._level -= request.prompt_tokens
        return Accept()
