"""The event loop: arrivals, step boundaries of every replica and the end of the run in one heap.

Events are ordered by (time, priority, sequence): at one moment arrivals come first, then step boundaries, then the
end. The same input gives the same results to the last bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from headway.twin.engine import Engine
from headway.twin.recorder import Recorder
from headway.twin.router import Router
from headway.twin.source import Arrival

_ARRIVAL, _BOUNDARY, _END = 0, 1, 2


class Simulation:
    """Engines behind a router.

    Args:
        engines: the replicas.
        router: picks one for each arrival.
        source: requests in the order of arrival.
        recorder: shared by the engines; gets what is cut off at the end.
        grace_s: seconds after the last arrival until open requests are cut off; None: run until all are done.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        router: Router,
        source: Iterator[Arrival],
        recorder: Recorder,
        grace_s: float | None = None,
    ) -> None:
        self.engines = engines
        self.router = router
        self.recorder = recorder
        self.grace_s = grace_s
        self.now_s = 0.0
        self._source = source
        self._heap: list[tuple[float, int, int, int, int]] = []  # time, priority, sequence, engine, wake
        self._sequence = 0
        self._coming: Arrival | None = None

    def run(self) -> float:
        """Run to the end; return its time."""
        heap, engines = self._heap, self.engines
        self._next_arrival()
        while heap:
            now, kind, _, index, wake = heapq.heappop(heap)
            if kind == _BOUNDARY:
                engine = engines[index]
                if wake != engine.wakes:
                    continue
                self.now_s = now
                at = engine.advance(now, math.inf if self._coming is None else self._coming.time_s)
                if at is not None:
                    self._push(at, _BOUNDARY, index, wake)
            elif kind == _ARRIVAL:
                self.now_s = now
                arrival = self._coming
                index = self.router.pick(engines, now, arrival) if len(engines) > 1 else 0
                engine = engines[index]
                engine.gate.receive(now, arrival)
                if engine.idle:  # asleep, or polling without work: it looks at once
                    engine.idle = False
                    engine.wakes += 1
                    self._push(now, _BOUNDARY, index, engine.wakes)
                self._next_arrival()
                if self._coming is None and self.grace_s is not None:
                    self._push(now + self.grace_s, _END, 0, 0)
            else:
                self._cut_off(now)
                break
        return self.now_s

    def _next_arrival(self) -> None:
        self._coming = next(self._source, None)
        if self._coming is not None:
            self._push(self._coming.time_s, _ARRIVAL, 0, 0)

    def _push(self, time_s: float, priority: int, engine: int, wake: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, priority, self._sequence, engine, wake))

    def _cut_off(self, now: float) -> None:
        for engine in self.engines:
            for job in engine.open_jobs():
                self.recorder.cut_off(job, now, engine.times_so_far(job, now))
                self.now_s = now
