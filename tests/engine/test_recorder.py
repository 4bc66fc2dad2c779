"""Step times from issues and completions: synchronous, overlapping, and across idle gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.engine.recorder import StepRecorder


def issue(recorder: StepRecorder, at_s: float, q: int = 10) -> None:
    """Issue a step of one prefill."""
    recorder.issued(at_s, q=q, n=0, K=0, X=0.0, ids=(f"r{q}",))


def seconds(recorder: StepRecorder, at_s: float, *, idle: bool = False) -> float:
    """Complete the oldest step; return its time."""
    done = recorder.completed(at_s, idle=idle)
    assert done is not None
    return done[0].seconds


def test_a_step_after_an_idle_gap_counts_from_its_issue() -> None:
    """Nobody waited for the gap."""
    recorder = StepRecorder()
    issue(recorder, 1.0)
    assert seconds(recorder, 1.2, idle=True) == pytest.approx(0.2)
    issue(recorder, 9.0)
    assert seconds(recorder, 9.3, idle=True) == pytest.approx(0.3)


def test_on_a_busy_engine_the_time_between_steps_counts() -> None:
    """Requests wait for the engine's own overhead: a step counts from the end of the one before."""
    recorder = StepRecorder()
    issue(recorder, 1.0)
    assert seconds(recorder, 1.2) == pytest.approx(0.2)
    issue(recorder, 1.25)
    assert seconds(recorder, 1.5) == pytest.approx(0.3)


def test_overlapping_steps_share_no_time() -> None:
    """Issued while the previous one runs (asynchronous scheduling): each counts from the end of the one before."""
    recorder = StepRecorder()
    issue(recorder, 1.0, 1)
    issue(recorder, 1.1, 2)
    first = recorder.completed(1.3, idle=False)
    issue(recorder, 1.31, 3)
    second = recorder.completed(1.5, idle=False)
    third = recorder.completed(1.9, idle=True)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [first[1], second[1], third[1]] == [("r1",), ("r2",), ("r3",)]
    assert [first[0].seconds, second[0].seconds, third[0].seconds] == pytest.approx([0.3, 0.2, 0.4])


def test_a_last_step_in_flight_does_not_count_twice() -> None:
    """The last request ends while one more step is in flight: that step starts at this end, not at its issue."""
    recorder = StepRecorder()
    issue(recorder, 1.0)
    issue(recorder, 1.1)
    assert seconds(recorder, 1.5, idle=True) == pytest.approx(0.5)
    assert seconds(recorder, 1.6, idle=True) == pytest.approx(0.1)
    issue(recorder, 7.0)
    assert seconds(recorder, 7.1, idle=True) == pytest.approx(0.1)


def test_nothing_in_flight_is_nothing() -> None:
    """A completion without an issue, and what is left of it."""
    recorder = StepRecorder()
    assert recorder.completed(1.0, idle=False) is None
    assert recorder.in_flight is None
    assert recorder.residual_s(1.0, 0.5) == 0.0


def test_the_residual_is_what_is_left_of_the_prediction() -> None:
    """Counted from the later of its issue and the end before it; never negative."""
    recorder = StepRecorder()
    issue(recorder, 1.0, 1)
    assert recorder.residual_s(1.1, 0.3) == pytest.approx(0.2)
    assert recorder.residual_s(5.0, 0.3) == 0.0
    issue(recorder, 1.1, 2)
    assert seconds(recorder, 1.4) == pytest.approx(0.4)
    assert recorder.residual_s(1.5, 0.3) == pytest.approx(0.2)
    assert recorder.in_flight is not None
    assert recorder.in_flight.q == 2


def test_a_clock_that_stands_still_gives_a_positive_time() -> None:
    """The fit divides by it."""
    recorder = StepRecorder()
    issue(recorder, 1.0)
    assert seconds(recorder, 1.0) > 0


def test_the_log_has_a_line_for_each_step_that_computed(tmp_path: Path) -> None:
    """Empty steps are not in it; it is complete when the engine is idle, and appended to."""
    log = tmp_path / "steps.jsonl"
    for _ in range(2):
        recorder = StepRecorder(log)
        recorder.issued(1.0, q=37, n=2, K=90, X=684.5, ids=("a",))
        recorder.completed(1.25, idle=False)
        recorder.issued(1.3, q=0, n=0, K=0, X=0.0, ids=())
        recorder.completed(1.301, idle=True)
        recorder.close()
        recorder.close()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    numbers = {"q": 37, "n": 2, "K": 90, "X": 684.5}
    step = {"t_s": 1.25, **numbers, "seconds": 0.25, "planned_s": 1.0, "chunks": {}, "decodes": []}
    assert rows == [step] * 2


def test_the_log_is_complete_when_the_last_step_was_empty(tmp_path: Path) -> None:
    """Readers of an idle engine's log see everything, without closing it."""
    log = tmp_path / "steps.jsonl"
    recorder = StepRecorder(log)
    issue(recorder, 1.0)
    recorder.completed(1.2, idle=False)
    recorder.issued(1.3, q=0, n=0, K=0, X=0.0, ids=())
    recorder.completed(1.301, idle=True)
    assert len(log.read_text().splitlines()) == 1
    recorder.close()
