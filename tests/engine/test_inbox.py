"""Messages from vLLM's output loop, on a stand-in for vLLM."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from headway.engine.vllm import inbox
from headway.engine.vllm.messages import CARRIER_ID, REFUSED


class Output:
    """An engine output as far as the inbox looks."""

    def __init__(self, request_id: str, messages: list[Any] | None = None, *, stop_reason: str | None = None) -> None:
        self.request_id = request_id
        self.stop_reason = stop_reason
        self.kv_transfer_params = None if messages is None else {"messages": messages}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's OutputProcessor, scripted: it logs what it is given."""

    class OutputProcessor:
        def __init__(self) -> None:
            self.log: list[str] = []

        def process_outputs(self, engine_core_outputs: list[Output], stamp: float = 0.0) -> str:
            self.log += [out.request_id for out in engine_core_outputs]
            return f"done at {stamp}"

    module = types.ModuleType("vllm.v1.engine.output_processor")
    module.OutputProcessor = OutputProcessor  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(inbox, "_receivers", [])
    return OutputProcessor


def test_messages_come_before_the_outputs_of_their_batch(processor: type) -> None:
    """The carrier is taken out; the rest, its arguments and its result pass."""
    log: list[Any] = []
    inbox.install(log.append)
    loop = processor()
    loop.log = log
    assert loop.process_outputs([Output("a"), Output(CARRIER_ID, [{"kind": "x"}]), Output("b")], stamp=3.0) == (
        "done at 3.0"
    )
    assert log == [{"kind": "x"}, "a", "b"]


def test_the_end_of_a_refused_request_is_in_no_statistics(processor: type) -> None:
    """It is processed first, with the same stamp and statistics of its own; those of the others do not see it."""
    seen: list[Any] = []

    class Stats:
        pass

    def process_outputs(
        self: Any, outputs: list[Output], engine_core_timestamp: float | None = None, iteration_stats: Any = None
    ) -> str:
        seen.append(([out.request_id for out in outputs], engine_core_timestamp, iteration_stats))
        return "done"

    processor.process_outputs = process_outputs  # type: ignore[attr-defined]
    inbox.install(seen.append)
    stats = Stats()
    batch = [Output(CARRIER_ID, [{"kind": "refused"}]), Output("a"), Output("b", stop_reason=REFUSED)]
    assert processor().process_outputs(batch, 3.0, stats) == "done"
    assert seen[0] == {"kind": "refused"}
    assert seen[1][:2] == (["b"], 3.0)
    assert isinstance(seen[1][2], Stats)
    assert seen[1][2] is not stats
    assert seen[2] == (["a"], 3.0, stats)


def test_a_batch_without_messages_passes_as_it_is(processor: type) -> None:
    """Not even a new list."""
    inbox.install(lambda message: None)
    loop = processor()
    loop.process_outputs([Output("a")])
    assert loop.log == ["a"]


def test_several_receivers_get_every_message_once(processor: type) -> None:
    """The wrapping happens once, however often it is installed."""
    first: list[Any] = []
    second: list[Any] = []
    inbox.install(first.append)
    inbox.install(second.append)
    processor().process_outputs([Output(CARRIER_ID, [1, 2])])
    assert (first, second) == ([1, 2], [1, 2])


def test_a_receiver_that_raises_does_not_stop_the_loop(processor: type, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, the others get the message, the outputs are processed."""

    def broken(message: Any) -> None:
        raise RuntimeError("no")

    heard: list[Any] = []
    inbox.install(broken)
    inbox.install(heard.append)
    loop = processor()
    loop.process_outputs([Output(CARRIER_ID, ["m"]), Output("a")])
    assert (heard, loop.log) == (["m"], ["a"])
    assert "could not be handled" in caplog.text


def test_a_carrier_without_messages_is_dropped(processor: type) -> None:
    """Nothing to deliver, and vLLM does not see it."""
    inbox.install(lambda message: None)
    loop = processor()
    loop.process_outputs([Output(CARRIER_ID)])
    assert loop.log == []


def test_the_http_side_imports_no_vllm() -> None:
    """Until it is installed, so that tests and tools need none."""
    script = "import sys, headway.engine.vllm.middleware; print('vllm' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
