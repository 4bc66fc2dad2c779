"""How to replay: the options of a run, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.errors import InputError
from headway.trace.selection import check_seed

#: Endpoint -> path on the server.
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def check_header_values(classes: Iterable[str]) -> None:
    """Raise `InputError` for a class whose name can't be sent in an HTTP header."""
    for name in classes:
        if not (name.isascii() and name.isprintable() and name == name.strip()):
            raise InputError(f"class {name!r}: expected visible ASCII, or --no-slo-headers: it is sent in a header")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to replay. See `client.replay` for the meaning of each; raises `InputError`."""

    url: str
    model: str | None = None
    endpoint: str = "completions"
    prompts: str = "text"
    tokenizer: Path | None = None
    seed: int = 0
    send_slo_headers: bool = True
    api_key: str | None = None
    extra_body: Mapping[str, object] | None = None
    closed_loop: bool = False
    max_in_flight: int | None = None
    timeout_s: float = 600.0
    grace_s: float = 60.0
    label: str = ""

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise InputError(f"endpoint {self.endpoint!r}: expected one of {', '.join(ENDPOINTS)}")
        if self.prompts not in ("text", "tokens"):
            raise InputError(f"prompts {self.prompts!r}: expected text or tokens")
        check_seed(self.seed)
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise InputError(f"max_in_flight {self.max_in_flight}: expected at least 1")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("api_key: expected visible ASCII characters")
        for name in ("timeout_s", "grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} = {value!r}: expected seconds above 0")
