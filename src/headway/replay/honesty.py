"""How honest the client was: lateness, event-loop lag, CPU, and whether the run may be believed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway.replay.targets import Targets

#: A run is invalid when the loop was this late at P99.
LOOP_LAG_LIMIT_S = 0.050
#: Lateness allowed at P99: this share of the tightest TTFT target, never under the floor.
LATENESS_SHARE, LATENESS_FLOOR_S = 0.05, 0.010
#: The same without any TTFT target.
LATENESS_DEFAULT_S = 0.050

_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What the client has used of its CPU at one moment, seconds: `wait_s` it was ready to run and had to wait for one.

    Waiting is the machine's doing, not the client's, and None where the kernel does not tell.
    """

    cpu_s: float
    wait_s: float | None

    @classmethod
    def now(cls) -> CpuUse:
        """Return the use up to now: CPU of the process, wait of this thread, which runs the event loop."""
        try:
            with open("/proc/thread-self/schedstat") as file:
                wait_s = int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            wait_s = None
        return cls(time.process_time(), wait_s)

    def since(self, before: CpuUse) -> CpuUse:
        """Return what was used since `before`."""
        known = self.wait_s is not None and before.wait_s is not None
        wait_s = max(0.0, self.wait_s - before.wait_s) if known else None
        return CpuUse(max(0.0, self.cpu_s - before.cpu_s), wait_s)


class LoopLag:
    """Samples how late the event loop runs a timer, 50 times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self.samples: list[float] = []

    def start(self) -> None:
        """Begin to sample."""
        self._due = time.perf_counter() + _TICK_S
        self._handle = self._loop.call_later(_TICK_S, self._tick)

    def stop(self) -> None:
        """Stop."""
        if self._handle is not None:
            self._handle.cancel()

    def _tick(self) -> None:
        self.samples.append(max(0.0, time.perf_counter() - self._due))
        self.start()


def spread(values: list[float]) -> dict[str, float | int | None]:
    """Return n, p50, p99 and max in milliseconds (nearest rank)."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50_ms": _ms(nearest_rank(ordered, 0.50)),
        "p99_ms": _ms(nearest_rank(ordered, 0.99)),
        "max_ms": _ms(ordered[-1] if ordered else None),
    }


def nearest_rank(ordered: list[float], q: float) -> float | None:
    """Return the smallest of the ordered values that at least the share `q` of them does not exceed."""
    # The guard keeps 0.99 * 100 = 99.00000000000001 at rank 99.
    return ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)] if ordered else None


def lateness_limit_s(targets: Iterable[Targets]) -> float:
    """Return the P99 lateness above which the client was the bottleneck."""
    tightest = min((t.ttft_s for t in targets if t.ttft_s is not None), default=None)
    return LATENESS_DEFAULT_S if tightest is None else max(LATENESS_FLOOR_S, LATENESS_SHARE * tightest)


def verdict(*, lateness: dict, loop_lag: dict, limit_s: float) -> list[str]:
    """Return why the run must not be believed; empty for a valid one."""
    reasons = []
    if lateness["p99_ms"] is not None and lateness["p99_ms"] > limit_s * 1e3:
        reasons.append(
            f"client late: P99 of (sent - scheduled) {lateness['p99_ms']:.1f} ms over {limit_s * 1e3:.1f} ms "
            f"({LATENESS_SHARE:.0%} of the tightest TTFT target, at least {LATENESS_FLOOR_S * 1e3:.0f} ms)"
        )
    if loop_lag["p99_ms"] is not None and loop_lag["p99_ms"] > LOOP_LAG_LIMIT_S * 1e3:
        reasons.append(
            f"client overloaded: P99 event-loop lag {loop_lag['p99_ms']:.1f} ms over {LOOP_LAG_LIMIT_S * 1e3:.0f} ms"
        )
    return reasons


def nothing_served(counts: Mapping[str, int], tokens: int) -> list[str]:
    """Return why a run says nothing of the server: not one request was served or refused (outcomes by name)."""
    if counts["ok"] or counts["refused"]:
        return []
    # Cut off in the middle of an answer is slow service; without any token it is none.
    if not counts["failed"] and (tokens or not counts["cut_off"]):
        return []
    return [f"no request was served or refused: {counts['failed']} failed, {counts['cut_off']} cut off"]


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value * 1e3, 3)
