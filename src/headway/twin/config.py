"""Settings of a simulated engine, by vLLM's names where vLLM has one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine.

    Attributes:
        token_budget: most tokens of a step (vLLM: max_num_batched_tokens).
        max_running: most running requests (vLLM: max_num_seqs).
        max_model_len: longest prompt + answer, tokens.
        block_size: tokens of a KV block.
        kv_blocks: blocks of the KV pool.
        prefix_cache: keep freed blocks and find them again by the prefix ids of the trace.
        async_lag: plan a step while the one before it runs (vLLM: async_scheduling).
        max_queued_tokens: vLLM's own valve (max_num_queued_tokens): refuse on arrival when the prompts in prefill
            hold that many tokens already; None: no valve.
        blocking_s: longest step that a policy may plan while nothing is pressing; None: a quarter of the tightest
            TTFT target.
        front_s: time outside the engine (tokenise, IPC, detokenise), added to every token a client sees.
        patience_s: soft deadline of a request without a TTFT target, so that it is not starved.
        output_cap: answers are declared to be at most this long (at least their true length); None: the true length
            is declared, as a replay does that asks for it.
        learn: let the decisions learn the step cost online, starting from the profile; otherwise they know the
            profile's coefficients and its envelope.
        bookings: keep room for whoever a refusal told when to come back, as the engine does; nobody of a trace comes
            back, so it stops once that is known.
        eps: share of steps that may exceed the envelope.
        fast: skip steps in which nothing is decided. Same results, or it is a bug.
    """

    token_budget: int = 2048
    max_running: int = 256
    max_model_len: int = 4096
    block_size: int = 16
    kv_blocks: int = 4096
    prefix_cache: bool = False
    async_lag: bool = False
    max_queued_tokens: int | None = None
    blocking_s: float | None = None
    front_s: float = 0.0
    patience_s: float = 60.0
    output_cap: int | None = None
    learn: bool = True
    bookings: bool = False
    eps: float = 0.05
    fast: bool = True

    def __post_init__(self) -> None:
        for key in ("token_budget", "max_running", "max_model_len", "block_size", "kv_blocks"):
            if getattr(self, key) < 1:
                raise InputError(f"{key} = {getattr(self, key)!r}: expected a whole number of at least 1")
        for key in ("max_queued_tokens", "output_cap"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise InputError(f"{key} = {value!r}: expected a whole number of at least 1")
        if self.blocking_s is not None and not 0 < self.blocking_s < math.inf:
            raise InputError(f"blocking_s = {self.blocking_s!r}: expected seconds above 0")
        if not 0 < self.patience_s < math.inf:
            raise InputError(f"patience_s = {self.patience_s!r}: expected seconds above 0")
        if not 0 <= self.front_s < math.inf:
            raise InputError(f"front_s = {self.front_s!r}: expected 0 or more seconds")
        if not 0 < self.eps < 1:
            raise InputError(f"eps = {self.eps!r}: expected a share in (0, 1)")
