"""The scheduler that vLLM runs: `--scheduler-cls headway.engine.vllm.scheduler.HeadwayScheduler`.

Extends vLLM's AsyncScheduler (which also serves platforms without asynchronous scheduling) and touches it in five
places: new requests, the start of a step, the size of a chunk, the outputs of a step, and the end of a request.
Allocation, state and correctness stay vLLM's. How a plan is applied:

    token_budget   max_num_scheduled_tokens for this step
    chunks, held   `_reserve_prefill_lookahead`, the last word on a request's tokens in both of vLLM's loops: 0 skips
                   a running request and ends the scan of the waiting ones
    starts         moved to the head of the waiting queue, in order
    victims        moved to the tail of `running`, where vLLM takes its victims

Requests that the driver does not know (pooling, open sessions, those left from a failure of its books) are served as
vLLM would: before the others, with the whole budget. Nothing that Headway raises reaches vLLM.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from headway import __version__
from headway.config import Config
from headway.core import KvView, Phase, StepPlan
from headway.core.compiling import failures
from headway.engine.base import EngineFacts, RequestTag
from headway.engine.driver import Driver
from headway.engine.recorder import StepRecorder
from headway.engine.vllm import profile, versions
from headway.engine.vllm.messages import CARRIER_ID, ENV_STEP_LOG, REFUSED, XARG, config_from_environment, decode_tag
from headway.engine.vllm.siblings import Siblings
from headway.errors import InputError

logger = logging.getLogger("headway")

#: Seconds between two engine messages for the metrics.
GAUGES_EVERY_S = 0.25

#: Steps after which the learned cost is saved: when the engine falls idle, and at the latest.
SAVE_IDLE_STEPS = 50
SAVE_STEPS = 2000


class HeadwayScheduler(AsyncScheduler):
    """vLLM's scheduler with Headway's decisions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        versions.check()
        super().__init__(*args, **kwargs)
        if failures:
            logger.warning("headway: admission is not compiled, so it takes longer: %s", next(iter(failures.values())))
        config = config_from_environment()
        if self.policy is not SchedulingPolicy.FCFS and config.policy != "fcfs":
            raise InputError("--scheduling-policy priority: expected fcfs, because Headway's policy orders the queue")
        self._profile = profile.path_for(self.vllm_config)
        cost = profile.load(self._profile, eps=config.eps)
        self._driver = Driver(config, cost=cost, recorder=StepRecorder(os.environ.get(ENV_STEP_LOG)))
        self._step_tokens = self.max_num_scheduled_tokens
        self._plan: StepPlan | None = None
        self._siblings = Siblings()
        self._outbox: dict[int, list[EngineCoreOutput]] = defaultdict(list)  # ends of refused requests, by client
        self._gauges_at = 0.0
        self._saved_steps = self._driver.cost.steps
        if self._driver.recorder.log is not None:
            self._driver.recorder.log.started(self._about(config))

    def _about(self, config: Config) -> dict[str, Any]:
        """Return what a reader of the step log must know of this engine."""
        pool, cost = self.kv_cache_manager.block_pool, self._driver.cost
        return {
            "unix_s": round(time.time(), 3),
            "model": str(self.vllm_config.model_config.model),
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "device": profile.device(self.vllm_config),
            "versions": {"headway": __version__, "vllm": " ".join(versions.installed() or ())},
            "engine": {
                "token_budget": self._step_tokens,
                "max_running": self.max_num_active_reqs,
                "max_model_len": self.max_model_len,
                "block_size": self.block_size,
                "kv_blocks": pool.num_gpu_blocks - 1,  # vLLM keeps one empty block
                "prefix_cache": bool(self.cache_config.enable_prefix_caching),
                "async_lag": bool(self.vllm_config.scheduler_config.async_scheduling),
            },
            "config": config.model_dump(mode="json", by_alias=True),
            "cost": {key: getattr(cost.mean, key) for key in ("g", "a", "b", "k", "x")} if cost.ready else None,
        }

    # New requests

    def add_request(self, request: Request) -> None:
        """Let vLLM queue the request; unless it is an open session, decide about it at the next step."""
        known = request.request_id in self.requests
        super().add_request(request)
        if known or request.resumable or request.sampling_params is None or request.abort_immediately:
            return
        self._tell(self._arrive, request)

    def _arrive(self, request: Request) -> None:
        tag = decode_tag((request.sampling_params.extra_args or {}).get(XARG))
        cached, follows = self._cached_tokens(request, tag)
        self._driver.arrive(
            request.request_id,
            now_s=time.monotonic(),
            unix_s=time.time(),
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            tag=tag,
            arrival_unix_s=request.arrival_time,
            cached_tokens=cached,
            follows=follows,
            priority=request.priority,
            client=request.client_index,
        )

    def _cached_tokens(self, request: Request, tag: RequestTag | None) -> tuple[int, str | None]:
        """Prompt tokens that the prefix cache holds now (a look without side effects) or will once a sibling started.

        Who that sibling is comes second, None when the cache has as much.
        """
        if not self.cache_config.enable_prefix_caching or request.skip_reading_prefix_cache:
            return 0, None
        held = int(self.kv_cache_manager.get_computed_blocks(request)[1])
        # Models with several kinds of KV find other hits, so there only what is held counts.
        if tag is None or tag.size <= 1 or len(self.kv_cache_config.kv_cache_groups) != 1:
            return held, None
        hashes = request.block_hashes
        count, sibling = self._siblings.shared(request.request_id, hashes, group=tag.group, size=tag.size)
        tokens = min(count * self.hash_block_size, request.num_prompt_tokens - 1)
        tokens -= tokens % self.block_size
        return (tokens, sibling) if tokens > held and sibling in self._driver.ledger.requests else (held, None)

    # A step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Decide, plan, and let vLLM build the step under that plan."""
        driver = self._driver
        plan, refused = driver.begin_step(self._facts())
        if refused:
            self._refuse(refused)
        if refused and driver.recorder.in_flight is None:
            # Refusals leave with the outputs of a step. An empty one takes about a millisecond and sends them now,
            # the next full one would send them when it ends.
            self.max_num_scheduled_tokens = 0
        elif plan is not None:
            try:
                self._apply(plan)
            except Exception:
                driver.failed("a plan could not be applied; this step runs as the engine alone would")
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._plan = None
            self.max_num_scheduled_tokens = self._step_tokens
        requests = self.requests
        self._tell(
            driver.issued,
            output.num_scheduled_tokens,
            lambda i: requests[i].num_computed_tokens,
            now_s=time.monotonic(),
        )
        return output

    def _tell(self, book: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Tell the driver what happened; when its books fail, vLLM goes on alone with the requests that it has."""
        try:
            book(*args, **kwargs)
        except Exception:
            self._driver.start_over()

    def _facts(self) -> EngineFacts:
        driver, pool = self._driver, self.kv_cache_manager.block_pool
        now = time.monotonic()
        flight = driver.recorder.in_flight
        residual = 0.0
        if flight is not None:
            predicted = driver.cost.envelope(flight.q, flight.n, flight.K, flight.X)
            residual = driver.recorder.residual_s(now, predicted)
        return EngineFacts(
            now_s=now,
            kv=KvView(
                block_size=self.block_size,
                total_blocks=pool.num_gpu_blocks,
                free_blocks=pool.get_num_free_blocks(),
            ),
            max_step_tokens=self._step_tokens,
            max_running=self.max_num_active_reqs,
            max_model_len=self.max_model_len,
            residual_s=residual,
            ahead=bool(self.vllm_config.scheduler_config.async_scheduling),
        )

    def _apply(self, plan: StepPlan) -> None:
        """Order the queues as planned and set the budget; the chunks are capped as vLLM asks for them."""
        ledger = self._driver.ledger
        if plan.open_chunks:
            # vLLM's own order, apart from requests without a verdict: those wait behind the others. (vLLM's priority
            # queue has no such place; there they are served before their verdict.)
            if ledger.undecided and self.policy is SchedulingPolicy.FCFS:
                undecided = [r for r in self.waiting if r.request_id in ledger.undecided]
                self.waiting.remove_requests(undecided)
                for request in undecided:
                    self.waiting.add_request(request)
                self._plan = plan
            return
        budget = plan.token_budget
        head: list[Request] = []
        if len(ledger.requests) < len(self.requests):
            head = [r for r in self.waiting if r.request_id not in ledger.requests]
            budget = self._step_tokens
        # A waiting request that gets no tokens ends vLLM's scan of the queue, so all that start stand first.
        head += [r for r in map(self.requests.get, plan.starts or ()) if r and r.status != RequestStatus.RUNNING]
        for request in reversed(head):
            if request in self.waiting:
                self.waiting.remove_request(request)
                self.waiting.prepend_request(request)
        if plan.victims:
            place = {request_id: i for i, request_id in enumerate(reversed(plan.victims))}
            stay = [r for r in self.running if r.request_id not in place]
            go = [r for r in self.running if r.request_id in place]
            self.running[:] = stay + sorted(go, key=lambda r: place[r.request_id])
        # Drafts are scheduled with their decode, so they need room beside it.
        drafts = self.num_spec_tokens * len(ledger.decoding)
        self.max_num_scheduled_tokens = min(self._step_tokens, budget + drafts)
        self._plan = plan

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cap the tokens of one request in this step by the plan."""
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        plan = self._plan
        if plan is None:
            return tokens
        state = self._driver.ledger.requests.get(request.request_id)
        if state is None:
            return tokens
        if plan.open_chunks:
            return 0 if state.phase is Phase.UNDECIDED else tokens
        if request.request_id in plan.held:
            return 0
        if state.phase is Phase.DECODE:
            return tokens
        if state.remaining_tokens == 0 and state.phase is Phase.PREFILL:
            return tokens  # its last chunk is in flight: this is its first decode
        return min(tokens, plan.granted(state, num_computed_tokens))

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._tell(self._driver.preempted, request.request_id)

    # The end of a step and of a request

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Learn from the step, and send verdicts and measurements along with its tokens."""
        now = time.monotonic()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        tokens: dict[str, int] = {}
        ended: list[tuple[str, bool]] = []
        for batch in outputs.values():
            for out in batch.outputs:
                if out.new_token_ids:
                    tokens[out.request_id] = len(out.new_token_ids)
                if out.finish_reason is not None:
                    ended.append((out.request_id, out.finish_reason == FinishReason.ERROR))
        driver = self._driver
        self._tell(driver.completed, tokens, now_s=now, idle=not self.requests)
        for request_id, failed in ended:
            self._tell(driver.finished, request_id, now_s=now, failed=failed)
        self._send(outputs, now)
        if driver.cost.steps - self._saved_steps >= (SAVE_STEPS if self.requests else SAVE_IDLE_STEPS):
            self._save()
        return outputs

    def _send(self, outputs: dict[int, EngineCoreOutputs], now: float) -> None:
        driver = self._driver
        gauges = None
        if now - self._gauges_at >= GAUGES_EVERY_S or not self.requests:
            self._gauges_at = now
            gauges = driver.gauges()
        for client, messages in driver.report.take(gauges).items():
            carrier = EngineCoreOutput(
                request_id=CARRIER_ID, new_token_ids=[], kv_transfer_params={"messages": messages}
            )
            # Before the tokens and ends that the messages are about.
            self._batch(outputs, client).outputs = [carrier, *self._batch(outputs, client).outputs]
        for client, ends in self._outbox.items():
            self._batch(outputs, client).outputs = [*self._batch(outputs, client).outputs, *ends]
        self._outbox.clear()

    @staticmethod
    def _batch(outputs: dict[int, EngineCoreOutputs], client: int) -> EngineCoreOutputs:
        if client not in outputs:
            outputs[client] = EngineCoreOutputs()
        return outputs[client]

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """A client went away, a stop string was seen, or an error ended requests."""
        ended: list[Request] = super().finish_requests(request_ids, finished_status)
        now = time.monotonic()
        failed = finished_status == RequestStatus.FINISHED_ERROR
        for request in ended:
            # A stop string is found outside the engine and arrives as an abort too, so of a request with stop strings
            # that got tokens nobody knows whose end it is.
            stops = request.sampling_params is not None and bool(request.sampling_params.stop)
            gone = finished_status == RequestStatus.FINISHED_ABORTED and not stops
            self._tell(self._driver.finished, request.request_id, now_s=now, aborted=gone, failed=failed)
        return ended

    def _refuse(self, request_ids: list[str]) -> None:
        """End refused requests before they cost anything; their 429 is built from the message sent before."""
        for request in super().finish_requests(request_ids, RequestStatus.FINISHED_ABORTED):
            self._outbox[request.client_index].append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=REFUSED,
                    events=request.take_events(),
                )
            )

    def has_requests(self) -> bool:
        """Keep the engine stepping until refusals and measurements are sent."""
        return bool(self._outbox) or bool(self._driver.report) or super().has_requests()

    def shutdown(self) -> None:
        """Keep what was learned."""
        self._save()
        self._driver.recorder.close()
        super().shutdown()

    def _save(self) -> None:
        if self._driver.cost.ready and self._driver.cost.steps > self._saved_steps:
            profile.save(self._profile, self._driver.cost)
            self._saved_steps = self._driver.cost.steps
