"""A timer with microsecond resolution on Linux (timerfd); event loops alone wake at whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_ABSOLUTE = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Alarm:
    """Calls `callback` once at a `time.perf_counter()` moment; setting it again replaces the moment.

    `precise` tells whether a timerfd is behind it; elsewhere the loop's own timer is used, up to 1 ms late.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC) if self._libc else -1
        self.precise = self._fd >= 0
        if self.precise:
            loop.add_reader(self._fd, self._ring)

    def set(self, at: float) -> None:
        """Ring at `at`, at once when it has passed."""
        if not self.precise:
            self.clear()
            self._handle = self._loop.call_later(max(0.0, at - time.perf_counter()), self._callback)
            return
        # A zero value would disarm the timer; one nanosecond is long past.
        nanoseconds = max(1, int(at * 1e9))
        self._settime(_TimeSpec(*divmod(nanoseconds, 1_000_000_000)))

    def clear(self) -> None:
        """Do not ring."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self.precise:
            self._settime(_TimeSpec(0, 0))

    def close(self) -> None:
        """Give the timer back; it never rings again."""
        self.clear()
        if self.precise:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.precise = False

    def _settime(self, value: _TimeSpec) -> None:
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set to a later moment since it rang
        self._callback()
