"""Decisions of two engines held against each other: twin and twin, and the real driver's log against the twin."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from twin_build import NOISY, make_trace

from headway.config import Config
from headway.core import Step, StepCost
from headway.engine.fake import ROUND, FakeEngine
from headway.engine.recorder import StepRecorder
from headway.errors import InputError
from headway.replay.targets import Targets
from headway.twin import Scenario, simulate
from headway.twin.decisions import Decisions, StepTaken, Watch, compare, read
from headway.twin.rerun import MeasuredTimes, rerun

ROWS = [(0.07 * i, 20 + 13 * (i % 9), 3 + i % 6) for i in range(80)]


def decided(**settings: Any) -> Decisions:
    """Return what a twin decides about ROWS."""
    watch = Watch()
    chosen = {"policy": "headway", "admission": "response_time", "noise": False, "learn": False} | settings
    targets = {"default": Targets(ttft_s=0.5, tpot_s=0.1)}
    outcome = simulate(make_trace(ROWS), Scenario(profile=NOISY, targets=targets, settings=chosen), on_step=watch)
    return watch.decisions(outcome.frame)


def test_the_same_twin_agrees_with_itself() -> None:
    """Every step and every verdict."""
    found = compare(decided(), decided())
    assert found.steps == found.same == found.same_until > 50
    assert (found.verdicts, found.same_verdicts) == (80, 80)
    assert found.divergence is None


def test_a_changed_budget_is_found_in_the_step_that_it_changes() -> None:
    """A budget of 80 tokens cuts the first longer chunk; all before it is the same."""
    found = compare(decided(), decided(token_budget=80))
    assert 0 < found.same_until < found.steps
    assert found.divergence is not None
    assert f"step {found.same_until}, planned at" in found.divergence
    assert "in the second" in found.divergence
    assert found.same > found.same_until  # one step more does not make all later ones differ


def test_a_changed_admission_test_is_found_in_the_verdicts() -> None:
    """Nobody but a test refuses."""
    full, limited = decided(admission="admit_all"), decided(**{"admission": "queue_depth", "admission.limit": 2})
    found = compare(full, limited)
    assert found.same_verdicts < found.verdicts
    assert set(found.differing.values()) == {("accepted", "queue_full")}
    assert found.divergence is not None
    assert "the other one refused it (queue_full)" in found.divergence


CLASSES = {
    "default_class": "chat",
    "front_ms": 5.0,
    "class": {"chat": {"ttft_ms": 400, "tpot_ms": 80}, "long": {"ttft_ms": 2000, "tpot_ms": 80, "weight": 4.0}},
}


def logged(path: Path, *, known: bool, cached: bool = False, again: bool = False, **config: Any) -> Path:
    """Serve an overload with the real driver on the scripted engine and keep its step log.

    `again`: every second request is the same as an earlier one, so some come back after a refusal.
    """
    settings = Config.model_validate(CLASSES | config)
    cost = StepCost(ROUND) if known else StepCost()
    engine = FakeEngine(settings, cost=cost, blocks=400, max_step_tokens=256, max_running=16)
    engine.driver.recorder = recorder = StepRecorder(path)
    assert recorder.log is not None
    recorder.log.started(
        {
            "engine": {
                "token_budget": 256,
                "max_running": 16,
                "max_model_len": 4096,
                "block_size": 16,
                "kv_blocks": 400,
            },
            "config": settings.model_dump(mode="json", by_alias=True),
            "cost": {key: getattr(ROUND, key) for key in "gabkx"} if known else None,
        }
    )
    draw = random.Random(5)
    at = 0.0
    for number in range(150):
        at += draw.expovariate(9.0)
        engine.run(at)
        long = draw.random() < 0.2
        engine.add(
            f"r{number}",
            prompt_tokens=draw.randrange(200, 400) if long else draw.randrange(20, 80),
            output_tokens=draw.randrange(2, 20),
            slo_class="long" if long else "chat",
            cached_tokens=16 * draw.randrange(3) if cached else 0,
            fingerprint=f"f{number - 9 * (number % 2)}" if again else None,
        )
    engine.run()
    recorder.close()
    return path


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {"policy": "fcfs", "admission": "admit_all"},
        {"policy": "edf", "admission": "response_time"},
        {"policy": "headway", "admission": "response_time"},
        {"policy": "headway", "admission": "admit_all"},  # deadlines get lost, also between arrivals
    ],
    ids=lambda config: f"{config['policy']}-{config['admission']}",
)
def test_the_twin_decides_as_the_driver_did(tmp_path: Path, config: dict[str, Any], known: bool) -> None:
    """Every step and every verdict in the log of the real driver, whether the cost is known or learned on the way."""
    real = read(logged(tmp_path / "steps.jsonl", known=known, **config))
    twin, frame = rerun(real)
    found = compare(real, twin)
    assert found.divergence is None
    assert found.steps == found.same > 100
    assert found.verdicts == found.same_verdicts == frame.height == 150


def test_what_the_prefix_cache_held_is_taken_from_the_log(tmp_path: Path) -> None:
    """The log has no contents, so the twin cannot find the blocks itself."""
    real = read(logged(tmp_path / "steps.jsonl", known=True, cached=True))
    assert any(each.cached_tokens for each in real.asked)
    found = compare(real, rerun(real)[0])
    assert (found.divergence, found.same_verdicts) == (None, 150)


def test_room_that_is_kept_for_those_who_come_back(tmp_path: Path) -> None:
    """Who was told when to come, and who came, is part of the decisions; without bookings they are others."""
    real = read(logged(tmp_path / "steps.jsonl", known=True, again=True))
    found = compare(real, rerun(real)[0])
    assert (found.divergence, found.same_verdicts) == (None, 150)
    assert compare(real, rerun(real, bookings=False)[0]).divergence is not None


def test_who_comes_between_two_refusals_is_asked_in_between() -> None:
    """The engine refused at 1.00 and again at 1.03, before it planned a step at 1.05."""
    step = Step(q=1, n=0, K=0, X=0.5, seconds=0.1)
    taken = StepTaken(planned_s=1.05, ended_s=1.15, next_s=1.15, step=step, chunks={1: 1}, decodes=frozenset())
    times = MeasuredTimes(Decisions(steps=[taken], verdicts={}, refusals=[1.0, 1.0, 1.03, 1.2]))
    assert [times.after_refusal(now) for now in (1.0, 1.03, 1.02, 1.2)] == [1.03, 1.05, None, None]


def test_a_change_of_one_setting_in_a_rerun(tmp_path: Path) -> None:
    """What would have been decided with another policy or budget, from the same log."""
    real = read(logged(tmp_path / "steps.jsonl", known=True))
    for changes in ({"policy": "fcfs"}, {"token_budget": 64}):
        found = compare(real, rerun(real, **changes)[0])
        assert found.same_until < found.steps
        assert found.divergence is not None
        assert f"step {found.same_until}, planned at" in found.divergence


def test_a_part_of_a_record(tmp_path: Path) -> None:
    """Steps planned in a window, verdicts of the requests that are asked for; two parts make the whole."""
    real = read(logged(tmp_path / "steps.jsonl", known=True))
    cut = real.steps[70].planned_s
    parts = real.between(0.0, cut, {0, 1}), real.between(cut, 1e9, range(2, 150))
    assert [len(each.steps) for each in parts] == [70, len(real.steps) - 70]
    assert [len(each.verdicts) for each in parts] == [2, 148]
    assert [len(each.asked) for each in parts] == [2, 148]


def test_times_of_tokens_are_read_from_the_steps(tmp_path: Path) -> None:
    """One request of 30 prompt tokens and 3 answers on an engine of 20 ms + 1 ms a token or decode."""
    path = tmp_path / "steps.jsonl"
    engine = FakeEngine(Config.model_validate({"policy": "fcfs", "admission": "admit_all"}), max_step_tokens=20)
    engine.driver.recorder = StepRecorder(path)
    assert engine.driver.recorder.log is not None
    engine.driver.recorder.log.started({"engine": {}, "config": {}})
    engine.add("a", prompt_tokens=30, output_tokens=3)
    engine.run()
    engine.driver.recorder.close()
    ((first, last, count),) = read(path).tokens().values()
    assert (first, last, count) == (pytest.approx(0.07), pytest.approx(0.112), 3)


def test_a_log_without_decisions_is_named(tmp_path: Path) -> None:
    """A log of an older version holds q, n, K, X and seconds only."""
    path = tmp_path / "steps.jsonl"
    path.write_text('{"q": 1, "n": 0, "K": 0, "X": 0, "seconds": 1}\n')
    with pytest.raises(InputError, match=r"steps\.jsonl:1: not a line of a step log with decisions"):
        read(path)
    path.write_text('{"event": "started"}\n')
    with pytest.raises(InputError, match="no start of an engine and steps after it"):
        read(path)
