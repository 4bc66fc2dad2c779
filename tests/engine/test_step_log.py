"""The step log through the real driver: who took part in each step, and what else happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from driver_script import FULL, Scripted, classes

from headway.core import Accept, EngineView, RequestState, Verdict
from headway.engine.fake import FakeEngine
from headway.engine.recorder import StepRecorder
from headway.engine.step_log import StepLog


def lines(path: Path) -> list[dict[str, Any]]:
    """Return every line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(engine: FakeEngine) -> None:
    """Run to the end and close the log."""
    engine.run()
    engine.driver.recorder.close()


def logged(path: Path, **limits: Any) -> FakeEngine:
    """Return an engine that logs and refuses whoever is called `no`."""

    def answer(view: EngineView, request: RequestState) -> Verdict:
        return FULL if request.id == "no" else Accept(bound_s=None)

    engine = FakeEngine(classes(), admission=Scripted(answer), **limits)
    engine.driver.recorder = StepRecorder(path)
    return engine


def test_every_step_names_its_chunks_and_decodes(tmp_path: Path) -> None:
    """Two requests of 3 and 5 prompt tokens under a budget of 6: the second one's prompt takes two steps."""
    log = tmp_path / "steps.jsonl"
    engine = logged(log, max_step_tokens=6)
    engine.add("a", prompt_tokens=3, output_tokens=2)
    engine.add("b", prompt_tokens=5, output_tokens=1)
    run(engine)
    steps = [(line["chunks"], line["decodes"]) for line in lines(log) if "event" not in line]
    assert steps == [({"0": 3, "1": 3}, []), ({"1": 2}, [0])]
    arrived = [line for line in lines(log) if line.get("event") == "arrived"]
    assert [(line["r"], line["id"], line["prompt_tokens"], line["class"]) for line in arrived] == [
        (0, "a", 3, "chat"),
        (1, "b", 5, "chat"),
    ]
    assert arrived[0]["due_s"] == 1.0
    ended = [(line["r"], line["output_tokens"]) for line in lines(log) if line.get("event") == "finished"]
    assert sorted(ended) == [(0, 2), (1, 1)]


def test_a_step_was_planned_when_the_one_before_ended(tmp_path: Path) -> None:
    """The fake engine has no time between steps."""
    log = tmp_path / "steps.jsonl"
    engine = logged(log)
    engine.add("a", prompt_tokens=30, output_tokens=3)
    run(engine)
    first, second, third = [line for line in lines(log) if "event" not in line]
    assert (first["planned_s"], second["planned_s"], third["planned_s"]) == (0.0, first["t_s"], second["t_s"])
    assert first["seconds"] == pytest.approx(0.05)


def test_a_refusal_names_its_reason(tmp_path: Path) -> None:
    """And the request takes part in no step."""
    log = tmp_path / "steps.jsonl"
    engine = logged(log)
    engine.add("no", prompt_tokens=30)
    engine.add("a", prompt_tokens=30)
    run(engine)
    (refused,) = [line for line in lines(log) if line.get("event") == "refused"]
    assert (refused["r"], refused["reason"]) == (0, "ttft_unattainable")
    assert all("0" not in line["chunks"] for line in lines(log) if "event" not in line)


def test_a_preempted_request_is_in_the_log(tmp_path: Path) -> None:
    """A pool of three blocks cannot hold two growing streams of 15 prompt tokens."""
    log = tmp_path / "steps.jsonl"
    engine = logged(log, blocks=3)
    engine.add("a", prompt_tokens=15, output_tokens=4)
    engine.add("b", prompt_tokens=15, output_tokens=4)
    run(engine)
    assert [line["r"] for line in lines(log) if line.get("event") == "preempted"] == [1]


def test_an_aborted_request_is_marked(tmp_path: Path) -> None:
    """Its client went away before a token."""
    log = tmp_path / "steps.jsonl"
    engine = logged(log)
    engine.add("a", prompt_tokens=15)
    engine.abort("a")
    engine.driver.recorder.close()
    assert [line["aborted"] for line in lines(log) if line.get("event") == "finished"] == [True]


def test_a_full_disk_ends_the_log_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Said once."""
    log = StepLog("/dev/full")
    log.started({"unix_s": 1.0})
    log.started({"unix_s": 2.0})
    log.close()
    assert [record.message for record in caplog.records] == [
        "headway: the step log ends here: [Errno 28] No space left on device"
    ]
