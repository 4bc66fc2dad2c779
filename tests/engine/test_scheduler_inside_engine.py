"""HeadwayScheduler step by step in this process: real vLLM queues and KV, scripted workers (imports vLLM: seconds)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from headway.core import Accept, EngineView, Phase, Reason, Reject, RequestState, StepPlan, Verdict
from headway.engine.base import RequestTag
from headway.engine.vllm.messages import CARRIER_ID, XARG, encode_tag

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # of vLLM and torch while they are imported
]


class Policy:
    """A plan by hand, `plans[step]` or all that fits."""

    name = "scripted"

    def __init__(self) -> None:
        self.next: list[StepPlan] = []

    def plan(self, view: EngineView) -> StepPlan:
        """Return the next scripted plan, or one that starts everything in its order."""
        if self.next:
            return self.next.pop(0)
        pending = [r for r in view.ledger.pending if r.remaining_tokens]
        return StepPlan(
            token_budget=512,
            chunks={r.id: r.remaining_tokens for r in pending},
            starts=tuple(r.id for r in pending if r.phase is Phase.WAITING),
        )


class Admission:
    """A verdict by hand."""

    name = "scripted"

    def __init__(self) -> None:
        self.refused: set[str] = set()

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Refuse those named."""
        return Reject(reason=Reason.TTFT) if request.id in self.refused else Accept(bound_s=view.now_s + 60)


class Bench:
    """The scheduler and workers that answer token 7 to whatever was issued, `lag` steps later."""

    def __init__(self, *, blocks: int = 200, lag: int = 0) -> None:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from headway.engine.vllm.model import embedded_model
        from headway.engine.vllm.scheduler import HeadwayScheduler

        model = ModelConfig(model=str(embedded_model().path), dtype="bfloat16", max_model_len=2048)
        scheduling = SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        )
        cache = CacheConfig(block_size=16, enable_prefix_caching=True)
        config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
        cache.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = HeadwayScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
            log_stats=True,
        )
        from vllm.utils.hashing import sha256

        init_none_hash(sha256)
        self._hasher: Any = get_request_block_hasher(16, sha256)
        self.policy = self.scheduler._driver.policy = Policy()
        self.admission = self.scheduler._driver.admission = Admission()
        self.lag = lag
        self.flights: deque[Any] = deque()
        self.messages: list[dict[str, Any]] = []
        self.ends: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self._fresh = 1000

    def add(
        self, name: str, *, prompt: int | list[int], output: int = 3, tag: bool = True, of: int = 1, **fields: Any
    ) -> Any:
        """Queue a request, or one of the `of` sequences of a group; an int is so many tokens that no cache has seen."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        if isinstance(prompt, int):
            self._fresh += 5000
            prompt = list(range(self._fresh, self._fresh + prompt))
        extra = {XARG: encode_tag(RequestTag(group=name if of == 1 else "group", size=of))} if tag else None
        params = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=extra, **fields)
        request = Request(name, prompt, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """Issue one step, complete the one that is due; return what was issued."""
        output = self.scheduler.schedule()
        # A worker samples for those whose issued tokens reach the end of what they had then.
        requests = self.scheduler.requests
        self.flights.append((output, {i for i in output.num_scheduled_tokens if not requests[i].is_prefill_chunk}))
        if len(self.flights) > self.lag:
            self.complete()
        return dict(output.num_scheduled_tokens)

    def complete(self) -> None:
        """The oldest step in flight ends."""
        from vllm.v1.outputs import ModelRunnerOutput

        output, sampling = self.flights.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = [[7] if name in sampling else [] for name in ids]
        made = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=sampled
        )
        for batch in self.scheduler.update_from_output(output, made).values():
            for out in batch.outputs:
                if out.request_id == CARRIER_ID:
                    self.messages += out.kv_transfer_params["messages"]
                    continue
                self.tokens[out.request_id] = self.tokens.get(out.request_id, 0) + len(out.new_token_ids)
                if out.finish_reason is not None:
                    self.ends[out.request_id] = str(out.finish_reason)

    def run(self, most: int = 200) -> list[dict[str, int]]:
        """Step until nothing is left; return what was issued in the steps that computed something."""
        issued = []
        for _ in range(most):
            if not self.scheduler.has_requests():
                while self.flights:
                    self.complete()
                if not self.scheduler.has_requests():
                    break
            issued.append(self.step())
            self.check()
        else:
            raise AssertionError(f"still {list(self.scheduler.requests)} after {most} steps")
        assert self.scheduler._driver.ledger.requests == {}
        assert self.scheduler._driver._tracked == {}
        assert self.failures == 0
        return [step for step in issued if step]

    def check(self) -> None:
        """The books are sound and agree with vLLM about who runs."""
        from vllm.v1.request import RequestStatus

        ledger = self.scheduler._driver.ledger
        ledger.check()
        for name, state in ledger.requests.items():
            runs = self.scheduler.requests[name].status == RequestStatus.RUNNING
            assert runs == (state.phase in (Phase.PREFILL, Phase.DECODE)), state

    @property
    def failures(self) -> int:
        """Decisions or books that failed so far."""
        return sum(m["failures"] for m in self.messages if m["kind"] == "engine")

    def done(self, name: str) -> dict[str, Any]:
        """The outcome of a request."""
        (found,) = [m for m in self.messages if m["kind"] == "done" and m["group"] == name]
        return found


@pytest.fixture
def bench(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """Return the maker of benches."""
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADWAY_PROFILE", str(tmp_path / "profile.json"))
    return Bench


@pytest.mark.parametrize("lag", [0, 1])
def test_a_plan_is_what_is_issued(bench: Callable[..., Bench], lag: int) -> None:
    """Start b before a, in chunks of 20 and 30; what is not named gets nothing."""
    b = bench(lag=lag)
    for name in "abc":
        b.add(name, prompt=64, output=1)
    b.policy.next = [
        StepPlan(token_budget=50, chunks={"b": 20, "a": 30}, starts=("b", "a")),
        StepPlan(token_budget=44, chunks={"b": 44}, starts=()),
    ]
    assert b.step() == {"b": 20, "a": 30}
    assert b.step() == {"b": 44}
    b.run()
    assert b.tokens == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("lag", [0, 1])
def test_waiting_requests_that_do_not_start_block_nobody(bench: Callable[..., Bench], lag: int) -> None:
    """The first in vLLM's queue is left out of the plan: those behind it start all the same."""
    b = bench(lag=lag)
    for name in "abcd":
        b.add(name, prompt=32, output=2)
    b.policy.next = [StepPlan(token_budget=96, chunks={"c": 32, "d": 32}, starts=("d", "c"))]
    assert b.step() == {"d": 32, "c": 32}
    b.run()
    assert b.tokens == dict.fromkeys("abcd", 2)


