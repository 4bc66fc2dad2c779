"""Capacity: the highest offered rate at which a system still finishes work as fast as it arrives."""

from __future__ import annotations

from headway.replay.store import Run
from headway.trace import Trace
from headway.trace.selection import select


def saturate(trace: Trace, rate: float) -> Trace:
    """Return the trace offered at `rate` requests/s, several times what the system can serve."""
    return select(trace, rate=rate)


def served_rate(run: Run) -> float:
    """Return requests served per second of a saturated run: all that finished over first arrival to last end.

    A backlog exists nearly from start to end, so offering more would only lengthen the queue. The start and the
    tail (a few decodes left over) make it a slight underestimate, the less so the longer the run.
    """
    done = run.frame.filter(run.frame["status"] == "ok")
    if done.height < 20:
        raise ValueError(f"{done.height} requests finished: expected at least 20 to tell a rate")
    return float(done.height / (done["end_s"].max() - run.frame["scheduled_s"].min()))
