"""Policies: ordering and step size, one file each. The registry below is the whole list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway import registry
from headway.core import Policy
from headway.policies.edf import Edf
from headway.policies.fcfs import Fcfs
from headway.policies.headway import Headway
from headway.policies.priority import Priority
from headway.policies.sola import Sola

#: name -> factory; keyword arguments are the policy's parameters.
REGISTRY: dict[str, Callable[..., Policy]] = {
    "fcfs": Fcfs,
    "edf": Edf,
    "priority": Priority,
    "sola": Sola,
    "headway": Headway,
}


def create(name: str, **parameters: Any) -> Policy:
    """Return a new policy.

    Raises:
        InputError: the name or a parameter is unknown, or a value is impossible.
    """
    return registry.create("policy", REGISTRY, name, parameters)


__all__ = ["REGISTRY", "create"]