def test_a_request_whose_grammar_is_not_ready_blocks_nobody(bench: Callable[..., Bench]) -> None:
    """The plan starts it, vLLM skips it, the others run; it runs once the grammar is there."""
    from vllm.sampling_params import StructuredOutputsParams

    b = bench()
    slow = b.add("slow", prompt=32, output=1, structured_outputs=StructuredOutputsParams(regex="a"))
    b.add("quick", prompt=32, output=1)
    assert b.step() == {"quick": 32}
    for _ in range(3):
        assert b.step() == {}
    assert b.scheduler.has_requests()

    class Grammar:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: True

    slow.structured_output_request.grammar = Grammar()
    assert b.step() == {"slow": 32}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_whose_grammar_fails_ends_as_failed(bench: Callable[..., Bench], lag: int) -> None:
    """An error for its client; offered and not attained in the books."""
    from vllm.sampling_params import StructuredOutputsParams

    b = bench(lag=lag)
    bad = b.add("bad", prompt=32, structured_outputs=StructuredOutputsParams(regex="a"))
    b.add("good", prompt=32)
    b.step()
    bad.structured_output_request.grammar = ValueError("no such grammar")
    b.run()
    assert b.ends["bad"] == "error"
    assert (b.done("bad")["failed"], b.done("bad")["aborted"]) == (True, False)
    assert b.tokens["good"] == 3


