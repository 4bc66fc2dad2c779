"""A tiny deterministic engine: ledger, policy and admission in a step loop whose cost is exact.

No noise, no asynchronous lag, no KV limit of its own: what is decided is what happens, so a promise that breaks here
was unsound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.core import (
    Accept,
    Admission,
    CostCoefficients,
    DemandWindow,
    EngineView,
    KvView,
    Ledger,
    Line,
    Phase,
    Policy,
    Reject,
    RequestState,
    Slo,
    StepCost,
    StepPlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of the scripted load."""

    at_s: float
    prompt: int
    output: int  # max output tokens
    slo: Slo
    early: int = 0  # tokens fewer than `output` that it really produces
    priority: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one arrival. Times are absolute; `verdict` is "accept", "reject" or "pending"."""

    arrival: Arrival
    due_s: float
    verdict: str = "pending"
    rejection: Reject | None = None
    bound_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    widest_gap_s: float = 0.0

    @property
    def tpot_s(self) -> float:
        """Mean pace after the first token; 0 with one token."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return 0.0
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def misses(self, tolerance: float = 1e-6) -> list[str]:
        """Return the names of the targets that an accepted request broke."""
        slo = self.arrival.slo
        out = []
        if slo.ttft_s is not None and (self.first_s is None or self.first_s > self.due_s + tolerance):
            out.append("ttft")
        if slo.tpot_s is not None and self.tpot_s > slo.tpot_s + tolerance:
            out.append("tpot")
        if slo.tbt_s is not None and self.widest_gap_s > slo.tbt_s + tolerance:
            out.append("tbt")
        return out


