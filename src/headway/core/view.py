"""The seam between an engine and the decisions: what they see and what they answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headway.core.cost import StepCost
from headway.core.demand import DemandWindow
from headway.core.ledger import Ledger
from headway.core.request import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class KvView:
    """The KV pool, in blocks of `block_size` tokens."""

    block_size: int
    total_blocks: int
    free_blocks: int

    def blocks(self, tokens: int) -> int:
        """Return the blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """Everything a decision may look at. Frozen; the ledger behind it is read, never changed.

    `residual_s` is the time that the step in flight still needs at most, by its envelope (0 when the engine waits for
    this very decision). `ahead`: steps are planned while the one before runs (asynchronous scheduling).
    """

    now_s: float
    ledger: Ledger
    cost: StepCost
    demand: DemandWindow
    kv: KvView
    max_step_tokens: int  # vLLM: max_num_batched_tokens
    max_running: int  # vLLM: max_num_seqs
    max_model_len: int
    residual_s: float = 0.0
    ahead: bool = False
    blocking_s: float = 0.25  # longest step while a request of the tightest class may arrive

    _slack: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def decodes(self) -> int:
        """How many requests decode in the step that is planned, those included whose last chunk is in flight."""
        return len(self.ledger.decoding) + len(self.ledger.completing)

    @property
    def context_tokens(self) -> int:
        """K of the step that is planned when all of `decodes` run: the step in flight gives each a token more."""
        ledger = self.ledger
        if self.residual_s <= 0 and not ledger.completing:
            return ledger.context_tokens
        joining = sum(r.target_tokens + 1 for r in ledger.completing.values())
        return ledger.context_tokens + len(ledger.decoding) + joining

    @property
    def loose(self) -> list[RequestState]:
        """Those of `decodes` without a pace, who may skip the step, in the order in which they began to decode."""
        ledger = self.ledger
        return [*ledger.loose.values(), *(r for r in ledger.completing.values() if math.isinf(r.slo.pace_s))]

    @property
    def slack_s(self) -> float:
        """Least slack of the decodes that can still be on time, from the end of the step in flight; inf if none.

        A decode that is late counts when decode-only steps bring it back in time before its last token; one that
        is lost for good must not slow the others down. Worked out once: a view is of one moment.
        """
        if not self._slack:
            self._slack.append(self._least_due_s() - self.now_s - self.residual_s)
        return self._slack[0]

    def _least_due_s(self) -> float:
        decoding, loose = self.ledger.decoding, self.loose
        if len(loose) == self.decodes:
            return math.inf
        # Those without a pace can skip steps.
        context = self.context_tokens - sum(r.prompt_tokens + r.output_tokens for r in loose)
        alone = self.cost.envelope(0, self.decodes - len(loose), context, 0)
        end = self.now_s + self.residual_s
        earliest = end + alone
        least = math.inf
        # With a step in flight (asynchronous scheduling) every decode gets a token when it ends, so the step planned
        # now is due with the token after that one.
        ahead = self.residual_s > 0
        if not ahead and (due := self.ledger.next_due_s) >= earliest:
            least = due  # nobody is late
            decoding = {}
        for request in decoding.values():
            due = request.next_due_s
            if ahead:
                due = min(due + request.slo.pace_s, end + (request.slo.tbt_s or math.inf))
            if due < least and (
                due >= earliest
                # Its last token is due a pace after each before it, and can come after as many decode-only steps.
                or due - request.slo.pace_s + request.remaining_output * (request.slo.pace_s - alone) >= end
            ):
                least = due
        # Their first token comes when the step in flight ends.
        for request in self.ledger.completing.values():
            if request.remaining_output > 1 and alone <= request.slo.pace_s:
                least = min(least, end + request.slo.pace_s)
        return least

    def alone_s(self, *requests: RequestState) -> float:
        """Return the least time to the first tokens of these on an idle engine: fewest steps, nothing else in them."""
        cost, tokens, work = self.cost.mean, 0, 0.0
        for each in requests:
            left = each.remaining_tokens
            tokens += left
            work += cost.work_s(left, each.computed_tokens)
        return math.ceil(tokens / self.max_step_tokens) * cost.g + work


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One engine step.

    Attributes:
        token_budget: largest number of tokens of the step.
        chunks: prompt tokens granted by request id. A prefill that is not named gets none, unless `open_chunks`.
        starts: waiting requests to start, in this order; None leaves the engine's own queue order.
        held: decodes that skip this step.
        victims: running requests in the order in which they may be preempted; empty leaves the engine's order.
        draft_length: draft tokens per decode; None leaves the engine's setting.
        open_chunks: prefills are bounded by the budget only, as stock vLLM does.
    """

    token_budget: int
    chunks: Mapping[str, int] = field(default_factory=dict)
    starts: tuple[str, ...] | None = None
    held: frozenset[str] = frozenset()
    victims: tuple[str, ...] = ()
    draft_length: int | None = None
    open_chunks: bool = False

    def granted(self, request: RequestState, computed_tokens: int) -> int:
        """Return the chunk of a prefill of which `computed_tokens` turn out to be computed.

        More than was believed (a hit in the prefix cache): its tokens now attend to a longer context, so it gets only
        as many as keep the step's X, and with it the step's time, as planned. It comes at least as far as planned.
        """
        chunk, believed = self.chunks.get(request.id, 0), request.computed_tokens
        if computed_tokens <= believed or chunk <= 0:
            return max(0, chunk)
        pairs = chunk * (believed + chunk / 2)
        return int(math.sqrt(computed_tokens**2 + 2 * pairs) - computed_tokens + 1e-9)


class Policy(Protocol):
    """Orders the work and sizes the step. Pure: same view, same plan."""

    name: str

    def plan(self, view: EngineView) -> StepPlan:
        """Return the plan of the next step."""
        ...
