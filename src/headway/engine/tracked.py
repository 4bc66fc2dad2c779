"""What is measured of one request beside its state, and what that says at its end."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core import RequestState, Slo
from headway.engine.report import Outcome


@dataclass(slots=True)
class Tracked:
    """One live request. Times in seconds on the engine's clock."""

    state: RequestState
    slo: Slo  # the targets that were asked for, even when it is served as best effort
    group: str
    client: int
    front_s: float
    prefill_compute_s: float = 0.0
    decode_compute_s: float = 0.0
    tbt_max_s: float = 0.0

    @property
    def queue_s(self) -> float | None:
        """Time before the first token in no engine step, None before it."""
        first = self.state.first_token_s
        return None if first is None else max(0.0, first - self.state.arrival_s - self.prefill_compute_s)

    def bound_s(self, at_s: float | None) -> float | None:
        """Return a first-token time of the engine's clock as time from arrival to the client."""
        return None if at_s is None else at_s + self.front_s - self.state.arrival_s

    def outcome(self, *, aborted: bool, failed: bool) -> Outcome:
        """Return what the request got; a target that was never reached is not among the missed ones.

        A client that gives up after a target was missed does not undo the miss; before a token nobody else ends one.
        """
        state, slo = self.state, self.slo
        ttft = tpot = decode_queue = None
        missed: list[str] = []
        first, last = state.first_token_s, state.last_token_s
        if first is not None and last is not None:
            ttft = first - state.arrival_s + self.front_s
            decode_queue = max(0.0, last - first - self.decode_compute_s)
            if state.output_tokens > 1:
                tpot = (last - first) / (state.output_tokens - 1)
            if slo.ttft_s is not None and ttft > slo.ttft_s:
                missed.append("ttft")
            if slo.tpot_s is not None and tpot is not None and tpot > slo.tpot_s:
                missed.append("tpot")
            if slo.tbt_s is not None and self.tbt_max_s > slo.tbt_s:
                missed.append("tbt")
        return Outcome(
            group=self.group,
            slo=slo,
            promised=state.promised,
            aborted=not failed and not missed and (aborted or first is None),
            failed=failed,
            missed=tuple(missed),
            prompt_tokens=state.prompt_tokens,
            output_tokens=state.output_tokens,
            ttft_s=ttft,
            tpot_s=tpot,
            tbt_max_s=self.tbt_max_s if state.output_tokens > 1 else None,
            prefill_queue_s=self.queue_s,
            prefill_compute_s=self.prefill_compute_s,
            decode_queue_s=decode_queue,
            decode_compute_s=self.decode_compute_s,
            preemptions=state.preemptions,
        )
