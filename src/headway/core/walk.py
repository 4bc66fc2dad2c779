"""Walk the coming steps forward: how much prefill each can carry and when a backlog is done.

The policy sizes a step so that its envelope stays under the least slack of the decodes. Step j of length L_j carries

    w_j = L_j / f - g - b n_j - k K*      seconds of prefill work (f = envelope / mean)

where n_j counts the decodes of today that may still run in step j (each emits a token a step and ends by its max
output) and every pending prefill from its earliest possible completion on, and K* is what everything accepted may
ever hold. The backlog H is done in the first step j with w_1 + ... + w_j >= H. docs/design.md, section 5.

Lengths. Until the first pending prefill joins the decodes, the slack that they have banked is spent first:
L_j = min(blocking allowance, slack_j), slack_{j+1} = slack_j - L_j / f + s. From then on a stream without banked slack
may exist, so L_j = s, the tightest pace. With nothing decoding, L_j is the blocking allowance.

`capacity` is the vectorised walk along the expected course, `capacity_naive` the loop that tests compare it with.
`guaranteed` is the walk that no run can be later than, `Slot.finish_s` the same with one constant capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core.cost import CostCoefficients

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Steps that a walk looks ahead at most; what is not done by then has no finite bound.
MAX_STEPS = 2048

#: Steps over which banked slack is spent at most; later ones count at the pace.
SLACK_STEPS = 64


_NEVER = np.array([math.inf])

#: 1, 2, ..., MAX_STEPS.
_SLOTS = np.arange(1, MAX_STEPS + 1, dtype=np.float64)
_SLOTS.flags.writeable = False

#: At a glance, what is in time by less than this counts as late: more than sums of seconds are rounded by.
_CLEAR_S = 1e-6


class Glance(NamedTuple):
    """Who is in time for certain; who is not may be late.

    Attributes:
        end_s: when the candidate is done, from the start of the walk; inf beyond it.
        ahead: everybody before the candidate is in time.
        all: everybody before and behind it is. Of the candidate it only says that it is done before the walk ends.
    """

    end_s: float
    ahead: bool
    all: bool


class Walk(NamedTuple):
    """Cumulative prefill capacity of the coming steps.

    Attributes:
        cumulative: seconds of prefill work done after step 1, 2, ... (shape: steps).
        ends_s: time at which step 1, 2, ... is over, from the start of the walk (shape: steps).
    """

    cumulative: Floats
    ends_s: Floats

    def finish_s(self, backlog_s: Floats) -> Floats:
        """Return the time until each backlog is done (seconds of work, non-decreasing); inf beyond the walk."""
        # There are fewer steps than backlogs where time counts, so steps are looked up: how many each has done.
        done = backlog_s.searchsorted(self.cumulative + 1e-9, side="right")
        return _between(np.concatenate((self.ends_s, _NEVER)), done, len(backlog_s))

    def done_by_s(self, times: Floats) -> Floats:
        """Return the work that is done by each of some times (non-decreasing); -inf before the first step is over.

        A backlog is done in time, `finish_s(backlog) <= times`, where it is at most that (and 1e-9 more).
        """
        return _between(np.concatenate((-_NEVER, self.cumulative)), times.searchsorted(self.ends_s), len(times))

    def glance(self, backlog_s: Floats, at: int, dues_s: Floats, start_s: float) -> Glance:
        """Return whether all are in time, by a look at each step: there are fewer steps than requests that wait.

        Args:
            backlog_s: cumulative work, non-decreasing; that of the candidate at place `at`.
            at: how many go before the candidate.
            dues_s: deadlines of the others in their order (shape: one less than the backlog), by some clock.
            start_s: start of the walk by the same clock.
        """
        done = backlog_s.searchsorted(self.cumulative + 1e-9, side="right")
        # Of those who are due before a step is over, each must be done a step earlier.
        needed = dues_s.searchsorted(self.ends_s + (start_s + _CLEAR_S))
        needed[int(needed.searchsorted(at, side="right")) :] += 1  # in the backlog the candidate stands among them
        place = int(done.searchsorted(at, side="right"))
        end_s = float(self.ends_s[place]) if place < len(done) else math.inf
        if needed[0]:
            return Glance(end_s, not at, False)
        # Who is needed and not done stands at place `done` of that step; all before the first such are in time.
        missing = done[:-1] < needed[1:]
        first = int(missing.argmax()) if len(missing) else 0
        in_time = int(done[first if len(missing) and missing[first] else -1])
        return Glance(end_s, in_time >= at, in_time == len(backlog_s))

    def end_s(self, backlog_s: float) -> float:
        """Return the time until one backlog is done: `finish_s`."""
        steps = int(self.cumulative.searchsorted(backlog_s - 1e-9))
        return float(self.ends_s[steps]) if steps < len(self.ends_s) else math.inf

    def done_s(self, time_s: float) -> float:
        """Return the work that is done by one time: `done_by_s`."""
        steps = int(self.ends_s.searchsorted(time_s, side="right"))
        return float(self.cumulative[steps - 1]) if steps else -math.inf


def _between(values: Floats, places: NDArray[np.intp], total: int) -> Floats:
    """Return `total` entries: the first of `values` before places[0], the next before places[1], ..., the last one."""
    bounds = np.empty(len(places) + 2, dtype=np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = 0, places, total
    return np.asarray(values.repeat(bounds[1:] - bounds[:-1]))


def work_s(cost: CostCoefficients, remaining: Floats, context: Floats) -> Floats:
    """Return the prefill work of pending requests in seconds (shape of the inputs): `CostCoefficients.work_s`."""
    if not cost.x:
        return remaining * cost.a
    # remaining * (a + x * (context + 0.5 * remaining)), in one array
    work = 0.5 * remaining
    work += context
    work *= cost.x
    work += cost.a
    work *= remaining
    return work


def decode_counts(left: Ints, steps: int) -> Floats:
    """Return how many of the decodes with `left` tokens to come may still run in step 1, 2, ..., `steps`."""
    # A decode with m tokens left runs in steps 1..m.
    ended = np.bincount(np.minimum(np.maximum(left, 0), steps), minlength=steps + 1)[:steps].cumsum()
    return len(left) - ended.astype(np.float64)


def lengths(
    *,
    steps: int,
    pace_s: float,
    blocking_s: float,
    slack_s: float,
    floor_s: float,
    base_s: Floats,
    until_s: float,
    factor: float = 1.0,
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
        factor: envelope / mean, f. A step of length L takes L / f on average and the streams bank the rest, so with
            a backlog lengths settle at f times the pace: then a step takes one pace.
    """
    settled = min(factor * pace_s, blocking_s)
    out = np.empty(steps)
    out.fill(settled)
    if not math.isfinite(slack_s):
        # Nothing decodes before the first prefill is done.
        per_step = max(blocking_s - float(base_s[0]), 1e-9) if steps else 1.0
        out[: min(steps, math.ceil(min(until_s / per_step, steps)))] = blocking_s
        return out
    done = 0.0
    joined = False
    for j in range(min(steps, SLACK_STEPS)):
        if joined:
            if 0.99 * settled <= slack_s <= 1.01 * settled:
                break
        elif done >= until_s:
            joined = True
            slack_s = min(slack_s, pace_s)
        length = min(blocking_s, slack_s)
        base = float(base_s[j])
        if length < floor_s:
            length = base  # decode-only: the streams gain slack
        else:
            done += length - base
        out[j] = length
        slack_s += pace_s - length / factor
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
) -> Walk:
    """Walk `len(decodes)` steps along their expected course, each as long as its envelope.

    Steps carry what they carry on average, but their errors are not taken to average out: on a real host they last
    for seconds (docs/log.md).

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
    """
    steps = len(decodes)
    base = cost.g + cost.k * reserved_tokens
    load = cost.b * decodes
    per_step = lengths(
        steps=steps,
        pace_s=pace_s,
        blocking_s=blocking_s,
        slack_s=slack_s,
        floor_s=factor * (base + float(load[0]) + cost.work_s(min_chunk, 0)),
        base_s=factor * (base + load),
        until_s=factor * float(backlog[0]) if len(backlog) else math.inf,
        factor=factor,
    )
    # Pass 1: capacity if no pending prefill ever joined the decodes: their earliest completion.
    free = per_step / factor - base - load
    first = np.maximum(free, 0.0).cumsum()
    # Done within step j, a decode from step j + 1 on: at index j, those done in steps 1..j.
    free[1:] -= cost.b * backlog.searchsorted(first[:-1] + 1e-9, side="right").astype(np.float64)
    room = np.maximum(free, 0.0)
    return Walk(cumulative=room.cumsum(), ends_s=per_step.cumsum())


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


