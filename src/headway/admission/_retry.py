"""When the same request, with a deadline as far from its new arrival, would pass: the wait that a refusal tells.

What is accepted is taken as it is now: it is served and ends, nothing else comes. How a client that waits finds its
place although others came meanwhile is the desk's part (core/bookings.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headway.core import Ledger
from headway.core.loops import Floats, first_in_time


def first_token_wait_s(finish: Floats, dues: Floats, due_s: float, behind: int) -> float | None:
    """Return the least wait after which its first token would come by a deadline that is as much later.

    A later deadline lets pending requests go ahead that are behind it now, so each place in the queue is tried: from
    place k on it is due no sooner than the request before it, and in time when everything up to there is done.

    Args:
        finish: engine-clock time at which the request is done when it has k of the pending ones ahead (shape: one
            more than `dues`); the places that it could have at a deadline of `due_s` or later.
        dues: deadlines of the pending requests behind it now, in their order.
        due_s: its deadline now.
        behind: how many of those it must let ahead, because it would break their promises.
    """
    place = first_in_time(finish, dues, behind)
    done = float(finish[place])
    earliest = float(dues[place - 1]) if place else due_s
    return max(done, earliest) - due_s if math.isfinite(done) else None


def departure_wait_s(ledger: Ledger, enough: Callable[[int, int], bool]) -> float | None:
    """Return the time until enough of today's decodes have ended by their max output at the pace they are promised.

    Args:
        ledger: of the engine.
        enough: of (how many ended, tokens that they had reserved): whether the request would pass.
    """
    ends = sorted(
        (r.remaining_output * r.slo.pace_s, r.reserved_tokens)
        for r in ledger.decoding.values()
        if math.isfinite(r.slo.pace_s)
    )
    tokens = 0
    for ended, (at, reserved) in enumerate(ends, start=1):
        tokens += reserved
        if enough(ended, tokens):
            return at
    return None
