"""The seam between an engine and the decisions.

An engine tells a `Driver` (driver.py) what happens to its requests and asks it for a plan before every step. What
the driver needs to know about the engine at that moment is this one small value; the scripted `FakeEngine`
(fake.py) and the vLLM adapter (vllm/scheduler.py) both build it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core import KvView
from headway.core.slo import MAX_TARGET_S

#: Most sequences that one HTTP request may claim.
MAX_GROUP = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine is and has at the start of a step."""

    now_s: float  # the engine's monotonic clock
    kv: KvView
    max_step_tokens: int
    max_running: int
    max_model_len: int
    ahead: bool = False  # steps are planned while the one before runs (asynchronous scheduling)
    residual_s: float = 0.0  # what the step in flight still needs at most (asynchronous scheduling)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTag:
    """What the HTTP side tells the engine about a request, next to the prompt.

    `group` names all sequences of one HTTP request (n > 1, several prompts): they are served or refused together.

    Raises:
        ValueError: a field has the wrong type or is out of range; an engine must be able to trust what it is told.
    """

    group: str
    size: int = 1
    slo_class: str | None = None  # None: the default class
    ttft_ms: float | None = None  # targets of the headers, which override those of the class
    tpot_ms: float | None = None
    tbt_ms: float | None = None
    arrival_unix_s: float | None = None  # when the server got the request, before tokenisation
    explicit_max_tokens: bool = True
    tenant: str | None = None  # whose share of the class it is (a name or a digest, never an API key)
    fingerprint: str | None = None  # the same when a client sends the same request again
    front_ms: float | None = None  # measured time from the engine to the socket

    def __post_init__(self) -> None:
        limits = {"ttft_ms": MAX_TARGET_S * 1e3, "tpot_ms": MAX_TARGET_S * 1e3, "tbt_ms": MAX_TARGET_S * 1e3}
        sound = (
            isinstance(self.group, str)
            and 0 < len(self.group) <= 200
            and _whole(self.size)
            and 1 <= self.size <= MAX_GROUP
            and (self.slo_class is None or isinstance(self.slo_class, str))
            and all(
                value is None or (isinstance(value, str) and len(value) <= 80)
                for value in (self.tenant, self.fingerprint)
            )
            and isinstance(self.explicit_max_tokens, bool)
            and all(_within(getattr(self, key), limit) and getattr(self, key) != 0 for key, limit in limits.items())
            and _within(self.front_ms, 60_000.0)
            and _within(self.arrival_unix_s, math.inf)
        )
        if not sound:
            raise ValueError(f"not a request tag: {self!r}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _within(value: object, limit: float) -> bool:
    """Whether a value is None or a finite number from 0 to `limit`."""
    return value is None or ((_whole(value) or isinstance(value, float)) and 0 <= value <= limit and value < math.inf)  # type: ignore[operator]
