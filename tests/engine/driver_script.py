"""Scripted admission tests, and what the tests of the driver ask of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.config import Config
from headway.core import Accept, EngineView, Reason, Reject, RequestState, Verdict
from headway.engine.base import EngineFacts
from headway.engine.fake import FakeEngine

FULL = Reject(reason=Reason.TTFT, retry_after_s=2.0)


class Scripted:
    """An admission test that answers by a function and remembers whom it was asked about."""

    name = "scripted"

    def __init__(self, answer: Callable[[EngineView, RequestState], Verdict]) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the scripted verdict."""
        self.asked.append(request.id)
        return self.answer(view, request)


def accept_all(view: EngineView, request: RequestState) -> Verdict:
    """Promise everybody the next second."""
    return Accept(bound_s=view.now_s + 1.0)


def refuse_all(view: EngineView, request: RequestState) -> Verdict:
    """Refuse."""
    return FULL


def classes(on_miss: str = "reject") -> Config:
    """One class, chat, with a TTFT of one second and a TPOT of 50 ms."""
    chat = {"ttft_ms": 1000, "tpot_ms": 50, "on_miss": on_miss}
    return Config.model_validate({"default_class": "chat", "front_ms": 0, "policy": "fcfs", "class": {"chat": chat}})


def engine(answer: Callable[[EngineView, RequestState], Verdict], on_miss: str = "reject", **limits: Any) -> FakeEngine:
    """Return an engine in vLLM's order with a scripted admission test."""
    return FakeEngine(classes(on_miss), admission=Scripted(answer), **limits)


def kinds(engine: FakeEngine) -> list[tuple[str, str]]:
    """Return (kind, group) of every message so far."""
    return [(m["kind"], m["group"]) for m in engine.messages if "group" in m]


def message(engine: FakeEngine, kind: str, group: str) -> dict[str, Any]:
    """Return the only message of this kind about a group."""
    (found,) = [m for m in engine.messages if m["kind"] == kind and m.get("group") == group]
    return found


def facts(fake: FakeEngine) -> Any:
    """Return the facts that a fake engine would give."""
    return EngineFacts(now_s=fake.now_s, kv=fake.kv, max_step_tokens=512, max_running=64, max_model_len=4096)