@dataclass(slots=True, kw_only=True)
class Loop:
    """An engine of exact cost.

    Attributes:
        factor: envelope / mean that the decisions believe.
        ratios: measured / mean of the steps in turn, repeated for ever.
        lines: envelopes of steps in a row that the decisions believe, and that steps keep: shorter where they must be.
        check: check the ledger's invariants at every step.
        outcomes: one for each arrival, in order, after `run`.
        order: ids in the order of their first tokens.
        steps: (q, n, seconds) of every step.
    """

    coefficients: CostCoefficients
    policy: Policy
    admission: Admission
    max_step_tokens: int = 2048
    max_running: int = 256
    max_model_len: int = 4096
    blocking_s: float = 0.25
    blocks: int = 100_000
    factor: float = 1.0
    ratios: Sequence[float] = (1.0,)
    lines: tuple[Line, ...] = ()
    check: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    _excess: list[float] = field(default_factory=list)

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Serve everything; return what became of each arrival (sorted by arrival time)."""
        arrivals = sorted(arrivals, key=lambda a: a.at_s)
        ledger, demand = Ledger(), DemandWindow()
        cost = StepCost.fixed(self.coefficients, factor=self.factor, lines=self.lines)
        self._excess = [0.0 for _ in self.lines]
        kv = KvView(block_size=16, total_blocks=self.blocks, free_blocks=self.blocks)
        now, coming = 0.0, 0

        def view() -> EngineView:
            return EngineView(
                now_s=now,
                ledger=ledger,
                cost=cost,
                demand=demand,
                kv=kv,
                max_step_tokens=self.max_step_tokens,
                max_running=self.max_running,
                max_model_len=self.max_model_len,
                blocking_s=self.blocking_s,
            )

        while coming < len(arrivals) or ledger.requests:
            if not ledger.requests:
                now = max(now, arrivals[coming].at_s)
            while coming < len(arrivals) and arrivals[coming].at_s <= now:
                arrival = arrivals[coming]
                request = RequestState(
                    id=str(coming),
                    seq=coming,
                    slo=arrival.slo,
                    arrival_s=arrival.at_s,
                    prompt_tokens=arrival.prompt,
                    max_output_tokens=arrival.output,
                    priority=arrival.priority,
                )
                demand.add(
                    now,
                    work_s=cost.mean.work_s(arrival.prompt, 0),
                    weight=arrival.slo.weight,
                    ttft_s=arrival.slo.ttft_s,
                )
                ledger.arrive(request)
                self.outcomes.append(Outcome(arrival=arrival, due_s=request.due_s))
                coming += 1
            for request in list(ledger.undecided.values()):
                self._decide(view(), request)
            if self.check:
                ledger.check()
            taken = self._step(view(), self.policy.plan(view()))
            if taken is not None:
                now = taken
            elif ledger.undecided or coming < len(arrivals):
                later = [now + 0.005 if ledger.undecided else arrivals[coming].at_s]
                now = min(later + [a.at_s for a in arrivals[coming : coming + 1]])
            elif ledger.requests:
                raise AssertionError(f"stuck at {now}: {ledger.pending[:3]}")
        return self.outcomes

    def _decide(self, view: EngineView, request: RequestState) -> None:
        outcome = self.outcomes[request.seq]
        verdict = self.admission.decide(view, request)
        if isinstance(verdict, Accept):
            view.ledger.accept(request, verdict.bound_s)
            outcome.verdict, outcome.bound_s = "accept", verdict.bound_s
        elif isinstance(verdict, Reject) or view.now_s >= verdict.until_s:
            view.ledger.finish(request.id)
            outcome.verdict = "reject"
            outcome.rejection = verdict if isinstance(verdict, Reject) else verdict.otherwise

    def _step(self, view: EngineView, plan: StepPlan) -> float | None:
        """Execute one step; return when it is over, None when there was nothing to do."""
        ledger = view.ledger
        decodes = [r for r in ledger.decoding.values() if r.id not in plan.held]
        n, K = len(decodes), sum(r.target_tokens + r.output_tokens for r in decodes)
        left = plan.token_budget - n
        q, X = 0, 0.0
        running = [r for r in ledger.pending if r.phase is Phase.PREFILL]
        waiting = [r for r in ledger.pending if r.phase is Phase.WAITING]
        if plan.starts is not None:
            waiting = [ledger.requests[i] for i in plan.starts]
        elif plan.open_chunks:
            running.sort(key=lambda r: r.seq)
            waiting.sort(key=lambda r: r.seq)
        scheduled = []
        for request in running + waiting:
            tokens = min(left, request.remaining_tokens if plan.open_chunks else plan.chunks.get(request.id, 0))
            if tokens <= 0:
                continue
            left -= tokens
            q += tokens
            X += tokens * (request.computed_tokens + tokens / 2)
            scheduled.append((request, tokens))
        if not q and not n:
            return None
        mean = self.coefficients.seconds(q, n, K, X)
        seconds = mean * self.ratios[len(self.steps) % len(self.ratios)]
        for line, excess in zip(self.lines, self._excess, strict=True):
            seconds = min(seconds, line.rate * mean + line.burst_s - excess)
        self._excess = [
            max(0.0, e + seconds - line.rate * mean) for line, e in zip(self.lines, self._excess, strict=True)
        ]
        end = view.now_s + seconds
        self.steps.append((q, n, seconds))
        emitting = list(decodes)
        for request, tokens in scheduled:
            ledger.schedule(request.id, tokens)
            if not request.remaining_tokens:
                emitting.append(request)
        for request in emitting:
            self._token(ledger, request, end)
        return end

    def _token(self, ledger: Ledger, request: RequestState, now: float) -> None:
        outcome = self.outcomes[request.seq]
        ledger.token(request.id, now)
        outcome.tokens += 1
        if outcome.first_s is None:
            outcome.first_s = now
            self.order.append(request.id)
        else:
            outcome.widest_gap_s = max(outcome.widest_gap_s, now - (outcome.last_s or now))
        outcome.last_s = now
        if outcome.tokens >= max(1, outcome.arrival.output - outcome.arrival.early):
            ledger.finish(request.id)