class Slot(NamedTuple):
    """What a full step carries at worst.

    Attributes:
        step_s: shortest length that the decodes leave a step, min(tightest pace, blocking allowance).
        length_s: shortest length of a full step: less what may be left over in it, and what the token budget ends.
        room_s: prefill work of `length_s` with everything accepted decoding (may be negative).
        uniform: the token budget ends steps, so that departures of decodes must not be counted on.
        lines: (slope, burst) of envelopes of steps in a row: steps whose own envelopes are T seconds in sum take at
            most slope * T + burst.
    """

    step_s: float
    length_s: float
    room_s: float
    uniform: bool
    lines: tuple[tuple[float, float], ...] = ()

    def latest_s(self, envelope_s: Floats) -> Floats:
        """Return by when steps are over whose envelopes take so long in sum (shape of it)."""
        latest = envelope_s
        for slope, burst in self.lines:
            latest = np.minimum(latest, slope * envelope_s + burst)
        return latest

    def within_s(self, time_s: float) -> float:
        """Return how long the envelopes of steps that are over by a time take in sum: `latest_s` inverted."""
        return max([time_s, *((time_s - burst) / slope for slope, burst in self.lines)])

    def finish_s(self, backlog: Floats) -> Floats:
        """Return ceil(H / w) * L + s with everything accepted decoding for ever; inf when nothing fits a step.

        The closed form: the TTFT test of docs/design.md, section 5, in seconds of work instead of tokens, and one step
        longer (see `guaranteed`, which is never later).
        """
        if self.room_s <= 0 or self.length_s <= 0:
            return np.full(len(backlog), math.inf)
        slots = np.maximum(1.0, np.ceil(backlog / self.room_s - 1e-9))
        return np.asarray(self.latest_s(slots * self.length_s) + self.step_s)

    def done_by_s(self, times: Floats) -> Floats:
        """Return the work that is done by each of some times, as `Walk.done_by_s` does."""
        if self.room_s <= 0 or self.length_s <= 0:
            return np.full(len(times), -math.inf)
        within = times - self.step_s
        for slope, burst in self.lines:
            within = np.maximum(within, (times - self.step_s - burst) / slope)
        slots = np.floor(within / self.length_s)
        return np.where(slots < 1, -math.inf, slots * self.room_s)

    def end_s(self, backlog_s: float) -> float:
        """Return the time until one backlog is done: `finish_s`."""
        return float(self.finish_s(np.array([backlog_s]))[0])

    def done_s(self, time_s: float) -> float:
        """Return the work that is done by one time: `done_by_s`."""
        return float(self.done_by_s(np.array([time_s]))[0])


