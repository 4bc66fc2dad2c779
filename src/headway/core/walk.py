"""Walk the coming steps forward: how much prefill each can carry and when a backlog is done.

The policy sizes a step so that its envelope stays under the least slack of the decodes. Step j of length L_j carries

    w_j = L_j / f - g - b n_j - k K*      seconds of prefill work (f = envelope / mean)

where n_j counts the decodes of today that may still run in step j (each emits a token a step and ends by its max
output) and every pending prefill from its earliest possible completion on, and K* is what everything accepted may
ever hold. The backlog H is done in the first step j with w_1 + ... + w_j >= H. docs/design.md, section 5.

Lengths. Until the first pending prefill joins the decodes, the slack that they have banked is spent first:
L_j = min(blocking allowance, slack_j), slack_{j+1} = slack_j - L_j + s. From then on a stream without banked slack
may exist, so L_j = s, the tightest pace. With nothing decoding, L_j is the blocking allowance.

`capacity` is the vectorised walk, `capacity_naive` the loop that tests compare it with, and `closed_form` the bound
with one constant capacity: the walk never finishes later.
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

#: Steps over which banked slack is spent at most; later ones count at the pace.
SLACK_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Cumulative prefill capacity of the coming steps.

    Attributes:
        cumulative: seconds of prefill work done after step 1, 2, ... (shape: steps).
        ends_s: time at which step 1, 2, ... is over, from the start of the walk (shape: steps).
    """

    cumulative: Floats
    ends_s: Floats

    def finish_s(self, backlog_s: Floats) -> Floats:
        """Return the time until each backlog (seconds of work) is done; inf beyond the walk. Same shape."""
        at = np.searchsorted(self.cumulative, np.asarray(backlog_s) - 1e-9)
        beyond = at >= len(self.cumulative)
        return np.where(beyond, math.inf, self.ends_s[np.minimum(at, len(self.ends_s) - 1)])


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


def lengths(
    *, steps: int, pace_s: float, blocking_s: float, slack_s: float, floor_s: float, base_s: Floats, until_s: float
) -> Floats:
    """Return the length L_j of each of `steps` steps.

    Args:
        steps: how many.
        pace_s: tightest pace s.
        blocking_s: longest step allowed.
        slack_s: least slack of the decodes now, inf when nothing decodes.
        floor_s: envelope of the smallest step that carries prefill; with less slack a step is decode-only.
        base_s: L_j / f - w_j, the part of a step that is not prefill work, f times too short (shape: steps).
        until_s: work after which the first pending prefill joins the decodes.
    """
    out = np.full(steps, min(pace_s, blocking_s))
    if not math.isfinite(slack_s):
        # Nothing decodes before the first prefill is done.
        per_step = max(blocking_s - float(base_s[0]), 1e-9) if steps else 1.0
        out[: min(steps, math.ceil(min(until_s / per_step, steps)))] = blocking_s
        return out
    done = 0.0
    for j in range(min(steps, SLACK_STEPS)):
        if done >= until_s:
            slack_s = min(slack_s, pace_s)
            if slack_s >= pace_s:
                break
        length = min(blocking_s, slack_s)
        base = float(base_s[j])
        if length < floor_s:
            length = base  # decode-only: the streams gain slack
        else:
            done += length - base
        out[j] = length
        slack_s += pace_s - length
    return out


def capacity(
    cost: CostCoefficients,
    *,
    pace_s: float,
    blocking_s: float,
    slack_s: float,
    factor: float,
    min_chunk: int,
    decodes: Floats,
    reserved_tokens: float,
    backlog: Floats,
    strict: bool = False,
) -> Walk:
    """Walk `len(decodes)` steps.

    Args:
        cost: coefficients of the mean step.
        pace_s: tightest pace of everything accepted, s.
        blocking_s: longest step allowed.
        slack_s: least slack of the decodes now (negative: late); inf when nothing decodes.
        factor: envelope / mean, f.
        min_chunk: prompt tokens below which a step carries no prefill.
        decodes: decodes of today still running in step j (`decode_counts`).
        reserved_tokens: K*.
        backlog: cumulative work H of the pending prefills in the order of service, seconds, non-decreasing.
        strict: count every step at its envelope. Otherwise the envelope's margin of j steps is taken to grow as
            that of independent errors, sqrt(L_1^2 + ... + L_j^2), which equals the envelope for one step.
    """
    steps = len(decodes)
    base = cost.g + cost.k * reserved_tokens
    per_step = lengths(
        steps=steps,
        pace_s=pace_s,
        blocking_s=blocking_s,
        slack_s=slack_s,
        floor_s=factor * (base + cost.b * float(decodes[0]) + cost.work_s(min_chunk, 0)),
        base_s=factor * (base + cost.b * decodes),
        until_s=factor * float(backlog[0]) if len(backlog) else math.inf,
    )
    whole = per_step / factor - base
    # Pass 1: capacity if no pending prefill ever joined the decodes: their earliest completion.
    first = np.cumsum(np.maximum(whole - cost.b * decodes, 0.0))
    joined = np.searchsorted(first, backlog - 1e-9) + 1  # done within this step, a decode from the next on
    # counts[j] prefills are done in step j (1-based); step j + 1, at index j, has them among its decodes.
    counts = np.bincount(np.minimum(joined, steps), minlength=steps + 1)[:steps]
    room = np.maximum(whole - cost.b * (decodes + np.cumsum(counts)), 0.0)
    ends = np.cumsum(per_step)
    if not strict:
        ends = (ends + (factor - 1.0) * np.sqrt(np.cumsum(per_step * per_step))) / factor
    return Walk(cumulative=np.cumsum(room), ends_s=ends)


def capacity_naive(
    cost: CostCoefficients,
    *,
    lengths_s: Sequence[float],
    factor: float,
    left: Sequence[int],
    reserved_tokens: float,
    backlog: Sequence[float],
) -> list[float]:
    """The walk as a loop over steps and requests: the oracle of `capacity` (cumulative work after each step)."""
    base = cost.g + cost.k * reserved_tokens
    done_first: list[float] = []
    total = 0.0
    for j, length in enumerate(lengths_s, start=1):
        n = sum(1 for tokens in left if tokens >= j)
        total += max(length / factor - base - cost.b * n, 0.0)
        done_first.append(total)
    cumulative: list[float] = []
    total = 0.0
    for j, length in enumerate(lengths_s, start=1):
        n = sum(1 for tokens in left if tokens >= j)
        # In step j a pending prefill decodes when it may have been done after step j - 1.
        n += sum(1 for h in backlog if j >= 2 and done_first[j - 2] >= h - 1e-9)
        total += max(length / factor - base - cost.b * n, 0.0)
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
