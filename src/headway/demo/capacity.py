"""Capacity: the highest offered rate at which a system still finishes work as fast as it arrives."""

from __future__ import annotations

from headway.demo.arena import Arena
from headway.demo.systems import System
from headway.demo.workload import Workload
from headway.replay.store import Run

#: A saturated run shorter than this says little; more requests are offered then.
LEAST_S = 20.0


def measure(arena: Arena, system: System, workload: Workload, *, n: int = 90, seed: int = 1) -> tuple[float, Run]:
    """Return the capacity of `system` in requests/s and the saturated run that showed it."""
    while True:
        trace = workload.offered(rate=max(10.0, n / 4), seed=seed, n=n)
        run = arena.run(
            system,
            trace,
            workload.targets,
            seed=seed,
            label=f"{workload.kind}-capacity-{system.name}-{n}",
            grace_s=240.0,
        )
        rate = served_rate(run)
        if n / rate >= LEAST_S or n >= 20_000:
            return rate, run
        n = int(min(20_000, max(2 * n, 1.3 * LEAST_S * rate)))


def served_rate(run: Run) -> float:
    """Return requests served per second of a saturated run: all that finished over first arrival to last end.

    A backlog exists nearly from start to end, so offering more would only lengthen the queue. The start and the
    tail (a few decodes left over) make it a slight underestimate, the less so the longer the run.
    """
    done = run.frame.filter(run.frame["status"] == "ok")
    if done.height < 20:
        raise ValueError(f"{done.height} requests finished: expected at least 20 to tell a rate")
    return float(done.height / (done["end_s"].max() - run.frame["scheduled_s"].min()))