@pytest.mark.parametrize("lag", [0, 1])
def test_a_refusal_ends_the_request_with_its_message_before(bench: Callable[..., Bench], lag: int) -> None:
    """The message comes first, then the end; has_requests holds until both are sent, and not longer."""
    b = bench(lag=lag)
    b.admission.refused = {"no"}
    b.add("no", prompt=32)
    assert b.run() == []
    assert b.ends == {"no": "abort"}
    assert [m["kind"] for m in b.messages if m["kind"] != "engine"] == ["refused"]
    assert not b.scheduler.has_requests()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_refusal_while_others_run_leaves_them_alone(bench: Callable[..., Bench], lag: int) -> None:
    """The stream beside it goes on to its end."""
    b = bench(lag=lag)
    b.add("yes", prompt=32, output=6)
    b.step()
    b.admission.refused = {"no"}
    b.add("no", prompt=32)
    b.run()
    assert (b.ends["no"], b.tokens["yes"]) == ("abort", 6)


def test_a_prefix_hit_larger_than_expected_is_used(bench: Callable[..., Bench]) -> None:
    """Two equal prompts at once: when the second starts, the first one's blocks are there."""
    b = bench()
    prompt = list(range(5000, 5128))
    b.add("a", prompt=prompt, output=1)
    b.add("b", prompt=prompt, output=1)
    assert b.scheduler._driver.ledger.requests["b"].computed_tokens == 0
    b.policy.next = [StepPlan(token_budget=128, chunks={"a": 128}, starts=("a",))]
    assert b.step() == {"a": 128}
    assert b.step() == {"b": 16}
    b.run()
    assert b.tokens == {"a": 1, "b": 1}


def test_sequences_of_one_request_count_their_prompt_once(bench: Callable[..., Bench]) -> None:
    """n = 3: twelve full blocks are the first one's, so 8 of 200 tokens are left of each other, in one step too."""
    b = bench()
    prompt = list(range(5000, 5200))
    for name in "abc":
        b.add(name, prompt=prompt, output=1, of=3)
    other = [*prompt[:100], *range(9000, 9100)]
    for name, tokens in (("d", prompt), ("e", other)):
        b.add(name, prompt=tokens, output=1)  # on their own: what they will find is not known yet
    requests = b.scheduler._driver.ledger.requests
    assert [requests[name].computed_tokens for name in "abcde"] == [0, 192, 192, 0, 0]
    assert [requests[name].follows for name in "abcde"] == [None, requests["a"], requests["a"], None, None]
    assert b.step() == {"a": 200, "b": 8, "c": 8, "d": 8, "e": 104}
    b.run()
    assert b.tokens == dict.fromkeys("abcde", 1)
    # Now the cache has them, and nobody is followed.
    for name in "fg":
        b.add(name, prompt=prompt, output=1, of=2)
    assert [requests[name].computed_tokens for name in "fg"] == [192, 192]
    assert [requests[name].follows for name in "fg"] == [None, None]
    b.run()


def test_a_prefix_hit_smaller_than_expected_is_corrected(bench: Callable[..., Bench]) -> None:
    """Seen at arrival, evicted before the start: the books follow the engine after the first chunk."""
    b = bench()
    prompt = list(range(5000, 5128))
    b.add("a", prompt=prompt, output=1)
    b.run()
    b.add("b", prompt=prompt, output=1)
    assert b.scheduler._driver.ledger.requests["b"].computed_tokens == 112
    b.scheduler.reset_prefix_cache()
    assert b.step() == {"b": 16}
    assert b.scheduler._driver.ledger.requests["b"].remaining_tokens == 112
    b.run()
    assert b.tokens["b"] == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_preempted_requests_come_back_and_lose_nothing(bench: Callable[..., Bench], lag: int) -> None:
    """A pool of 8 usable blocks for two growing streams: every token of both comes, the books hold at each step."""
    b = bench(blocks=9, lag=lag)
    b.add("a", prompt=48, output=40)
    b.add("b", prompt=48, output=40)
    b.run(most=400)
    assert b.tokens == {"a": 40, "b": 40}
    assert sum(m["kind"] == "preempted" for m in b.messages) >= 1
    assert b.done("b")["output_tokens"] == 40


