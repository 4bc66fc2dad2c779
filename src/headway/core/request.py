"""The state of one request as the decisions see it.

Only `Ledger` changes these objects; policies and admission tests read them. They are not copied into every view:
copying 1,256 of them would cost more than deciding about them.
"""

from __future__ import annotations

import enum
import math

from headway.core.slo import Slo


class Phase(enum.Enum):
    """Where a request is. UNDECIDED has no verdict yet (new or deferred) and is not scheduled."""

    UNDECIDED = enum.auto()
    WAITING = enum.auto()  # accepted, holds nothing
    PREFILL = enum.auto()  # some of its prompt is computed, or is being computed
    DECODE = enum.auto()  # its prompt is computed


class RequestState:
    """One request. Times are seconds on the engine's monotonic clock, lengths are tokens."""

    __slots__ = (
        "arrival_s",
        "booked",
        "bound_s",
        "column",
        "computed_tokens",
        "due_s",
        "fingerprint",
        "first_token_s",
        "follows",
        "id",
        "last_token_s",
        "max_output_tokens",
        "next_due_s",
        "output_tokens",
        "phase",
        "preemptions",
        "priority",
        "promised",
        "prompt_tokens",
        "refusable",
        "seq",
        "slo",
        "target_tokens",
        "tenant",
    )

    def __init__(
        self,
        *,
        id: str,
        seq: int,
        slo: Slo,
        arrival_s: float,
        prompt_tokens: int,
        max_output_tokens: int,
        priority: int = 0,
        cached_tokens: int = 0,
        follows: RequestState | None = None,
        front_s: float = 0.0,
        patience_s: float = 60.0,
        refusable: bool = True,
        tenant: str = "",
        fingerprint: str = "",
    ) -> None:
        self.id = id
        self.seq = seq
        self.slo = slo
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.priority = priority  # vLLM's meaning: smaller is served sooner
        self.computed_tokens = min(cached_tokens, prompt_tokens - 1)
        self.follows = follows  # who computes the part of the prompt that counts as computed; None: it is in the cache
        self.target_tokens = prompt_tokens  # tokens to have computed before the next output token
        self.output_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.refusable = refusable  # whether a refusal would leave as a clean answer
        self.tenant = tenant  # who shares its class; "" when nobody said
        self.fingerprint = fingerprint  # the same when the same request comes again; "" when nobody said
        self.booked = False  # it was refused before, told to come back now, and did
        self.phase = Phase.UNDECIDED
        self.preemptions = 0
        self.promised = False
        self.bound_s: float | None = None  # promised time of the first token
        #: Deadline of the first token. Without a TTFT target it is the end of the patience: a soft deadline that
        #: only serves as aging, so that nothing starves.
        self.due_s = arrival_s + (slo.ttft_s if slo.ttft_s is not None else patience_s) - front_s
        self.next_due_s = math.inf  # deadline of the next output token while decoding
        self.column = -1  # its place in the ledger's columns while decoding

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens still to compute (after a preemption: prompt and outputs again)."""
        return self.target_tokens - self.computed_tokens

    @property
    def remaining_output(self) -> int:
        """Upper bound of the output tokens still to come."""
        return max(0, self.max_output_tokens - self.output_tokens)

    @property
    def reserved_tokens(self) -> int:
        """KV tokens the request can ever hold: prompt + max output."""
        return self.prompt_tokens + self.max_output_tokens

    @property
    def has_target(self) -> bool:
        """Whether its class promises anything for the first token."""
        return self.slo.ttft_s is not None

    def __repr__(self) -> str:
        return (
            f"RequestState({self.id}, {self.phase.name}, {self.slo.name}, due={self.due_s:.3f}, "
            f"prompt={self.computed_tokens}/{self.target_tokens}, out={self.output_tokens}/{self.max_output_tokens})"
        )
