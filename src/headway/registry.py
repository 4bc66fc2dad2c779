"""Makes a policy or an admission test by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from headway.errors import InputError

T = TypeVar("T")


def create(kind: str, registry: Mapping[str, Callable[..., T]], name: str, parameters: Mapping[str, Any]) -> T:
    """Return `registry[name](**parameters)`; `kind` is the word for it in errors.

    Raises:
        InputError: the name or a parameter is unknown, or a value is of another type or impossible.
    """
    if name not in registry:
        raise InputError(f"{kind} = {name!r}: expected one of {', '.join(registry)}")
    for key, value in parameters.items():
        if (wanted := expected(registry[name], name, key, value)) is not None:
            raise InputError(f"{kind} {name}: {key} = {value!r}: expected {wanted}")
    try:
        return registry[name](**parameters)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key} = {value!r}" for key, value in parameters.items())
        raise InputError(f"{kind} {name} with {given}: {error}") from error


def expected(factory: Callable[..., Any], name: str, parameter: str, value: object) -> str | None:
    """Return what a parameter of `name` should have been; None when it exists and the value is of its type.

    No text is a number, and none is true or false.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # not needed to import a policy

    known: dict[str, Any] = {}
    if not (inspect.isclass(factory) and "__init__" not in vars(factory)):
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
        known = {each: hints.get(each, Any) for each in inspect.signature(factory).parameters}
    if parameter not in known:
        return f"one of {', '.join(known)}" if known else f"nothing: {name} has no parameters"
    try:
        TypeAdapter(known[parameter], config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        return words(error.errors()[0]["msg"])
    return None


def words(message: str) -> str:
    """Return what a failed check of pydantic wanted, to stand behind "expected"."""
    return (message[:1].lower() + message[1:]).removeprefix("input should be ")
