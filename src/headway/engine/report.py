"""What the engine side reports: verdicts, first tokens, outcomes and gauges, as plain messages for the HTTP side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from headway.core import Reason, Slo, Step
from headway.core.envelope import Drift

#: Messages of one kind of event; plain values only, so that any transport can carry them.
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A served request at its end. Seconds; None where a point was never reached."""

    group: str
    slo: Slo
    promised: bool
    aborted: bool  # its client gave it up before a target was missed
    failed: bool  # the engine gave it up
    missed: tuple[str, ...]  # of "ttft", "tpot", "tbt"
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    tbt_max_s: float | None
    prefill_queue_s: float | None
    prefill_compute_s: float
    decode_queue_s: float | None
    decode_compute_s: float
    preemptions: int


class Report:
    """Collects messages by client (API process) until they are taken."""

    def __init__(self) -> None:
        self._messages: dict[int, list[Message]] = {}
        self._decisions: list[float] = []
        self._steps = 0
        self._busy_s = 0.0
        self._token_budget: float | None = None
        self._failures = 0

    def accepted(self, client: int, group: str, *, bound_s: float | None) -> None:
        """A request is served, with the promised time to its first token."""
        self._put(client, {"kind": "accepted", "group": group, "bound_s": bound_s})

    def refused(
        self,
        client: int,
        group: str,
        *,
        reason: Reason,
        slo: Slo,
        prompt_tokens: int,
        detail: str | None,
        bound_s: float | None,
        pace_bound_s: float | None = None,
        retry_after_s: float | None,
    ) -> None:
        """A request is refused, with the numbers of the error body.

        `bound_s`: time to the first token that could have been promised; `pace_bound_s`: longest gap, likewise.
        """
        self._put(
            client,
            {
                "kind": "refused",
                "group": group,
                "reason": str(reason),
                "slo_class": slo.name,
                "ttft_target_s": slo.ttft_s,
                "tpot_target_s": slo.tpot_s,
                "tbt_target_s": slo.tbt_s,
                "prompt_tokens": prompt_tokens,
                "detail": detail,
                "bound_s": bound_s,
                "pace_bound_s": pace_bound_s,
                "retry_after_s": retry_after_s,
            },
        )

    def first_token(self, client: int, group: str, *, queue_s: float, since_arrival_s: float) -> None:
        """The first token came, `since_arrival_s` after the request, `queue_s` of it in no engine step."""
        self._put(
            client,
            {"kind": "first_token", "group": group, "queue_s": queue_s, "since_arrival_s": since_arrival_s},
        )

    def done(self, client: int, outcome: Outcome) -> None:
        """A served request ended."""
        slo = outcome.slo
        self._put(
            client,
            {
                "kind": "done",
                "group": outcome.group,
                "slo_class": slo.name,
                "ttft_target_s": slo.ttft_s,
                "tpot_target_s": slo.tpot_s,
                "tbt_target_s": slo.tbt_s,
                "promised": outcome.promised,
                "aborted": outcome.aborted,
                "failed": outcome.failed,
                "missed": list(outcome.missed),
                "prompt_tokens": outcome.prompt_tokens,
                "output_tokens": outcome.output_tokens,
                "ttft_s": outcome.ttft_s,
                "tpot_s": outcome.tpot_s,
                "tbt_max_s": outcome.tbt_max_s,
                "prefill_queue_s": outcome.prefill_queue_s,
                "prefill_compute_s": outcome.prefill_compute_s,
                "decode_queue_s": outcome.decode_queue_s,
                "decode_compute_s": outcome.decode_compute_s,
                "preemptions": outcome.preemptions,
            },
        )

    def preempted(self, request_id: str, lost_tokens: int, promised: bool) -> None:
        """A running request lost its KV."""
        self._put(0, {"kind": "preempted", "request": request_id, "lost_tokens": lost_tokens, "promised": promised})

    def decision(self, seconds: float, token_budget: int) -> None:
        """One call of plan and admission took `seconds` and set this token budget."""
        self._decisions.append(seconds)
        self._token_budget = float(token_budget)

    def drift(self, drift: Drift) -> None:
        """The exceedance of the envelope left its band, and promises are made with a wider one, or it is back."""
        state = "tightened" if drift.tightened else "recovered"
        fields = {k: v for k, v in dataclasses.asdict(drift).items() if k != "tightened"}
        self._put(0, {"kind": "drift", "state": state, **fields})

    def step(self, step: Step) -> None:
        """A step ended."""
        self._steps += 1
        self._busy_s += step.seconds

    def failed_open(self) -> None:
        """A decision raised and the step ran without it."""
        self._failures += 1

    def take(self, gauges: dict[str, float] | None) -> dict[int, list[Message]]:
        """Return and forget the messages by client; with `gauges`, an engine message for client 0 goes along."""
        if gauges is not None:
            self._put(
                0,
                {
                    "kind": "engine",
                    **gauges,
                    "steps": self._steps,
                    "busy_s": self._busy_s,
                    "token_budget": self._token_budget,
                    "decisions_s": self._decisions,
                    "failures": self._failures,
                },
            )
            self._decisions, self._steps, self._busy_s, self._failures = [], 0, 0.0, 0
        messages, self._messages = self._messages, {}
        return messages

    def _put(self, client: int, message: Message) -> None:
        self._messages.setdefault(client, []).append(message)

    def __bool__(self) -> bool:
        return bool(self._messages)
