"""The seam between an engine and the decisions.

An engine tells a `Driver` (driver.py) what happens to its requests and asks it for a plan before every step. What
the driver needs to know about the engine at that moment is this one small value; the scripted `FakeEngine`
(fake.py) and the vLLM adapter (vllm/scheduler.py) both build it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.core import KvView


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine is and has at the start of a step."""

    now_s: float  # the engine's monotonic clock
    kv: KvView
    max_step_tokens: int
    max_running: int
    max_model_len: int
    residual_s: float = 0.0  # what the step in flight still needs (asynchronous scheduling)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTag:
    """What the HTTP side tells the engine about a request, next to the prompt.

    `group` names all sequences of one HTTP request (n > 1, several prompts): they are served or refused together.
    """

    group: str
    size: int = 1
    slo_class: str | None = None  # None: the default class
    ttft_ms: float | None = None  # targets of the headers, which override those of the class
    tpot_ms: float | None = None
    tbt_ms: float | None = None
    arrival_unix_s: float | None = None  # when the server got the request, before tokenisation
    explicit_max_tokens: bool = True
    front_ms: float | None = None  # measured time from the engine to the socket