@pytest.mark.parametrize("lag", [0, 1])
def test_victims_are_taken_in_the_order_of_the_plan(bench: Callable[..., Bench], lag: int) -> None:
    """vLLM would take the last one that runs; the plan names the first."""
    b = bench(blocks=9, lag=lag)
    b.add("a", prompt=48, output=40)
    b.add("b", prompt=48, output=40)
    pool = b.policy

    class Victims(Policy):
        def plan(self, view: EngineView) -> StepPlan:
            plan = pool.plan(view)
            return StepPlan(token_budget=512, chunks=plan.chunks, starts=plan.starts, victims=("a", "b"))

    b.scheduler._driver.policy = Victims()
    b.run(most=400)
    assert next(m["request"] for m in b.messages if m["kind"] == "preempted") == "a"
    assert b.tokens == {"a": 40, "b": 40}


@pytest.mark.parametrize("lag", [0, 1])
def test_an_undecided_request_can_be_aborted(bench: Callable[..., Bench], lag: int) -> None:
    """Its client leaves before the verdict: nothing is left of it, and the message about it is sent."""
    from vllm.v1.request import RequestStatus

    b = bench(lag=lag)
    b.add("a", prompt=32)
    b.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert b.scheduler.has_requests()
    b.run()
    assert b.done("a")["aborted"] is True
    assert b.messages[0]["kind"] == "done"


@pytest.mark.parametrize("lag", [0, 1])
def test_everything_can_be_finished_at_once(bench: Callable[..., Bench], lag: int) -> None:
    """finish_requests(None): waiting, running and undecided ones."""
    from vllm.v1.request import RequestStatus

    b = bench(lag=lag)
    b.add("a", prompt=32, output=9)
    b.step()
    b.step()
    b.add("b", prompt=32)
    b.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert b.run() == []
    assert b.done("a")["aborted"] is True
    assert b.done("b")["aborted"] is True


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_that_the_driver_does_not_know_are_served_first(bench: Callable[..., Bench], lag: int) -> None:
    """Left from a failure of the books: they run as in vLLM, whatever the plan's budget; new ones are planned."""
    b = bench(lag=lag)
    b.add("old", prompt=64, output=4)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        b.scheduler._driver.start_over()
    b.add("new", prompt=64, output=4)
    b.policy.next = [StepPlan(token_budget=1, starts=())]
    assert b.step() == {"old": 64}
    while b.scheduler.has_requests() or b.flights:
        b.step() if b.scheduler.has_requests() else b.complete()
    assert b.tokens == {"old": 4, "new": 4}
    assert b.failures == 1


@pytest.mark.parametrize("where", ["arrive", "issued", "completed", "finished", "begin_step"])
def test_nothing_that_headway_raises_reaches_vllm(
    bench: Callable[..., Bench], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the books fails, every request gets its tokens."""
    b = bench()
    driver = b.scheduler._driver
    if where == "begin_step":
        monkeypatch.setattr(b.policy, "plan", lambda view: StepPlan(token_budget=9, victims=5))  # type: ignore[arg-type]
    else:

        def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError(where)

        monkeypatch.setattr(driver, where, broken)
    for name in "ab":
        b.add(name, prompt=32, output=3)
    for _ in range(30):
        if not b.scheduler.has_requests():
            break
        b.step()
    assert b.tokens == {"a": 3, "b": 3}
    assert b.ends == {"a": "length", "b": "length"}
    assert b.failures >= 1


def test_an_idle_scheduler_has_nothing_to_send(bench: Callable[..., Bench]) -> None:
    """No busy loop: after the last message it is quiet until the next request."""
    b = bench()
    assert not b.scheduler.has_requests()
    b.add("a", prompt=32)
    b.run()
    assert not b.scheduler.has_requests()
    assert b.messages[-1]["kind"] == "engine"
    assert b.messages[-1]["pending"] == 0


def test_what_was_learned_is_saved_when_idle_and_used_again(bench: Callable[..., Bench]) -> None:
    """A restarted scheduler promises from its first request."""
    first = bench()
    for i in range(40):
        first.add(f"r{i}", prompt=20 + 7 * i % 50, output=3)
        first.run()
    assert first.scheduler._profile.exists()
    second = bench()
    assert second.scheduler._driver.cost.ready
    assert second.scheduler._driver.cost.mean.a >= 0
