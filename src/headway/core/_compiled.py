"""Compile numerical functions where numba is installed, as it is beside vLLM. The source, and each result, is the same.

Calls of numpy on a few hundred numbers take longer than their arithmetic, and a decision makes about seventy of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _here() -> None:
    """Nothing; compiled code is kept beside this file, or in the user's cache."""


try:
    from numba import njit  # type: ignore[import-untyped]

    njit(cache=True)(_here)
except (ImportError, RuntimeError):  # not installed, or nowhere to keep it: no process should take 10 s to start
    njit = None

#: Whether functions are compiled.
COMPILES = njit is not None


def compiled(signature: str) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function for arguments of these types, or leaves it as it is.

    Args:
        signature: of numba, like "f8(f8[::1], i8)". No other types are taken, so nothing is compiled in a decision.
    """

    def decorate(function: Function) -> Function:
        if njit is None:
            return function
        found: Function = njit(signature, cache=True, error_model="numpy")(function)
        return found

    return decorate
