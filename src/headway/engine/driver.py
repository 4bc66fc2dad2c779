"""Drives the decisions for one engine: keeps the ledger, asks policy and admission, measures, reports.

Engine-neutral and free of vLLM. Fail open: whatever raises inside a decision is counted and reported once, the step
runs as the engine alone would run it, and undecided requests are served without a promise.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

from headway import admission, policies
from headway.config import FRONT_MS, Config
from headway.core import (
    Accept,
    Answer,
    Bookings,
    DemandWindow,
    Desk,
    EngineView,
    FairShares,
    Ledger,
    Phase,
    Reason,
    RequestState,
    StepCost,
    StepPlan,
)
from headway.core.slo import blocking_s
from headway.engine.base import EngineFacts, RequestTag
from headway.engine.recorder import StepRecorder
from headway.engine.report import Report
from headway.engine.tracked import Tracked

logger = logging.getLogger("headway")


class Driver:
    """Policy, admission and measurement of one engine.

    Args:
        config: classes, names and parameters (`headway.toml`).
        cost: learned step cost to start from; None starts from nothing.
        recorder: step recorder; None makes one without a log.
    """

    def __init__(self, config: Config, *, cost: StepCost | None = None, recorder: StepRecorder | None = None) -> None:
        self.config = config
        self.policy = policies.create(config.policy, **config.policy_parameters)
        self.admission = admission.create(config.admission, **config.admission_parameters)
        self.ledger = Ledger()
        weights = {name: tenant.weight for name, tenant in config.tenant.items()}
        shares = FairShares(weights, reserve=config.tenant_reserve) if config.fair_share else None
        self.desk = Desk(patience_s=config.patience_s, shares=shares, bookings=Bookings() if config.bookings else None)
        self.demand = DemandWindow()
        self.cost = cost or StepCost(eps=config.eps)
        self.recorder = recorder or StepRecorder()
        self.report = Report()
        self._classes = {name: (c.slo(name), c) for name, c in config.classes.items()}
        self._tracked: dict[str, Tracked] = {}
        self._seq = 0
        self._planned_s = 0.0  # when the last step was planned
        self._ttfts: dict[str, float] = {}  # TTFT targets of accepted requests, for the blocking allowance
        self._failed = False

    # Requests

    def arrive(
        self,
        request_id: str,
        *,
        now_s: float,
        unix_s: float,
        prompt_tokens: int,
        max_tokens: int,
        tag: RequestTag | None = None,
        arrival_unix_s: float | None = None,
        cached_tokens: int = 0,
        follows: str | None = None,
        priority: int = 0,
        client: int = 0,
    ) -> None:
        """A request reached the engine. `now_s` and `unix_s` are the same instant on both clocks.

        `cached_tokens` of its prompt are in the prefix cache, or will be once the request `follows` has computed them.

        Without a tag it did not come through the HTTP side, which alone can turn a refusal into an answer: it is
        never refused, and served without a promise when none can be made.
        """
        refusable = tag is not None
        tag = tag or RequestTag(group=request_id)
        slo, limits = self._classes.get(tag.slo_class or "", self._classes[self.config.default_class])
        if tag.ttft_ms is not None or tag.tpot_ms is not None or tag.tbt_ms is not None:
            slo = dataclasses.replace(
                slo,
                ttft_s=slo.ttft_s if tag.ttft_ms is None else tag.ttft_ms / 1e3,
                tpot_s=slo.tpot_s if tag.tpot_ms is None else tag.tpot_ms / 1e3,
                tbt_s=slo.tbt_s if tag.tbt_ms is None else tag.tbt_ms / 1e3,
            )
        came = tag.arrival_unix_s or arrival_unix_s or unix_s
        arrival_s = now_s - max(0.0, unix_s - came)
        if tag.size > 1:
            arrival_s = self.desk.join(request_id, group=tag.group, size=tag.size, now_s=now_s, arrival_s=arrival_s)
        known = (ms for ms in (tag.front_ms, self.config.front_ms, FRONT_MS) if ms is not None)
        front_s = next(known) / 1e3
        state = RequestState(
            id=request_id,
            seq=self._seq,
            slo=slo,
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_tokens if tag.explicit_max_tokens else min(max_tokens, limits.assumed_output_tokens),
            priority=priority,
            cached_tokens=cached_tokens,
            follows=self.ledger.requests.get(follows) if follows is not None else None,
            front_s=front_s,
            patience_s=self.config.patience_s,
            refusable=refusable,
            tenant=tag.tenant or "",
            fingerprint=tag.fingerprint or "",
        )
        self._seq += 1
        self.ledger.arrive(state)
        if self.recorder.log is not None:
            self.recorder.log.arrived(state, now_s)
        self._tracked[request_id] = Tracked(state, slo, tag.group, client, front_s)
        work = self.cost.mean.work_s(state.remaining_tokens, state.computed_tokens)
        self.demand.add(now_s, work_s=work, weight=slo.weight, ttft_s=slo.ttft_s)
        self.desk.arrive(state, self.cost.mean, now_s)

    def finished(self, request_id: str, *, now_s: float, aborted: bool = False, failed: bool = False) -> None:
        """A request ended by itself, by its client (`aborted`) or by an error (`failed`). Unknown ids are ignored."""
        tracked = self._forget(request_id)
        if tracked is not None:
            outcome = tracked.outcome(aborted=aborted, failed=failed)
            if self.recorder.log is not None:
                self.recorder.log.finished(tracked.state, now_s, aborted=outcome.aborted or failed)
            self.report.done(tracked.client, outcome)

    def preempted(self, request_id: str) -> None:
        """The engine took the KV of a request away."""
        if request_id in self.ledger.requests:
            state = self.ledger.requests[request_id]
            decoding = state.phase is Phase.DECODE
            lost = state.prompt_tokens + state.output_tokens if decoding else state.computed_tokens
            self.report.preempted(request_id, lost, state.promised)
            if self.recorder.log is not None:
                self.recorder.log.preempted(request_id, self._planned_s)
            self.ledger.preempt(request_id)

    # Steps

    def begin_step(self, facts: EngineFacts) -> tuple[StepPlan | None, list[str]]:
        """Decide about new requests and plan the next step.

        Returns:
            The plan (None: run this step as the engine alone would) and the ids that are refused.
        """
        started = time.perf_counter()
        self._planned_s = facts.now_s
        refused: list[str] = []
        plan: StepPlan | None = None
        try:
            view = self._view(facts)
            for answer in self.desk.ask(view, self.admission):
                self._settle(answer, refused)
            plan = self.policy.plan(view)
        except Exception:
            self._fail_open()
        self.report.decision(time.perf_counter() - started, plan.token_budget if plan else facts.max_step_tokens)
        return plan, refused

    def issued(self, tokens: Mapping[str, int], computed: Callable[[str], int], *, now_s: float) -> None:
        """A step with these tokens per request was issued; `computed(id)` tells the tokens computed after it."""
        q = n = context = 0
        pairs = 0.0
        chunks: dict[str, int] = {}
        ledger = self.ledger
        for request_id, count in tokens.items():
            state = ledger.requests.get(request_id)
            if state is None:
                continue
            if state.phase is Phase.UNDECIDED:  # the engine served it although nobody decided: fail open
                self._serve(state)
            if state.phase is Phase.DECODE or state.remaining_tokens == 0:
                n += 1
                context += state.prompt_tokens + state.output_tokens
                continue
            after = min(computed(request_id), state.target_tokens)
            before = after - count
            q += count
            chunks[request_id] = count
            pairs += count * (before + count / 2)
            ledger.set_computed(request_id, after, started=True)
        self.recorder.issued(
            now_s, q=q, n=n, K=context, X=pairs, ids=tuple(tokens), planned_s=self._planned_s, chunks=chunks
        )

    def completed(self, new_tokens: Mapping[str, int], *, now_s: float, idle: bool) -> None:
        """The oldest step in flight ended and brought these output tokens. `idle`: the engine has nothing left."""
        done = self.recorder.completed(now_s, idle=idle)
        if done is not None:
            step, ids = done
            if step.q or step.n:
                self.cost.observe(step)
                self.report.step(step)
                for drift in self.cost.drifts():
                    self.report.drift(drift)
            tracked_all = self._tracked
            for request_id in ids:
                tracked = tracked_all.get(request_id)
                if tracked is None:
                    continue
                if tracked.state.first_token_s is None:
                    tracked.prefill_compute_s += step.seconds
                else:
                    tracked.decode_compute_s += step.seconds
        for request_id, count in new_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not count:
                continue
            state = tracked.state
            last = state.last_token_s
            self.ledger.token(request_id, now_s, count)
            if last is None:
                since = now_s - state.arrival_s
                self.report.first_token(
                    tracked.client, tracked.group, queue_s=tracked.queue_s or 0.0, since_arrival_s=since
                )
            else:
                tracked.tbt_max_s = max(tracked.tbt_max_s, (now_s - last) / count)

    def gauges(self) -> dict[str, float]:
        """Return the present state of the queues and of the cost model for the metrics."""
        ledger, cost = self.ledger, self.cost
        _, remaining, _, _ = ledger.columns()
        mean = cost.mean
        return {
            "decoding": len(ledger.decoding),
            "pending": len(ledger.pending),
            "undecided": len(ledger.undecided),
            "pending_tokens": float(remaining.sum()),
            "bookings": self.desk.bookings.open if self.desk.bookings is not None else 0,
            "tenants": self.desk.shares.known if self.desk.shares is not None else 0,
            **self._envelopes(),
            "eps": cost.eps,
            "ready": float(cost.ready),
            "cost_g": mean.g,
            "cost_a": mean.a,
            "cost_b": mean.b,
            "cost_k": mean.k,
            "cost_x": mean.x,
        }

    def _envelopes(self) -> dict[str, float]:
        """Return what was measured of the envelope, by regime."""
        found: dict[str, float] = {}
        for regime, envelope in self.cost.regimes().items():
            exceeded, judged = envelope.exceeded
            found |= {
                f"exceeded_{regime}": exceeded,
                f"judged_{regime}": judged,
                f"factor_{regime}": envelope.factor,
                f"drifting_{regime}": float(envelope.drifting),
            }
        stretches = self.cost.stretches
        found["exceeded_stretch"], found["judged_stretch"] = stretches.exceeded
        return found | {f"burst_{line.rate:g}": line.burst_s for line in stretches.known}

    # Inside

    def _view(self, facts: EngineFacts) -> EngineView:
        blocking = self.config.blocking_ms
        return EngineView(
            now_s=facts.now_s,
            ledger=self.ledger,
            cost=self.cost,
            demand=self.demand,
            kv=facts.kv,
            max_step_tokens=facts.max_step_tokens,
            max_running=facts.max_running,
            max_model_len=facts.max_model_len,
            residual_s=facts.residual_s,
            ahead=facts.ahead,
            blocking_s=blocking / 1e3 if blocking is not None else self._blocking_s(),
        )

    def _blocking_s(self) -> float:
        """A quarter of the tightest TTFT target in use: configured, or asked for by headers and accepted.

        What is merely asked for must not shorten the steps of others.
        """
        targets = [slo.ttft_s for slo, _ in self._classes.values() if slo.ttft_s is not None]
        return blocking_s([*targets, *self._ttfts.values()])

    def _settle(self, answer: Answer, refused: list[str]) -> None:
        """Tell whoever waits. Adds to `refused`, so that what was refused before something raises is known."""
        states, verdict = answer.requests, answer.verdict
        tracked = self._tracked[states[0].id]
        if isinstance(verdict, Accept):
            for state in states:
                if state.slo.ttft_s is not None:
                    self._ttfts[state.id] = state.slo.ttft_s
            if not answer.late:
                self.report.accepted(tracked.client, tracked.group, bound_s=tracked.bound_s(verdict.bound_s))
            return
        refused.extend(state.id for state in states)
        for state in states:
            if self.recorder.log is not None:
                self.recorder.log.refused(state.id, self._planned_s, verdict)
            self._forget(state.id)
        if answer.late:
            return
        pace = verdict.reason is Reason.TBT  # its bound is the time of a step
        self.report.refused(
            tracked.client,
            tracked.group,
            reason=verdict.reason,
            slo=tracked.slo,
            prompt_tokens=states[0].prompt_tokens,
            detail=verdict.detail,
            bound_s=None if pace else tracked.bound_s(verdict.bound_s),
            pace_bound_s=verdict.bound_s if pace else None,
            retry_after_s=verdict.retry_after_s,
        )

    def _serve(self, state: RequestState) -> None:
        """Serve a request that has no verdict without a promise."""
        self.ledger.accept(state, None)
        self.desk.leave(state.id)

    def _forget(self, request_id: str) -> Tracked | None:
        if request_id not in self._tracked:
            return None
        self.desk.leave(request_id)
        tracked = self._tracked.pop(request_id)
        if request_id in self.ledger.requests:
            self.ledger.finish(request_id)
        self._ttfts.pop(request_id, None)
        return tracked

    def _fail_open(self) -> None:
        """Serve what has no verdict without a promise."""
        self.failed("a decision failed; this step runs as the engine alone would")
        for state in list(self.ledger.undecided.values()):
            self._serve(state)
            tracked = self._tracked[state.id]
            self.report.accepted(tracked.client, tracked.group, bound_s=None)

    def start_over(self) -> None:
        """The books are wrong (called while the failure is handled): forget every request.

        The engine serves those that it has as it would alone, and decisions go on with those that come.
        """
        self.failed("the books failed; requests in the engine are served as the engine alone would")
        self.ledger = Ledger()
        self.desk.clear()
        self._tracked.clear()
        self._ttfts.clear()

    def failed(self, what: str) -> None:
        """Count a failure of a decision (called while it is handled), and log the first one with its traceback."""
        self.report.failed_open()
        if not self._failed:
            self._failed = True
            logger.exception("headway: %s (reported once)", what)
