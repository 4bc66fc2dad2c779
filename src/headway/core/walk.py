"""Walk the coming steps forward: how much prefill each can carry and when a backlog is done.

Steps are sized so that their envelope stays under the pace s of the tightest decode. Step j then carries

    w_j = s / f - g - b n_j - k K*      seconds of prefill work (f = envelope / mean)

where n_j counts the decodes of today that may still be running in step j (each emits a token a step and ends by its
max output) and every pending prefill from its earliest possible completion on, and K* is what everything accepted
may ever hold. The backlog H is done in the first step j with w_1 + ... + w_j >= H. docs/design.md, section 5.

`capacity` is the vectorised walk, `capacity_naive` the loop that tests compare it with, and `closed_form` the
bound with one constant capacity: the walk never finishes later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.cost import CostCoefficients
from headway.core.request import RequestState

Floats = NDArray[np.float64]

#: Steps that a walk looks ahead at most; what is not done by then has no finite bound.
MAX_STEPS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Cumulative prefill capacity of the coming steps.

    Attributes:
        cumulative: seconds of prefill work done after step 1, 2, ... (shape: steps).
        step_s: time granted to each step (the envelope).
        factor: envelope / mean of a step.
        strict: count every step at its envelope. Otherwise j steps take (j + (f - 1) sqrt(j)) / f steps' time: the
            mean plus a margin that shrinks as independent errors do, equal to the envelope for one step.
    """

    cumulative: Floats
    step_s: float
    factor: float
    strict: bool

    def finish_s(self, backlog_s: Floats) -> Floats:
        """Return the time until each backlog (seconds of work) is done; inf beyond the walk. Same shape."""
        steps = np.searchsorted(self.cumulative, np.asarray(backlog_s) - 1e-9) + 1.0
        beyond = steps > len(self.cumulative)
        if not self.strict:
            steps = (steps + (self.factor - 1.0) * np.sqrt(steps)) / self.factor
        return np.where(beyond, math.inf, steps * self.step_s)


def work_s(cost: CostCoefficients, remaining: Sequence[int] | Floats, context: Sequence[int] | Floats) -> Floats:
    """Return the prefill work of pending requests in seconds (shape of the inputs)."""
    tokens = np.asarray(remaining, dtype=np.float64)
    return cost.a * tokens + cost.x * tokens * (np.asarray(context, dtype=np.float64) + tokens / 2)


def decode_counts(decoding: Sequence[RequestState], steps: int) -> Floats:
    """Return how many of the decodes may still run in step 1, 2, ..., `steps`."""
    left = [r.max_output_tokens - r.output_tokens for r in decoding]
    ends = np.bincount(np.clip(np.asarray(left, dtype=np.int64), 0, steps), minlength=steps + 1)
    # A decode with m tokens left runs in steps 1..m.
    return (len(left) - np.cumsum(ends[:steps])).astype(np.float64)


def capacity(
    cost: CostCoefficients,
    *,
    step_s: float,
    factor: float,
    decodes: Floats,
    reserved_tokens: float,
    backlog: Floats,
    taken_share: float = 0.0,
    strict: bool = False,
) -> Walk:
    """Walk `len(decodes)` steps.

    Args:
        cost: coefficients of the mean step.
        step_s: envelope of each step, s.
        factor: envelope / mean, f.
        decodes: decodes of today still running in step j (`decode_counts`).
        reserved_tokens: K*.
        backlog: cumulative work H of the pending prefills in the order of service, seconds, non-decreasing.
        taken_share: share of wall time that other prefill work is expected to take (foresight), 0..1.
        strict: see `Walk`.
    """
    base = step_s / factor - cost.g - cost.k * reserved_tokens
    # Pass 1: capacity if no pending prefill ever joined the decodes: their earliest completion.
    first = np.cumsum(np.maximum(base - cost.b * decodes, 0.0))
    steps = len(decodes)
    joined = np.searchsorted(first, backlog - 1e-9) + 1  # done within this step, a decode from the next on
    # counts[j] prefills are done in step j (1-based); step j + 1, at index j, has them among its decodes.
    counts = np.bincount(np.minimum(joined, steps), minlength=steps + 1)[:steps]
    extra = np.cumsum(counts).astype(np.float64)
    room = np.maximum(base - cost.b * (decodes + extra) - taken_share * step_s, 0.0)
    return Walk(cumulative=np.cumsum(room), step_s=step_s, factor=factor, strict=strict)


def capacity_naive(
    cost: CostCoefficients,
    *,
    step_s: float,
    factor: float,
    left: Sequence[int],
    reserved_tokens: float,
    backlog: Sequence[float],
    steps: int,
) -> list[float]:
    """The walk as a loop over steps and requests: the oracle of `capacity` (cumulative work after each step)."""
    base = step_s / factor - cost.g - cost.k * reserved_tokens
    done_first: list[float] = []
    total = 0.0
    for j in range(1, steps + 1):
        n = sum(1 for tokens in left if tokens >= j)
        total += max(base - cost.b * n, 0.0)
        done_first.append(total)
    cumulative: list[float] = []
    total = 0.0
    for j in range(1, steps + 1):
        n = sum(1 for tokens in left if tokens >= j)
        # In step j a pending prefill decodes when it may have been done after step j - 1.
        n += sum(1 for h in backlog if j >= 2 and done_first[j - 2] >= h - 1e-9)
        total += max(base - cost.b * n, 0.0)
        cumulative.append(total)
    return cumulative


def closed_form(
    cost: CostCoefficients,
    *,
    step_s: float,
    factor: float,
    decodes: int,
    pending: int,
    reserved_tokens: float,
    backlog_s: float,
) -> float:
    """Return ceil(H / w_min) * s with w_min at n* = |P| + |N| for ever, inf when nothing fits a step.

    docs/design.md, section 5 (TTFT test), in seconds of work instead of tokens.
    """
    room = step_s / factor - cost.g - cost.b * (decodes + pending) - cost.k * reserved_tokens
    if room <= 0:
        return math.inf
    return max(1, math.ceil(backlog_s / room - 1e-9)) * step_s
