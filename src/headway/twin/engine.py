"""One simulated engine: a loop of steps that asks the same policy and the same admission test as the real one.

At every step boundary, in this order: the tokens of the step that ended come out; requests that arrived since the
last boundary are put before the admission test, and deferred ones again; the policy plans; the batch is built by
vLLM's rules (batch.py), priced (price.py, times noise) and runs. With `async_lag` the plan made at a
boundary is executed one step later.

A decode costs nothing while it runs: its tokens are a line in the step number. The ledger is told of them before
somebody reads it. Where the coming steps are decode-only and nobody decides anything, they are executed at once
(`_run_ahead`), up to the first that ends after the next arrival.
"""

from __future__ import annotations

import heapq

import numpy as np

from headway.core import Admission, EngineView, KvView, Ledger, Policy, Step, StepCost, StepPlan
from headway.errors import EngineError
from headway.twin.batch import Batch, Batcher
from headway.twin.clock import StepEnds
from headway.twin.config import EngineConfig
from headway.twin.flight import Flight, Issued, StepListener, StepTimes
from headway.twin.gate import Gate
from headway.twin.job import Job
from headway.twin.kv import KvPool
from headway.twin.noise import Noise
from headway.twin.price import Price
from headway.twin.recorder import Recorder

#: With nothing pending these policies run every decode, whatever the time: such steps need no plan.
STEADY_POLICIES = frozenset({"fcfs", "edf", "priority", "sola", "headway"})

#: Decisions that read neither the learned cost nor the tokens of single decodes nor the demand window.
BLIND_POLICIES = frozenset({"fcfs", "edf", "priority"})
BLIND_ADMISSION = frozenset({"admit_all", "queue_depth", "queued_tokens", "token_bucket"})

#: An engine that has nothing to run but an undecided or unplanned request looks again after this time.
POLL_S = 0.02
_MAX_IDLE_POLLS = 10_000
_MOST_AHEAD = 4096


class StarvationError(EngineError):
    """A policy or admission test never lets an accepted or deferred request run."""


