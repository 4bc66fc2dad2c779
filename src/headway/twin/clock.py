"""End times of the executed steps, kept as long as a running request may need them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class StepEnds:
    """A growing array of step end times, numbered from step 1; the front can be dropped."""

    __slots__ = ("_buffer", "_first", "_size")

    def __init__(self) -> None:
        self._buffer: Floats = np.empty(4096)
        self._first = 1  # step number of _buffer[0]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, end_s: float) -> None:
        """Add the end of the next step."""
        if self._size == len(self._buffer):
            self._grow(1)
        self._buffer[self._size] = end_s
        self._size += 1

    def extend(self, ends_s: Floats) -> None:
        """Add the ends of several steps."""
        n = len(ends_s)
        if self._size + n > len(self._buffer):
            self._grow(n)
        self._buffer[self._size : self._size + n] = ends_s
        self._size += n

    def slice(self, first: int, last: int) -> Floats:
        """Return the ends of steps first..last, both included (a view that the next change may overwrite)."""
        return self._buffer[first - self._first : last - self._first + 1]

    def drop_before(self, step: int) -> None:
        """Forget the steps before `step`."""
        gone = step - self._first
        if gone > 0:
            self._buffer[: self._size - gone] = self._buffer[gone : self._size].copy()
            self._size -= gone
            self._first = step

    def _grow(self, n: int) -> None:
        buffer = np.empty(max(2 * len(self._buffer), self._size + n))
        buffer[: self._size] = self._buffer[: self._size]
        self._buffer = buffer
