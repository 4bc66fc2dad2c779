"""Admission tests, one file each. The registry below is the whole list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway import registry
from headway.admission.admit_all import AdmitAll
from headway.admission.chronos import Chronos
from headway.admission.clairvoyant import Clairvoyant
from headway.admission.queue_depth import QueueDepth
from headway.admission.queued_tokens import QueuedTokens
from headway.admission.response_time import ResponseTime
from headway.admission.token_bucket import TokenBucket
from headway.core import Admission

#: name -> factory; keyword arguments are the test's parameters.
REGISTRY: dict[str, Callable[..., Admission]] = {
    "admit_all": AdmitAll,
    "queue_depth": QueueDepth,
    "queued_tokens": QueuedTokens,
    "response_time": ResponseTime,
    "token_bucket": TokenBucket,
    "chronos": Chronos,
    "clairvoyant": Clairvoyant,
}


def create(name: str, **parameters: Any) -> Admission:
    """Return a new admission test.

    Raises:
        InputError: the name or a parameter is unknown, or a value is impossible.
    """
    return registry.create("admission", REGISTRY, name, parameters)


__all__ = ["REGISTRY", "create"]
