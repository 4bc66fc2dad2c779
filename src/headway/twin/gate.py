"""The way into a simulated engine: what its front end refuses at once, and who has asked for admission.

The engine asks at step boundaries through the same desk as the real driver (core/desk.py).
"""

from __future__ import annotations

from headway.core import (
    Accept,
    Admission,
    Bookings,
    DemandWindow,
    Desk,
    EngineView,
    Ledger,
    Reason,
    RequestState,
    StepCost,
)
from headway.twin.batch import Batcher
from headway.twin.config import EngineConfig
from headway.twin.job import Job
from headway.twin.recorder import Recorder
from headway.twin.source import Arrival


class Gate:
    """Requests without a verdict.

    Attributes:
        inbox: requests since the last boundary, which the decisions do not know yet.
        undecided: requests that the decisions know and that have no verdict, by id.
        refused: somebody, when the admission test was last asked.
        queued_tokens: prompt tokens without a first token, as vLLM's front end counts them.
        demand: the window of recent demand; kept only where the decisions read it.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        ledger: Ledger,
        batcher: Batcher,
        admission: Admission,
        belief: StepCost,
        recorder: Recorder,
        watch_demand: bool,
    ) -> None:
        self.inbox: list[Job] = []
        self.undecided: dict[str, Job] = {}
        self.queued_tokens = 0
        self.refused = False
        self.demand = DemandWindow()
        self._config = config
        self._ledger = ledger
        self._batcher = batcher
        self._admission = admission
        self._belief = belief
        self._recorder = recorder
        self._watch_demand = watch_demand
        self._desk = Desk(
            patience_s=config.patience_s, bookings=Bookings() if config.bookings else None, renews=watch_demand
        )

    def receive(self, now: float, arrival: Arrival) -> None:
        """A request reaches the front end: refused at once when it can never fit or the stock valve is shut."""
        config, pool = self._config, self._batcher.pool
        job = Job(
            row=arrival.row,
            state=self._state(arrival),
            output=arrival.output_tokens,
            ids=arrival.hash_ids,
            ids_block=arrival.hash_block,
        )
        total = arrival.input_tokens + arrival.output_tokens
        if total > config.max_model_len or pool.blocks(total) > pool.total:
            self._recorder.refused(job, now, Reason.NEVER_FITS, None)
        elif config.max_queued_tokens is not None and self.queued_tokens >= config.max_queued_tokens:
            self._recorder.refused(job, now, Reason.QUEUE_FULL, None)
        else:
            self.queued_tokens += arrival.input_tokens
            reached = now if arrival.reached_s is None else arrival.reached_s
            self._desk.arrive(job.state, self._belief.mean, reached)
            job.reached_s = arrival.reached_s
            self.inbox.append(job)

    def _state(self, arrival: Arrival) -> RequestState:
        """Return what the decisions see of a request. Only a clairvoyant is told an answer's true length."""
        declared = arrival.output_tokens if arrival.declared is None else arrival.declared
        cap = self._config.output_cap
        if cap is not None and not getattr(self._admission, "clairvoyant", False):
            # No server lets a client ask for more than the model holds.
            declared = max(declared, min(cap, self._config.max_model_len - arrival.input_tokens))
        state = RequestState(
            id=arrival.id,
            seq=arrival.row,
            slo=arrival.slo,
            arrival_s=arrival.time_s if arrival.asked_s is None else arrival.asked_s,
            prompt_tokens=arrival.input_tokens,
            max_output_tokens=declared,
            cached_tokens=arrival.cached_tokens,
            front_s=self._config.front_s,
            patience_s=self._config.patience_s,
            fingerprint=arrival.id if arrival.fingerprint is None else arrival.fingerprint,
        )
        if arrival.due_s is not None:
            state.due_s = arrival.due_s
        return state

    def take_in(self, now: float) -> None:
        """Let the decisions know of the requests since the last boundary."""
        for job in self.inbox:
            state = job.state
            if self._batcher.pool.caching:
                # What the cache holds of a prompt lowers its work as the admission test sees it.
                hit = len(self._batcher.lookup(job)) * self._batcher.pool.block_size
                state.computed_tokens = min(hit, state.prompt_tokens - 1)
            if self._watch_demand:
                work = self._belief.mean.work_s(state.remaining_tokens, state.computed_tokens)
                # An engine takes requests in between its steps; a log tells when.
                at = now if job.reached_s is None else job.reached_s
                self.demand.add(at, work_s=work, weight=state.slo.weight, ttft_s=state.slo.ttft_s)
            self._ledger.arrive(state)
            self.undecided[state.id] = job
        self.inbox.clear()

    def answer(self, view: EngineView) -> None:
        """Put those whose turn it is before the admission test."""
        self.refused = False
        for answer in self._desk.ask(view, self._admission):
            (state,) = answer.requests
            job = self.undecided.pop(state.id)
            if isinstance(answer.verdict, Accept):
                self._batcher.waiting[state.id] = job
            else:
                self.refused = True
                self.queued_tokens -= state.prompt_tokens
                self._recorder.refused(job, view.now_s, answer.verdict.reason, answer.verdict.retry_after_s)