class Engine:
    """One replica. Times are seconds on the simulation's clock.

    Attributes:
        belief: the step cost that the decisions see; `truth` is the one that steps really have.
        idle: nothing is scheduled; the next arrival starts it.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        truth: Price,
        noise: Noise,
        policy: Policy,
        admission: Admission,
        belief: StepCost,
        recorder: Recorder,
        blocking_s: float = 0.25,
        on_step: StepListener | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self.config = config
        self.truth = truth
        self.noise = noise
        self.policy = policy
        self.admission = admission
        self.belief = belief
        self.recorder = recorder
        self.blocking_s = blocking_s
        self.on_step = on_step
        self.times = times  # measured ones, in place of price and noise
        self.ledger = Ledger()
        self.pool = KvPool(total=config.kv_blocks, block_size=config.block_size, caching=config.prefix_cache)
        self.batcher = Batcher(ledger=self.ledger, pool=self.pool, max_running=config.max_running, settle=self._settle)
        self.step = 0
        self.steps_with_prefill = 0
        self.busy_s = 0.0
        self.idle = True
        self.wakes = 0  # makes older wake-ups of the simulation void
        self._ends = StepEnds()
        self._finishing: list[tuple[int, int, int, Job]] = []  # (finish step, seq, version, job)
        self._flight: Flight | None = None
        self._next: tuple[Batch, StepPlan] | None = None  # the step after it (async_lag)
        self._idle_polls = 0
        self._constant_plan: StepPlan | None = None
        self._open = policy.name == "fcfs"
        self._steady = policy.name in STEADY_POLICIES
        self._trim_at = 65_536
        self._blind = policy.name in BLIND_POLICIES and admission.name in BLIND_ADMISSION
        self._learns = config.learn and not self._blind
        self.gate = Gate(
            config=config,
            ledger=self.ledger,
            batcher=self.batcher,
            admission=admission,
            belief=belief,
            recorder=recorder,
            watch_demand=not self._blind,
        )

    # The loop

    def advance(self, now: float, horizon: float) -> float | None:
        """Handle the boundary at `now`; return the time of the next one, None when there is nothing to do.

        `horizon` is the next arrival anywhere (inf: none): the first boundary at or after it is never skipped.
        """
        self.idle = False
        if self._flight is not None:
            self._collect(now)
        batch, plan = self._next or (None, None)
        self._next = None
        if batch is None or not (batch.chunks or self.batcher.decoding):
            view = self._decide(now, 0.0)
            if not self.ledger.requests:
                self.idle = True
                return None
            if self.times is not None and view is not None and self.gate.refused:
                again = self.times.after_refusal(now)
                if again is not None:
                    return again
            batch, plan = Batch(), self._plan(view, now, 0.0)
            self.batcher.begin(plan, self.step + 1, batch)
            decodes = len(self.batcher.decoding) - len(batch.held)
            self.batcher.fill(plan, self.step + 1, batch, decodes)
            batch.held = [job for job in batch.held if job.state.id in self.batcher.decoding]  # not preempted since
        else:
            batch.chunks = [c for c in batch.chunks if c.job.version == c.version]
            self.batcher.begin(plan, self.step + 1, batch)
            batch.chunks = [c for c in batch.chunks if c.job.version == c.version]
        nothing = not batch.chunks and len(self.batcher.decoding) == len(batch.held)
        for job in batch.held:
            if nothing:
                self.batcher.release(job)
            heapq.heappush(self._finishing, (job.finish_step, job.row, job.version, job))
        if nothing:
            return self._wait(now)
        self._idle_polls = 0
        if self._may_run_ahead(batch):
            end = self._run_ahead(batch, now, horizon)
            if self.config.async_lag:  # the plan made when the last of these steps began: nothing to prefill
                self._next = (Batch(), StepPlan(token_budget=self.config.token_budget))
            return end
        end = self._execute(batch, now)
        if self.config.async_lag:
            self._plan_ahead(now)
        return end

    def _plan_ahead(self, now: float) -> None:
        """Plan the step after the one just issued, with what is known now."""
        flight, batch = self._flight, Batch()
        residual = self.belief.envelope(flight.q, flight.n, flight.K, flight.X)
        view = self._decide(now, residual)
        plan = self._plan(view, now, residual)
        completing = sum(1 for chunk in flight.batch.chunks if not chunk.job.state.remaining_tokens)
        self.batcher.fill(plan, self.step + 1, batch, len(self.batcher.decoding) + completing)
        self._next = (batch, plan)

    def _plan(self, view: EngineView | None, now: float, residual_s: float) -> StepPlan:
        """Ask the policy; the plan of `fcfs` depends on nothing that changes, so it is asked once."""
        if self._constant_plan is not None:
            return self._constant_plan
        plan = self.policy.plan(view or self._view(now, residual_s))
        if self._open:
            self._constant_plan = plan
        return plan

    def _view(self, now: float, residual_s: float) -> EngineView:
        pool, config = self.pool, self.config
        return EngineView(
            now_s=now,
            ledger=self.ledger,
            cost=self.belief,
            demand=self.gate.demand,
            kv=KvView(block_size=pool.block_size, total_blocks=pool.total, free_blocks=pool.free),
            max_step_tokens=config.token_budget,
            max_running=config.max_running,
            max_model_len=config.max_model_len,
            residual_s=residual_s,
            ahead=config.async_lag,
            blocking_s=self.blocking_s,
        )

    def _collect(self, now: float) -> None:
        """The step in flight ended: first tokens, finished requests, and its time to learn from."""
        flight, self._flight = self._flight, None
        step, ledger, batcher = self.step, self.ledger, self.batcher
        if self.times is not None:
            now = float(self._ends.slice(step, step)[0])
        if self._learns:
            self.belief.observe(flight.step())
        for chunk in flight.batch.chunks:
            job = chunk.job
            # Its last chunk may be planned already (async_lag) although this one was not the last.
            if job.version != chunk.version or chunk.context + chunk.tokens < job.state.target_tokens:
                continue
            if job.state.first_token_s is None:
                self.gate.queued_tokens -= job.state.prompt_tokens
            batcher.enter_decode(job, step)
            ledger.token(job.state.id, now)
            heapq.heappush(self._finishing, (job.finish_step, job.row, job.version, job))
        finishing = self._finishing
        while finishing and finishing[0][0] <= step:
            _, _, version, job = heapq.heappop(finishing)
            if version != job.version:
                continue
            times = self._ends.slice(job.first_step, step)
            job.state.last_token_s = now
            ledger.finish(job.state.id)
            batcher.leave(job, step)
            self.recorder.finished(job, times)

    def _decide(self, now: float, residual_s: float) -> EngineView | None:
        """Put new and deferred requests before the admission test; return the view of decisions, if there were any."""
        ledger, gate = self.ledger, self.gate
        if gate.inbox:
            gate.take_in(now)
        if not self._blind and (ledger.undecided or ledger.pending or self._may_hold()):
            self._tell()
        if not (ledger.undecided or (ledger.pending and not self._blind)):
            return None
        view = self._view(now, residual_s)
        gate.answer(view)
        return view

    def _tell(self) -> None:
        """Tell the ledger of every token up to the last step that ended."""
        step = self.step - (self._flight is not None)
        if not step:
            return
        end = float(self._ends.slice(step, step)[0])
        for job in self.batcher.decoding.values():
            count = job.out_shift + step - job.state.output_tokens
            if count > 0:
                self.ledger.token(job.state.id, end, count)

    def _settle(self, job: Job) -> None:
        """The run of one token a step of a decode breaks: keep the times of its tokens."""
        step = self.step
        times = self._ends.slice(job.first_step, step)
        job.early.extend(times.tolist())
        job.first_step = step + 1
        count = job.out_shift + step - job.state.output_tokens
        if count > 0:
            self.ledger.token(job.state.id, job.early[-1], count)

    # Running

    def _execute(self, batch: Batch, now: float) -> float:
        """Issue one step; return when it ends."""
        batcher = self.batcher
        self.step = step = self.step + 1
        n, K = len(batcher.decoding), batcher.context
        if batch.held:
            n -= len(batch.held)
            K -= sum(job.kv_shift + step + 1 for job in batch.held)
        q, X = batch.work() if batch.chunks else (0, 0.0)
        measured = None if self.times is None else self.times(now, q, n, K, X)
        if measured is None:
            price = self.truth.seconds(q, n, K, X)
            seconds = price * self.noise.next(price)
            ended = end = now + seconds
        else:
            ended, end, seconds = measured
        batcher.context += n
        self._ends.append(ended)
        self.busy_s += seconds
        self.steps_with_prefill += q > 0
        for chunk in batch.chunks:
            if chunk.job.start_s is None:
                chunk.job.start_s = now
        self._flight = Flight(batch, q, n, K, X, seconds)
        if self.on_step is not None:
            self.on_step(Issued(step, now, end, self._flight.step(), batch, batcher.decoding.values()))
        if len(self._ends) >= self._trim_at:
            self._trim()
        return end

    def _may_run_ahead(self, batch: Batch) -> bool:
        """Whether nothing can be decided before a request arrives or ends.

        Under vLLM's own order a queue that could not start now cannot start before somebody leaves: blocks only get
        fewer while everybody decodes, and the budget lacks only where the decodes alone spend it.
        """
        if not self.config.fast or self.times is not None or not self._steady or batch.chunks or batch.held:
            return False
        if self.gate.inbox or self.ledger.undecided:
            return False
        if self._may_hold():
            return False
        if not self.ledger.pending:
            return True
        return self._open and not self.config.async_lag and not self.batcher.preempted

    def _may_hold(self) -> bool:
        """Whether decodes without a pace may have to skip a step for those with one."""
        return 0 < len(self.ledger.loose) < len(self.ledger.decoding) and self.policy.name == "headway"

    def _run_ahead(self, batch: Batch, now: float, horizon: float) -> float:
        """Execute decode-only steps up to the first that ends a request or ends at or after `horizon`.

        The blocks of the first one are allocated already.
        """
        batcher, truth, finishing = self.batcher, self.truth, self._finishing
        while finishing[0][2] != finishing[0][3].version:
            heapq.heappop(finishing)
        n, K, first = len(batcher.decoding), batcher.context, self.step + 1
        most = min(finishing[0][0] - self.step, _MOST_AHEAD)
        base = truth.seconds(0, n, K, 0.0)
        if horizon - now < most * base:
            most = min(most, int((horizon - now) / base) + 2)
        most = batcher.affordable(first, most)
        if most < 8 or self.on_step is not None:
            return self._run_few(batch, now, horizon, most)
        contexts = K + n * np.arange(most)
        prices = truth.decode_only(n, contexts)
        seconds = prices * self.noise.peek(prices)
        ends = np.cumsum(np.concatenate(([now], seconds)))
        count = int(np.searchsorted(ends[:-1], horizon, side="left"))  # steps that start before the horizon
        self.noise.skip(count)
        self._ends.extend(ends[1 : count + 1])
        self.busy_s = float(np.cumsum(np.concatenate(([self.busy_s], seconds[:count])))[-1])
        batcher.allocate(first + 1, first + count - 1)
        batcher.context += n * count
        self.step += count
        if self._learns:
            for j, each in enumerate(seconds[: count - 1].tolist()):
                self.belief.observe(Step(q=0, n=n, K=K + n * j, X=0.0, seconds=each))
        self._flight = Flight(batch, 0, n, K + n * (count - 1), 0.0, float(seconds[count - 1]))
        if len(self._ends) >= self._trim_at:
            self._trim()
        return float(ends[count])

    def _run_few(self, batch: Batch, now: float, horizon: float, most: int) -> float:
        """The same one by one: cheaper for a handful of steps."""
        end = self._execute(batch, now)
        for _ in range(most - 1):
            if end >= horizon:
                break
            if self._learns:
                self.belief.observe(self._flight.step())
            self.batcher.allocate(self.step + 1, self.step + 1)
            end = self._execute(batch, end)
        return end

    def _trim(self) -> None:
        """Forget step ends that no running request needs."""
        oldest = min((job.first_step for job in self.batcher.decoding.values()), default=self.step)
        self._ends.drop_before(min(oldest, self.step - 1))  # the last one that ended is asked for
        self._trim_at = 2 * len(self._ends) + 65_536

    def _wait(self, now: float) -> float | None:
        """Nothing can run: look again soon while somebody waits for a verdict or a plan, else sleep."""
        self._idle_polls += 1
        if self._idle_polls > _MAX_IDLE_POLLS:
            longest_s = _MAX_IDLE_POLLS * POLL_S
            for stuck in self.ledger.requests.values():
                # Deferred ones are answered at their deadline, which may be far.
                if stuck.id not in self.gate.undecided or now > stuck.due_s + longest_s:
                    raise StarvationError(
                        f"policy {self.policy.name}, admission {self.admission.name}: nothing ran for "
                        f"{longest_s:.0f} s while {stuck!r} waited"
                    )
        self.idle = True
        return now + POLL_S

    # For the simulation

    def open_jobs(self) -> list[Job]:
        """Return every request that the engine has taken and not answered."""
        return [
            *self.gate.inbox,
            *self.gate.undecided.values(),
            *self.batcher.waiting.values(),
            *self.batcher.running.values(),
        ]

    def times_so_far(self, job: Job, until_s: float) -> list[float]:
        """Return the times of the tokens that an open request has got by `until_s`."""
        times = list(job.early)
        if job.state.id in self.batcher.decoding:
            times += self._ends.slice(job.first_step, self.step).tolist()
        return [each for each in times if each <= until_s]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken (for tests, at a boundary)."""
        self._tell()
        self.ledger.check()
        self.batcher.check(self.step)
