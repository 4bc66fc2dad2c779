"""Compile numerical functions where numba is installed, as it is beside vLLM. Each result is the same to the last bit.

Calls of numpy on a few hundred numbers take longer than their arithmetic, and a decision makes about seventy of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

#: Why functions are not compiled: the first error of each, by name. Empty when all are.
failures: dict[str, str] = {}


def compiled(signature: str, *, plain: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function, or leaves it as it is where that cannot be done.

    Compiled code is kept beside the source or in the user's cache. Where neither can be written nothing is compiled: no
    process should take 10 s to start.

    Args:
        signature: of numba, like "f8(f8[::1], i8)". No other types are taken, so nothing is compiled in a decision.
        plain: what stands for the function when it is not compiled; None: itself.
    """

    def decorate(function: Function) -> Function:
        try:
            from numba import njit  # type: ignore[import-untyped]

            found: Function = njit(signature, cache=True, error_model="numpy")(function)
            if found is not function:  # it is with NUMBA_DISABLE_JIT
                return found
            failures[function.__name__] = "numba is told not to compile"
        except Exception as error:  # nothing is lost without it, whatever its cache or its libraries suffer from
            failures[function.__name__] = f"{type(error).__name__}: {error}"
        return function if plain is None else plain  # type: ignore[return-value]

    return decorate