def worst_slot(
    cost: CostCoefficients,
    *,
    step_s: float,
    factor: float,
    served: int,
    reserved_tokens: float,
    waste_s: float,
    step_tokens: int,
    lines: tuple[tuple[float, float], ...] = (),
) -> Slot:
    """Return the worst full step.

    Args:
        cost: coefficients of the mean step.
        step_s: min(tightest pace, blocking allowance).
        factor: envelope / mean, f.
        served: n*, everything accepted and the candidate.
        reserved_tokens: K*.
        waste_s: work of the largest chunk that a step may leave out because it is too small.
        step_tokens: prompt tokens that the token budget leaves a step with n* decodes.
        lines: envelopes of steps in a row (`Slot.lines`).
    """
    base = cost.g + cost.b * served + cost.k * reserved_tokens
    length = step_s - factor * waste_s
    tokens_s = max(0.0, cost.a * step_tokens)
    uniform = cost.g + tokens_s < length / factor
    if uniform:
        length = min(length, factor * (base + tokens_s))
    return Slot(step_s=step_s, length_s=length, room_s=length / factor - base, uniform=uniform, lines=lines)


def guaranteed(
    cost: CostCoefficients, slot: Slot, *, factor: float, decodes: Floats, reserved_tokens: float, backlog: Floats
) -> Walk:
    """Walk slots that no run whose steps stay under their envelopes is later than.

    Full steps are at least `slot.length_s` long, so up to a time T they pay their fixed cost at most T / length times,
    and a decode that is there for m steps pays b at most min(m, T / length) times; what is left of T is prefill work.
    A pending prefill decodes no sooner than after the work before it. Slots in which decodes take more than there is
    count as negative: real steps are then longer, and the same payments come later. A step that completes a first
    token ends by its deadline; one `step_s` more leaves every step before that its full length. Slots are laid out in
    the time of envelopes; by the clock they are over at `Slot.latest_s`. The proof is in docs/guarantee.md.

    Args:
        cost: coefficients of the mean step.
        slot: the worst full step.
        factor: envelope / mean, f.
        decodes: decodes of today still running in slot j (`decode_counts`); as many slots are walked.
        reserved_tokens: K*.
        backlog: cumulative work H of the pending prefills in the order of service, seconds, non-decreasing.
    """
    steps = len(decodes)
    slots = _SLOTS[:steps]
    if slot.length_s <= 0:
        room = np.zeros(steps)
    elif slot.uniform:
        room = np.full(steps, max(slot.room_s, 0.0))
    else:
        joined = backlog.searchsorted(slots * (slot.length_s / factor)).astype(np.float64)
        base = cost.g + cost.k * reserved_tokens
        room = slot.length_s / factor - base - cost.b * (decodes + joined)
    ends = slot.latest_s(slot.length_s * slots) + slot.step_s
    return Walk(cumulative=np.maximum.accumulate(np.maximum(room.cumsum(), 0.0)), ends_s=ends)
