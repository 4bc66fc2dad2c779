"""Makes a policy or an admission test by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from headway.errors import InputError

T = TypeVar("T")


def create(kind: str, registry: Mapping[str, Callable[..., T]], name: str, parameters: Mapping[str, Any]) -> T:
    """Return `registry[name](**parameters)`; `kind` is the word for it in errors.

    Raises:
        InputError: the name or a parameter is unknown, or a value is impossible.
    """
    if name not in registry:
        raise InputError(f"{kind} = {name!r}: expected one of {', '.join(registry)}")
    try:
        return registry[name](**parameters)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key} = {value!r}" for key, value in parameters.items())
        raise InputError(f"{kind} {name} with {given}: {error}") from error
