"""Drives the decisions for one engine: keeps the ledger, asks policy and admission, measures, reports.

Engine-neutral and free of vLLM. Fail open: whatever raises inside a decision is counted and reported once, the step
runs as the engine alone would run it, and undecided requests are served without a promise.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from headway import admission, policies
from headway.config import Config
from headway.core import (
    Accept,
    Defer,
    DemandWindow,
    EngineView,
    Ledger,
    Phase,
    Reason,
    Reject,
    RequestState,
    Slo,
    StepCost,
    StepPlan,
    Verdict,
)
from headway.engine.base import EngineFacts, RequestTag
from headway.engine.recorder import StepRecorder
from headway.engine.report import Outcome, Report

logger = logging.getLogger("headway")

#: Deferred requests that are asked about again in one step, so that a crowd of them cannot slow the steps down.
RETRIES_PER_STEP = 4

#: A group whose members do not all arrive is decided after this time with those that did.
GROUP_WAIT_S = 1.0


@dataclasses.dataclass(slots=True)
class _Tracked:
    """What the driver remembers of a request beside its state."""

    state: RequestState
    slo: Slo  # the targets that were asked for, even when it is served as best effort
    group: str
    client: int
    front_s: float
    prefill_compute_s: float = 0.0
    decode_compute_s: float = 0.0
    tbt_max_s: float = 0.0


@dataclasses.dataclass(slots=True)
class _Group:
    size: int
    since_s: float
    waiting: list[str]


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
        self.demand = DemandWindow()
        self.cost = cost or StepCost(eps=config.eps)
        self.recorder = recorder or StepRecorder()
        self.report = Report()
        self._classes = {name: (c.slo(name), c) for name, c in config.classes.items()}
        self._tracked: dict[str, _Tracked] = {}
        self._groups: dict[str, _Group] = {}
        self._deferred: dict[str, float] = {}  # id -> when its answer is due; the one asked last is at the end
        self._seq = 0
        self._ttfts: dict[float, int] = {}  # TTFT targets of live requests, for the blocking allowance
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
        priority: int = 0,
        client: int = 0,
    ) -> None:
        """A request reached the engine. `now_s` and `unix_s` are the same instant on both clocks."""
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
        front_s = (self.config.front_ms if tag.front_ms is None else tag.front_ms) / 1e3
        state = RequestState(
            id=request_id,
            seq=self._seq,
            slo=slo,
            arrival_s=now_s - max(0.0, unix_s - came),
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_tokens if tag.explicit_max_tokens else min(max_tokens, limits.assumed_output_tokens),
            priority=priority,
            cached_tokens=cached_tokens,
            front_s=front_s,
            patience_s=self.config.patience_s,
        )
        self._seq += 1
        self.ledger.arrive(state)
        self._tracked[request_id] = _Tracked(state, slo, tag.group, client, front_s)
        if slo.ttft_s is not None:
            self._ttfts[slo.ttft_s] = self._ttfts.get(slo.ttft_s, 0) + 1
        work = self.cost.mean.work_s(state.remaining_tokens, state.computed_tokens)
        self.demand.add(now_s, work_s=work, weight=slo.weight)
        if tag.size > 1:
            group = self._groups.setdefault(tag.group, _Group(tag.size, now_s, []))
            group.waiting.append(request_id)

    def finished(self, request_id: str, *, now_s: float, aborted: bool = False) -> None:
        """A request ended by itself (`aborted=False`) or by its client. Unknown ids are ignored."""
        tracked = self._forget(request_id)
        if tracked is not None:
            state = tracked.state
            self.report.done(tracked.client, self._outcome(tracked, aborted or state.first_token_s is None))

    def preempted(self, request_id: str) -> None:
        """The engine took the KV of a request away."""
        if request_id in self.ledger.requests:
            state = self.ledger.requests[request_id]
            self.report.preempted(request_id, state.computed_tokens + state.output_tokens, state.promised)
            self.ledger.preempt(request_id)

    # Steps

    def begin_step(self, facts: EngineFacts) -> tuple[StepPlan | None, list[str]]:
        """Decide about new requests and plan the next step.

        Returns:
            The plan (None: run this step as the engine alone would) and the ids that are refused.
        """
        started = time.perf_counter()
        refused: list[str] = []
        plan: StepPlan | None = None
        try:
            view = self._view(facts)
            refused = self._decide(view)
            plan = self.policy.plan(view)
        except Exception:
            self._fail_open()
        self.report.decision(time.perf_counter() - started, plan.token_budget if plan else facts.max_step_tokens)
        return plan, refused

    def issued(self, tokens: Mapping[str, int], computed: Callable[[str], int], *, now_s: float) -> None:
        """A step with these tokens per request was issued; `computed(id)` tells the tokens computed after it."""
        q = n = context = 0
        pairs = 0.0
        ledger = self.ledger
        for request_id, count in tokens.items():
            state = ledger.requests.get(request_id)
            if state is None:
                continue
            if state.phase is Phase.UNDECIDED:  # the engine served it although nobody decided: fail open
                self._deferred.pop(request_id, None)
                ledger.accept(state, None)
            if state.phase is Phase.DECODE or state.remaining_tokens == 0:
                n += 1
                context += state.prompt_tokens + state.output_tokens
                continue
            after = min(computed(request_id), state.target_tokens)
            before = after - count
            q += count
            pairs += count * (before + count / 2)
            ledger.set_computed(request_id, after, started=True)
        self.recorder.issued(now_s, q=q, n=n, K=context, X=pairs, ids=tuple(tokens))

    def completed(self, new_tokens: Mapping[str, int], *, now_s: float, idle: bool) -> None:
        """The oldest step in flight ended and brought these output tokens. `idle`: the engine has nothing left."""
        done = self.recorder.completed(now_s, idle=idle)
        if done is not None:
            step, ids = done
            if step.q or step.n:
                exceeded = step.seconds > self.cost.envelope(step.q, step.n, step.K, step.X)
                self.cost.observe(step)
                self.report.step(step, exceeded)
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
                queue = max(0.0, now_s - state.arrival_s - tracked.prefill_compute_s)
                self.report.first_token(tracked.client, tracked.group, queue_s=queue)
            else:
                tracked.tbt_max_s = max(tracked.tbt_max_s, (now_s - last) / count)

    def gauges(self) -> dict[str, float]:
        """Return the present state of the queues and of the cost model for the metrics."""
        ledger, cost = self.ledger, self.cost
        exceeded, judged = cost.exceeded()
        _, remaining, _, _ = ledger.columns()
        mean = cost.mean
        return {
            "decoding": len(ledger.decoding),
            "pending": len(ledger.pending),
            "undecided": len(ledger.undecided),
            "pending_tokens": float(remaining.sum()),
            "exceeded": exceeded,
            "judged": judged,
            "eps": cost.eps,
            "factor": cost.factor,
            "ready": float(cost.ready),
            "cost_g": mean.g,
            "cost_a": mean.a,
            "cost_b": mean.b,
            "cost_k": mean.k,
            "cost_x": mean.x,
        }

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
            blocking_s=blocking / 1e3 if blocking is not None else self._blocking_s(),
        )

    def _blocking_s(self) -> float:
        """A quarter of the tightest TTFT target in use: configured, or asked for by a live request's headers."""
        targets = [slo.ttft_s for slo, _ in self._classes.values() if slo.ttft_s is not None]
        return 0.25 * min([*targets, *self._ttfts], default=4.0)

    def _decide(self, view: EngineView) -> list[str]:
        """Answer every new request, and deferred ones when their time is up or their turn comes."""
        refused: list[str] = []
        now = view.now_s
        asked = [i for i, until in self._deferred.items() if now >= until]
        asked += [i for i in list(self._deferred)[:RETRIES_PER_STEP] if i not in asked]
        asked += [i for i in self.ledger.undecided if i not in self._deferred]
        for request_id in asked:
            if request_id not in self.ledger.undecided:
                continue  # decided with its group
            tracked = self._tracked[request_id]
            group = self._groups.get(tracked.group)
            if group is not None:
                if request_id == group.waiting[0]:
                    refused.extend(self._decide_group(view, tracked.group, group))
                continue
            self._deferred.pop(request_id, None)
            verdict = self._verdict(view, tracked.state)
            if isinstance(verdict, float):
                self._deferred[request_id] = verdict
            elif not self._settle(tracked.state, verdict):
                refused.append(request_id)
        return refused

    def _verdict(self, view: EngineView, state: RequestState) -> Accept | Reject | float:
        """Ask the admission test, then apply the rule of the class; a float is when the answer is due."""
        verdict: Verdict = self.admission.decide(view, state)
        if isinstance(verdict, Accept):
            return verdict
        if isinstance(verdict, Defer):
            if view.now_s < verdict.until_s:
                return verdict.until_s
            verdict = verdict.otherwise
        if verdict.reason is Reason.NEVER_FITS or state.slo.on_miss == "reject":
            return verdict
        if state.slo.on_miss == "best_effort":
            return self._best_effort(state)
        return state.due_s if view.now_s < state.due_s else verdict

    def _best_effort(self, state: RequestState) -> Accept:
        """Serve it without any promise: its targets neither bind the steps nor go before promised ones."""
        state.slo = Slo(name=state.slo.name, on_miss="best_effort", weight=state.slo.weight)
        state.due_s = state.arrival_s + self.config.patience_s
        return Accept()

    def _settle(self, state: RequestState, verdict: Accept | Reject) -> bool:
        tracked = self._tracked[state.id]
        if isinstance(verdict, Accept):
            self.ledger.accept(state, verdict.bound_s)
            bound = None if verdict.bound_s is None else verdict.bound_s + tracked.front_s - state.arrival_s
            self.report.accepted(tracked.client, tracked.group, bound_s=bound)
            return True
        front, arrival = tracked.front_s, state.arrival_s
        self._forget(state.id)
        self.report.refused(
            tracked.client,
            tracked.group,
            reason=verdict.reason,
            slo=tracked.slo,
            prompt_tokens=state.prompt_tokens,
            detail=verdict.detail,
            bound_s=None if verdict.bound_s is None else verdict.bound_s + front - arrival,
            retry_after_s=verdict.retry_after_s,
        )
        return False

    def _decide_group(self, view: EngineView, name: str, group: _Group) -> list[str]:
        """Serve or refuse all sequences of one HTTP request together."""
        if len(group.waiting) < group.size and view.now_s - group.since_s < GROUP_WAIT_S:
            return []
        del self._groups[name]
        states = [self.ledger.requests[i] for i in group.waiting if i in self.ledger.undecided]
        bound: float | None = None
        for state in states:
            verdict = self.admission.decide(view, state)
            if not isinstance(verdict, Accept):
                reject = verdict if isinstance(verdict, Reject) else verdict.otherwise
                if state.slo.on_miss != "best_effort" or reject.reason is Reason.NEVER_FITS:
                    return self._refuse_all(states, reject)
                verdict = self._best_effort(state)
            self.ledger.accept(state, verdict.bound_s)
            bound = verdict.bound_s if bound is None or verdict.bound_s is None else max(bound, verdict.bound_s)
        if states:
            tracked = self._tracked[states[0].id]
            promised = None if bound is None else bound + tracked.front_s - states[0].arrival_s
            self.report.accepted(tracked.client, name, bound_s=promised)
        return []

    def _refuse_all(self, states: Iterable[RequestState], reject: Reject) -> list[str]:
        """Take back what was accepted of a group and refuse it; one refusal is reported."""
        states = list(states)
        for state in states[1:]:
            self._forget(state.id)
        if states[0].phase is Phase.UNDECIDED:
            self._settle(states[0], reject)
        else:
            tracked = self._tracked[states[0].id]
            self._forget(states[0].id)
            self.report.refused(
                tracked.client,
                tracked.group,
                reason=reject.reason,
                slo=tracked.slo,
                prompt_tokens=states[0].prompt_tokens,
                detail=reject.detail,
                bound_s=None,
                retry_after_s=reject.retry_after_s,
            )
        return [state.id for state in states]

    def _forget(self, request_id: str) -> _Tracked | None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return None
        if request_id in self.ledger.requests:
            self.ledger.finish(request_id)
        self._deferred.pop(request_id, None)
        if (target := tracked.slo.ttft_s) is not None:
            self._ttfts[target] -= 1
            if not self._ttfts[target]:
                del self._ttfts[target]
        group = self._groups.get(tracked.group)
        if group is not None and request_id in group.waiting:
            group.waiting.remove(request_id)
            group.size -= 1
            if not group.waiting:
                del self._groups[tracked.group]
        return tracked

    def _outcome(self, tracked: _Tracked, aborted: bool) -> Outcome:
        state, slo = tracked.state, tracked.slo
        ttft = tpot = None
        missed: list[str] = []
        first, last = state.first_token_s, state.last_token_s
        prefill_queue = decode_queue = None
        if first is not None and last is not None:
            ttft = first - state.arrival_s + tracked.front_s
            prefill_queue = max(0.0, first - state.arrival_s - tracked.prefill_compute_s)
            decode_queue = max(0.0, last - first - tracked.decode_compute_s)
            if state.output_tokens > 1:
                tpot = (last - first) / (state.output_tokens - 1)
            if slo.ttft_s is not None and ttft > slo.ttft_s:
                missed.append("ttft")
            if slo.tpot_s is not None and tpot is not None and tpot > slo.tpot_s:
                missed.append("tpot")
            if slo.tbt_s is not None and tracked.tbt_max_s > slo.tbt_s:
                missed.append("tbt")
        return Outcome(
            group=tracked.group,
            slo=slo,
            promised=state.promised,
            aborted=aborted,
            missed=tuple(missed),
            prompt_tokens=state.prompt_tokens,
            output_tokens=state.output_tokens,
            ttft_s=ttft,
            tpot_s=tpot,
            tbt_max_s=tracked.tbt_max_s if state.output_tokens > 1 else None,
            prefill_queue_s=prefill_queue,
            prefill_compute_s=tracked.prefill_compute_s,
            decode_queue_s=decode_queue,
            decode_compute_s=tracked.decode_compute_s,
            preemptions=state.preemptions,
        )

    def _fail_open(self) -> None:
        """Serve what has no verdict without a promise; report the first failure with its traceback."""
        self.report.failed_open()
        if not self._failed:
            self._failed = True
            logger.exception("headway: a decision failed; this step runs as the engine alone would (reported once)")
        for state in list(self.ledger.undecided.values()):
            self.ledger.accept(state, None)
            tracked = self._tracked[state.id]
            self.report.accepted(tracked.client, tracked.group, bound_s=None)
        self._groups.clear()
        self._deferred.clear()
