"""From a plan to what really runs in a step, as vLLM's scheduler does it.

vLLM 0.32 (v1/core/sched/scheduler.py): running requests first, in the order in which they started, each with as many
tokens as it lacks and the budget allows; when a block is missing the last one started is preempted, loses its KV and
goes to the head of the queue; then, if nobody was preempted, waiting requests in order, each only if its WHOLE
prompt fits the free blocks now. A plan of Headway changes order, chunks and victims, never these rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core import Ledger, Phase, StepPlan
from headway.twin.job import Job
from headway.twin.kv import KvPool


class Chunk(NamedTuple):
    """Prompt tokens of one prefill in one step; `version` tells whether the job was preempted since."""

    job: Job
    tokens: int
    context: int
    version: int


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a step computes besides its decodes: chunks in order of execution, and the decodes that skip it."""

    chunks: list[Chunk] = field(default_factory=list)
    held: list[Job] = field(default_factory=list)

    def work(self) -> tuple[int, float]:
        """Return q and X of the step: prompt tokens and the token pairs of their attention (`headway.core.cost`)."""
        q, pairs = 0, 0.0
        for chunk in self.chunks:
            q += chunk.tokens
            pairs += chunk.tokens * (chunk.context + chunk.tokens / 2)
        return q, pairs


class Batcher:
    """Running and waiting requests of one engine and the blocks that they hold.

    Attributes:
        decoding: jobs that produce tokens, in the order in which they entered decode.
        prefilling: started jobs whose prompt is not computed, in the order in which they started.
        waiting: accepted jobs that hold nothing, in vLLM's queue order.
        phases: phases[w % block_size] decodes need a new block in step w.
        context: K, context tokens of all decodes, equal to the ledger's once that is told of every token.
        preemptions: how many there were.

    `settle` is called before the run of one token a step of a decode is broken: it must tell the ledger of the
    tokens so far and keep their times.
    """

    def __init__(self, *, ledger: Ledger, pool: KvPool, max_running: int, settle: Callable[[Job], None]) -> None:
        self.ledger = ledger
        self.pool = pool
        self.max_running = max_running
        self.running: dict[str, Job] = {}
        self.decoding: dict[str, Job] = {}
        self.prefilling: dict[str, Job] = {}
        self.waiting: OrderedDict[str, Job] = OrderedDict()
        self.phases = [0] * pool.block_size
        self.context = 0
        self.preemptions = 0
        self._settle = settle
        self.preempted = False  # anybody, while the current step was built
        self._held: set[str] = set()  # decodes that skip the current step

    # Decodes

    def enter_decode(self, job: Job, step: int) -> None:
        """The prompt of `job` was completed in `step`, which also gave one token."""
        del self.prefilling[job.state.id]
        self.decoding[job.state.id] = job
        job.first_step = step
        job.out_shift = job.state.output_tokens + 1 - step
        job.kv_shift = job.state.target_tokens - step
        job.finish_step = job.output - job.out_shift
        job.version += 1
        job.plain = 0  # from here on it follows from the step number
        self.context += job.state.target_tokens + 1
        self.phases[(1 - job.kv_shift) % self.pool.block_size] += 1

    def leave(self, job: Job, step: int) -> None:
        """Drop a running job after `step` and free its blocks."""
        request_id = job.state.id
        del self.running[request_id]
        if request_id in self.decoding:
            del self.decoding[request_id]
            self.phases[(1 - job.kv_shift) % self.pool.block_size] -= 1
            self.context -= job.kv_shift + step + 1
            job.plain = self.pool.blocks(job.kv_shift + step) - len(job.held)
        else:
            del self.prefilling[request_id]
        self.pool.release(job.held, job.plain)
        job.held, job.plain, job.registered = [], 0, 0

    # Building a step

    def begin(self, plan: StepPlan, step: int, batch: Batch) -> None:
        """Fix which decodes run in `step` and give them their blocks, preempting where the pool runs dry."""
        self.preempted = False
        decoding = self.decoding
        if plan.held:
            batch.held = [decoding[request_id] for request_id in plan.held if request_id in decoding]
        over = len(decoding) - len(batch.held) - plan.token_budget
        if over > 0:  # the last ones find the budget spent
            held = {job.state.id for job in batch.held}
            batch.held += [job for key, job in reversed(decoding.items()) if key not in held][:over]
        for job in batch.held:
            self._hold(job, step)
        self._held = {job.state.id for job in batch.held}
        need = self.phases[step % self.pool.block_size]
        # A step later its phase is that of a block which it took in the step before.
        need -= sum((job.kv_shift + step - 1) % self.pool.block_size == 0 for job in batch.held)
        if need > self.pool.free:
            self._allocate_one_by_one(plan, step)
            batch.held = [job for job in batch.held if job.state.id in decoding]
        elif need:
            self.pool.take(need)

    def fill(self, plan: StepPlan, step: int, batch: Batch, decodes: int) -> None:
        """Add the chunks of `step`, in which `decodes` requests decode; the ledger is told of every chunk."""
        left = plan.token_budget - decodes
        if self.prefilling and left > 0:
            left = self._continue(plan, batch, left, step)
        if self.waiting and left > 0 and not self.preempted:
            self._start(plan, batch, left)

    def affordable(self, first: int, most: int) -> int:
        """Return how many steps from `first` on the decodes can run before the pool is dry, 1..most.

        The blocks of step `first` are allocated already.
        """
        size, free = self.pool.block_size, self.pool.free
        if (most // size + 1) * len(self.decoding) <= free:
            return most
        for count in range(1, most):
            free -= self.phases[(first + count) % size]
            if free < 0:
                return count
        return most

    def allocate(self, first: int, last: int) -> None:
        """Give the decodes their blocks for steps first..last, which the pool can afford."""
        size = self.pool.block_size
        if first == last:
            need = self.phases[first % size]
        else:
            count = last - first + 1
            need = count // size * len(self.decoding)
            need += sum(self.phases[step % size] for step in range(first, first + count % size))
        if need:
            self.pool.take(need)

    def _hold(self, job: Job, step: int) -> None:
        """The decode skips `step`: everything about it happens a step later."""
        self._settle(job)
        size = self.pool.block_size
        self.phases[(1 - job.kv_shift) % size] -= 1
        job.first_step = step + 1
        job.kv_shift -= 1
        job.out_shift -= 1
        job.finish_step += 1
        job.version += 1
        self.phases[(1 - job.kv_shift) % size] += 1

    def release(self, job: Job) -> None:
        """Undo `_hold`: the step does not come, or the job loses its blocks in it."""
        size = self.pool.block_size
        self.phases[(1 - job.kv_shift) % size] -= 1
        job.first_step -= 1
        job.kv_shift += 1
        job.out_shift += 1
        job.finish_step -= 1
        job.version += 1
        self.phases[(1 - job.kv_shift) % size] += 1

    def _needs_block(self, job: Job, step: int) -> bool:
        """Whether a decode runs in `step` and crosses a block boundary there."""
        return job.state.id not in self._held and (job.kv_shift + step - 1) % self.pool.block_size == 0

    def _allocate_one_by_one(self, plan: StepPlan, step: int) -> None:
        """The pool runs dry: give blocks in running order, preempt for those that get none."""
        given: set[str] = set()
        for job in list(self.decoding.values()):
            if job.state.id not in self.decoding or not self._needs_block(job, step):
                continue
            while self.pool.free < 1:
                victim = self._victim(plan, step)
                self._preempt(victim, step, victim.state.id in given)
                if victim is job:
                    break
            else:
                self.pool.take(1)
                given.add(job.state.id)

    def _victim(self, plan: StepPlan, step: int) -> Job:
        """Return who loses its blocks: by the plan's order, then the last one started.

        A decode whose last token is in flight (asynchronous scheduling) leaves by itself.
        """
        for request_id in plan.victims:
            job = self.running.get(request_id)
            if job is not None and not (request_id in self.decoding and job.finish_step < step):
                return job
        for request_id, job in reversed(self.running.items()):
            if not (request_id in self.decoding and job.finish_step < step):
                return job
        raise AssertionError("a request that needs a block is running")

    def _preempt(self, job: Job, step: int, given: bool) -> None:
        """Take all blocks from a running job before `step` is executed and put it at the head of the queue.

        `given`: it is a decode that already got its new block for this step.
        """
        state = job.state
        if state.id in self._held:
            self._held.discard(state.id)
            self.release(job)
        if state.id in self.decoding:
            self._settle(job)
            computed = job.kv_shift + step - 1
        else:
            computed = state.computed_tokens
        if self.pool.caching:  # its full blocks can be found again until others take them
            job.private = max(job.private, computed // self.pool.block_size)
            job.known_keys = None
            self._register(job, computed)
        self.leave(job, step - 1)
        if given:
            self.pool.release([], 1)
        self.ledger.preempt(state.id)
        self.preemptions += 1
        self.preempted = True
        job.version += 1
        job.known_keys = None
        self.waiting[state.id] = job
        self.waiting.move_to_end(state.id, last=False)

    def _continue(self, plan: StepPlan, batch: Batch, left: int, step: int) -> int:
        """Give chunks to started prefills; return the budget that is left."""
        if plan.open_chunks:
            order: Iterable[Job] = list(self.prefilling.values())
        else:
            order = [self.prefilling[key] for key in plan.chunks if key in self.prefilling]
        for job in order:
            state = job.state
            if state.id not in self.prefilling:
                continue  # preempted by one before it
            tokens = min(left, state.target_tokens - state.computed_tokens)
            if not plan.open_chunks:
                tokens = min(tokens, plan.chunks[state.id])
            if tokens <= 0:
                continue
            need = self.pool.blocks(state.computed_tokens + tokens) - len(job.held) - job.plain
            while self.pool.free < need:
                victim = self._victim(plan, step)
                decodes = victim.state.id in self.decoding
                left += self._withdraw(batch, victim) + decodes
                self._preempt(victim, step, decodes and self._needs_block(victim, step))
                if victim is job:
                    break
            else:
                self._grant(batch, job, tokens, need)
                left -= tokens
                continue
            break
        return left

    @staticmethod
    def _withdraw(batch: Batch, victim: Job) -> int:
        """Take a victim's chunk out of the step; return its tokens."""
        tokens = sum(chunk.tokens for chunk in batch.chunks if chunk.job is victim)
        if tokens:
            batch.chunks = [chunk for chunk in batch.chunks if chunk.job is not victim]
        return tokens

    def _start(self, plan: StepPlan, batch: Batch, left: int) -> None:
        """Start waiting requests in order until budget, slots or blocks end."""
        pool = self.pool
        named = None if plan.open_chunks or plan.starts is None else iter(plan.starts)
        while left > 0 and len(self.running) < self.max_running:
            if named is None:
                job = next(iter(self.waiting.values()), None)
            else:
                job = next((self.waiting[key] for key in named if key in self.waiting), None)
            if job is None:
                return
            state = job.state
            keys = self.lookup(job)
            hit = len(keys) * pool.block_size if pool.caching else state.computed_tokens
            tokens = min(left, state.target_tokens - hit)
            if not plan.open_chunks:
                tokens = min(tokens, plan.granted(state, hit))
                if tokens <= 0:
                    if named is None:
                        return
                    continue
            # vLLM reserves for the whole prompt (scheduler_reserve_full_isl), then allocates for the chunk.
            if pool.blocks(state.target_tokens) - len(keys) + pool.idle(keys) > pool.free:
                return
            del self.waiting[state.id]
            self.running[state.id] = job
            self.prefilling[state.id] = job
            pool.acquire(keys)
            job.held, job.registered = keys, len(keys)
            if job.state.preemptions == 0:
                job.hit_tokens = hit
            if hit != state.computed_tokens:
                self.ledger.set_computed(state.id, hit)
            self._grant(batch, job, tokens, pool.blocks(hit + tokens) - len(keys))
            left -= tokens

    def _grant(self, batch: Batch, job: Job, tokens: int, need: int) -> None:
        if need:
            self.pool.take(need)
            job.plain += need
        context = job.state.computed_tokens
        self.ledger.schedule(job.state.id, tokens)
        if self.pool.caching and job.ids is not None:
            self._register(job, context + tokens)
        batch.chunks.append(Chunk(job, tokens, context, job.version))

    def _register(self, job: Job, computed: int) -> None:
        """Offer the full blocks of `computed` tokens to the cache."""
        size = self.pool.block_size
        full = computed // size
        if full <= job.registered:
            return
        keys = job.keys(size, computed)
        for block in range(job.registered, min(full, len(keys))):
            if self.pool.register(keys[block]):
                job.held.append(keys[block])
                job.plain -= 1
        job.registered = full

    def lookup(self, job: Job) -> list[Hashable]:
        """Return the leading blocks of a waiting job that are in the cache, at most all but its last token."""
        if not self.pool.caching:
            return []
        if job.known_keys is None:
            job.known_keys = job.keys(self.pool.block_size, job.state.target_tokens - 1)
        return job.known_keys[: self.pool.hits(job.known_keys)]

    def check(self, step: int) -> None:
        """Raise AssertionError when an invariant is broken (between steps, `step` the last one issued)."""
        self.pool.check()
        assert self.running.keys() == self.decoding.keys() | self.prefilling.keys()
        assert not self.running.keys() & self.waiting.keys()
        assert all(job.state.phase is Phase.WAITING for job in self.waiting.values())
        assert sum(self.phases) == len(self.decoding)
        if not self.pool.caching:
            held = sum(job.plain for job in self.prefilling.values())
            held += sum(self.pool.blocks(job.kv_shift + step) for job in self.decoding.values())
            assert self.pool.total - self.pool.free == held
            assert self.context == sum(job.kv_shift + step + 1 for job in self.decoding.values())
