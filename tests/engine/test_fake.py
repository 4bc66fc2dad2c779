"""The scripted engine: vLLM's rules, exact times, the real driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.config import Config
from headway.core import EngineView, StepPlan
from headway.engine.fake import Event, FakeEngine

STOCK = Config(policy="fcfs", admission="admit_all")


def log(events: list[Event]) -> list[tuple[float, str, str]]:
    """Return events with times in whole milliseconds."""
    return [(round(event.at_s * 1e3), event.kind, event.request) for event in events]


def test_a_request_alone_costs_what_the_coefficients_say() -> None:
    """20 ms a step, 1 ms a token: 100 prompt tokens, then two decodes."""
    engine = FakeEngine(STOCK)
    engine.add("a", prompt_tokens=100, output_tokens=3)
    assert log(engine.run()) == [
        (120, "token", "a"),
        (141, "token", "a"),
        (162, "token", "a"),
        (162, "finished", "a"),
    ]
    assert [(q, n) for q, n, _ in engine.steps] == [(100, 0), (0, 1), (0, 1)]


def test_without_a_policy_it_serves_as_vllm_does() -> None:
    """First come, first served; running before waiting; chunks inside the token budget."""
    engine = FakeEngine(STOCK, max_step_tokens=64)
    engine.add("a", prompt_tokens=100, output_tokens=2)
    engine.add("b", prompt_tokens=30)
    events = engine.run()
    assert [(q, n) for q, n, _ in engine.steps] == [(64, 0), (64, 0), (2, 1)]
    assert [event.request for event in events if event.kind == "token"] == ["a", "a", "b"]


def test_slots_are_limited() -> None:
    """The second waits for the first to end."""
    engine = FakeEngine(STOCK, max_running=1)
    engine.add("a", prompt_tokens=10, output_tokens=2)
    engine.add("b", prompt_tokens=10)
    assert [event.request for event in engine.run() if event.kind == "finished"] == ["a", "b"]
    assert [(q, n) for q, n, _ in engine.steps] == [(10, 0), (0, 1), (10, 0)]


def test_an_empty_pool_preempts_the_last_one_that_runs() -> None:
    """Six blocks of 16 for two requests of three and a growing fourth: the later one starts over and still ends."""
    engine = FakeEngine(STOCK, blocks=6)
    engine.add("a", prompt_tokens=48, output_tokens=4)
    engine.add("b", prompt_tokens=48, output_tokens=4)
    events = engine.run()
    assert [(e.kind, e.request) for e in events if e.kind in ("preempted", "finished")] == [
        ("preempted", "b"),
        ("finished", "a"),
        ("finished", "b"),
    ]
    assert [e.request for e in events if e.kind == "token"].count("b") == 4
    assert engine.kv.free_blocks == 6


def test_an_aborted_request_is_gone() -> None:
    """Its blocks are free and nothing more happens to it."""
    engine = FakeEngine(STOCK)
    engine.add("a", prompt_tokens=600, output_tokens=5)
    engine.step()
    engine.abort("a")
    assert engine.run() == []
    assert engine.kv.free_blocks == engine.kv.total_blocks


def test_cached_tokens_are_not_computed() -> None:
    """A prompt that is cached whole still computes its last token."""
    engine = FakeEngine(STOCK)
    engine.add("a", prompt_tokens=100, cached_tokens=100)
    engine.run()
    assert [(q, n) for q, n, _ in engine.steps] == [(1, 0)]


def test_run_stops_at_a_time_and_goes_on() -> None:
    """The clock then shows that time, also when the engine was idle before."""
    engine = FakeEngine(STOCK)
    assert engine.run(until_s=2.0) == []
    assert engine.now_s == 2.0
    engine.add("a", prompt_tokens=100, output_tokens=2)
    assert log(engine.run(until_s=2.1)) == [(2120, "token", "a")]
    assert log(engine.run()) == [(2141, "token", "a"), (2141, "finished", "a")]


def test_a_policy_object_is_used_as_it_is() -> None:
    """It needs no registration: this one serves the last first, 20 tokens a step."""

    class LastFirst:
        name = "last_first"

        def plan(self, view: EngineView) -> StepPlan:
            if not view.ledger.pending:
                return StepPlan(token_budget=512, starts=())
            last = max(view.ledger.pending, key=lambda r: r.seq)
            return StepPlan(token_budget=512, chunks={last.id: 20}, starts=(last.id,))

    engine = FakeEngine(Config(admission="admit_all"), policy=LastFirst())
    for name in "abc":
        engine.add(name, prompt_tokens=40)
    assert [event.request for event in engine.run() if event.kind == "token"] == ["c", "b", "a"]
    assert [q for q, _, _ in engine.steps] == [20] * 6


def test_a_policy_that_starves_a_request_is_found() -> None:
    """An endless loop would hide it."""

    class Never:
        name = "never"

        def plan(self, view: EngineView) -> StepPlan:
            return StepPlan(token_budget=1, starts=())

    engine = FakeEngine(policy=Never())
    engine.add("a", prompt_tokens=10)
    with pytest.raises(RuntimeError, match="still not done after 50 steps: a"):
        engine.run(most_steps=50)


def test_the_same_calls_give_the_same_events() -> None:
    """No clock, no chance."""

    def once() -> list[Event]:
        engine = FakeEngine(max_step_tokens=64)
        for i in range(12):
            engine.add(f"r{i}", prompt_tokens=10 + 17 * i, output_tokens=1 + i % 4, ttft_ms=900.0 + 50 * i)
        return engine.run()

    assert once() == once()


def test_the_example_of_the_guide_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """CONTRIBUTING.md: code and output."""
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code, output = re.findall(r"```(?:python)?\n(.*?)```", guide, flags=re.DOTALL)
    exec(compile(code, "CONTRIBUTING.md", "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out == output
