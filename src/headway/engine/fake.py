"""A scripted engine for tests and for those who write a policy or an admission test: the real Driver, no vLLM.

    from headway.config import Config
    from headway.engine.fake import FakeEngine

    engine = FakeEngine(Config(), policy=MyPolicy())
    engine.add("a", prompt_tokens=300, output_tokens=4, ttft_ms=500)
    for event in engine.run():
        print(event)

It keeps vLLM's rules: running requests before waiting ones, chunks inside a token budget, paged KV, the last running
request preempted when the pool is empty, and its own order where there is no plan. Its clock starts at 0 and moves by
tau(q, n, K, X) a step, so every time can be computed by hand; the same calls give the same events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.config import Config
from headway.core import Admission, CostCoefficients, KvView, Policy, StepCost, StepPlan
from headway.engine.base import EngineFacts, RequestTag
from headway.engine.driver import Driver
from headway.engine.report import Message

#: 20 ms a step, 1 ms a prompt token, 1 ms a decode: round numbers for sums in the head.
ROUND = CostCoefficients(g=0.02, a=0.001, b=0.001)

#: Time of a step that finds nothing to compute while requests wait for an answer.
EMPTY_STEP_S = 0.001


class Event(NamedTuple):
    """What happened to a request: "token", "finished", "refused" or "preempted"."""

    at_s: float
    kind: str
    request: str


@dataclass(slots=True)
class _Live:
    prompt: int
    output: int  # tokens that it really produces
    computed: int = 0
    produced: int = 0

    @property
    def wanted(self) -> int:
        return self.prompt + self.produced - self.computed


class FakeEngine:
    """One engine whose steps cost exactly what its coefficients say.

    Args:
        config: classes and settings; its policy and admission are used unless objects are given.
        policy: policy object, need not be registered.
        admission: admission object, need not be registered.
        coefficients: the true cost of a step.
        cost: what the decisions believe a step costs; default the truth, known from the start.
        blocks: KV blocks of `block_size` tokens in the pool.
        max_step_tokens: largest token budget.
        max_running: slots.
        max_model_len: longest prompt plus output.

    Attributes:
        driver: the driver under test.
        coefficients: the true cost of a step; may change between steps.
        now_s: the engine's clock.
        messages: what the driver reported, in order (for the metrics, see report.py).
        steps: (q, n, seconds) of every step that computed something.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        policy: Policy | None = None,
        admission: Admission | None = None,
        coefficients: CostCoefficients = ROUND,
        cost: StepCost | None = None,
        blocks: int = 10_000,
        block_size: int = 16,
        max_step_tokens: int = 512,
        max_running: int = 64,
        max_model_len: int = 4096,
    ) -> None:
        self.driver = Driver(config or Config(), cost=cost or StepCost.fixed(coefficients))
        self.driver.policy = policy or self.driver.policy
        self.driver.admission = admission or self.driver.admission
        self.now_s = 0.0
        self.messages: list[Message] = []
        self.steps: list[tuple[int, int, float]] = []
        self.coefficients = coefficients
        self._kv = KvView(block_size=block_size, total_blocks=blocks, free_blocks=blocks)
        self._limits = {
            "max_step_tokens": max_step_tokens,
            "max_running": max_running,
            "max_model_len": max_model_len,
        }
        self._live: dict[str, _Live] = {}
        self._running: list[str] = []
        self._waiting: list[str] = []
        self._events: list[Event] = []

    def add(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int = 1,
        max_tokens: int | None = None,
        cached_tokens: int = 0,
        priority: int = 0,
        **tag: Any,
    ) -> None:
        """A request arrives now.

        Args:
            request_id: its name.
            prompt_tokens: length of its prompt.
            output_tokens: tokens it will produce.
            max_tokens: what its client asked for at most; default `output_tokens`.
            cached_tokens: prompt tokens that the prefix cache holds.
            priority: vLLM's, smaller is sooner.
            tag: fields of `RequestTag` (slo_class, ttft_ms, group, size, ...).
        """
        self._live[request_id] = _Live(prompt_tokens, output_tokens, min(cached_tokens, prompt_tokens - 1))
        self._waiting.append(request_id)
        self.driver.arrive(
            request_id,
            now_s=self.now_s,
            unix_s=self.now_s,
            prompt_tokens=prompt_tokens,
            max_tokens=output_tokens if max_tokens is None else max_tokens,
            tag=RequestTag(**({"group": request_id} | tag)),
            cached_tokens=cached_tokens,
            priority=priority,
        )

    def abort(self, request_id: str) -> None:
        """The client of a request went away."""
        self._drop(request_id)
        self.driver.finished(request_id, now_s=self.now_s, aborted=True)

    def step(self) -> list[Event]:
        """Run one step; return what happened in it."""
        self._events = []
        facts = EngineFacts(now_s=self.now_s, kv=self.kv, **self._limits)
        plan, refused = self.driver.begin_step(facts)
        for request_id in refused:
            self._drop(request_id)
            self._note("refused", request_id)
        tokens = self._schedule(plan)
        for request_id, count in tokens.items():
            self._live[request_id].computed += count
        self.driver.issued(tokens, lambda i: self._live[i].computed, now_s=self.now_s)
        flight = self.driver.recorder.in_flight
        assert flight is not None
        if tokens:
            seconds = self.coefficients.seconds(flight.q, flight.n, flight.K, flight.X)
            self.steps.append((flight.q, flight.n, seconds))
        else:
            seconds = EMPTY_STEP_S if self._live else 0.0
        self.now_s += seconds
        made = [i for i in tokens if self._live[i].wanted == 0]
        ended = []
        for request_id in made:
            live = self._live[request_id]
            live.produced += 1
            self._note("token", request_id)
            if live.produced >= live.output:
                ended.append(request_id)
                self._drop(request_id)
        self.driver.completed(dict.fromkeys(made, 1), now_s=self.now_s, idle=not self._live)
        for request_id in ended:
            self._note("finished", request_id)
            self.driver.finished(request_id, now_s=self.now_s)
        self.messages += self.driver.report.take(None).get(0, [])
        return self._events

    def run(self, until_s: float = math.inf, *, most_steps: int = 100_000) -> list[Event]:
        """Step until nothing is left or the clock has reached `until_s`, which it then shows; return all events.

        Raises:
            RuntimeError: `most_steps` steps did not suffice (a policy that starves a request).
        """
        events: list[Event] = []
        for _ in range(most_steps):
            if not self._live or self.now_s >= until_s:
                break
            events += self.step()
        else:
            raise RuntimeError(f"still not done after {most_steps} steps: {', '.join(self._live)}")
        if math.isfinite(until_s):
            self.now_s = max(self.now_s, until_s)
        return events

    @property
    def kv(self) -> KvView:
        """The KV pool as it is now."""
        used = sum(self._kv.blocks(self._live[i].computed) for i in self._running)
        total = self._kv.total_blocks
        return KvView(block_size=self._kv.block_size, total_blocks=total, free_blocks=total - used)

    def _schedule(self, plan: StepPlan | None) -> dict[str, int]:
        left = plan.token_budget if plan else self._limits["max_step_tokens"]
        tokens: dict[str, int] = {}
        if plan and plan.victims:
            place = {request_id: i for i, request_id in enumerate(reversed(plan.victims))}
            self._running.sort(key=lambda i: place.get(i, -1))
        short = False
        for request_id in list(self._running):
            count = self._granted(request_id, plan, left)
            while count and request_id in self._running and not self._fits(request_id, count):
                self._preempt(self._running[-1])
                short = True
            if count and request_id in self._running:
                tokens[request_id] = count
                left -= count
        for request_id in () if short else self._startable(plan):
            count = self._granted(request_id, plan, left)
            if not count or len(self._running) >= self._limits["max_running"] or not self._fits(request_id, count):
                break
            self._waiting.remove(request_id)
            self._running.append(request_id)
            tokens[request_id] = count
            left -= count
        return tokens

    def _startable(self, plan: StepPlan | None) -> Sequence[str]:
        if plan is not None and plan.starts is not None:
            return [i for i in plan.starts if i in self._waiting]
        undecided = self.driver.ledger.undecided
        return [i for i in self._waiting if plan is None or i not in undecided]

    def _granted(self, request_id: str, plan: StepPlan | None, left: int) -> int:
        live = self._live[request_id]
        count = min(left, live.wanted)
        if plan is not None and not plan.open_chunks:
            state = self.driver.ledger.requests[request_id]
            if request_id in self.driver.ledger.decoding:
                return 0 if request_id in plan.held else count
            count = min(count, plan.chunks.get(state.id, 0))
        return max(count, 0)

    def _fits(self, request_id: str, count: int) -> bool:
        live = self._live[request_id]
        held = self._kv.blocks(live.computed) if request_id in self._running else 0
        return self._kv.blocks(live.computed + count) - held <= self.kv.free_blocks

    def _preempt(self, request_id: str) -> None:
        self._running.remove(request_id)
        self._waiting.insert(0, request_id)
        self._live[request_id].computed = 0
        self._note("preempted", request_id)
        self.driver.preempted(request_id)

    def _drop(self, request_id: str) -> None:
        del self._live[request_id]
        for queue in (self._running, self._waiting):
            if request_id in queue:
                queue.remove(request_id)

    def _note(self, kind: str, request_id: str) -> None:
        self._events.append(Event(self.now_s, kind, request_id))
