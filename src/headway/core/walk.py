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

from headway.core import loops
from headway.core.cost import CostCoefficients
from headway.core.loops import Floats

#: Steps that a walk looks ahead at most; what is not done by then has no finite bound.
MAX_STEPS = 2048


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
        return loops.finish(self.cumulative, self.ends_s, backlog_s)

    def done_by_s(self, times: Floats) -> Floats:
        """Return the work that is done by each of some times (non-decreasing); -inf before the first step is over.

        A backlog is done in time, `finish_s(backlog) <= times`, where it is at most that (and 1e-9 more).
        """
        return loops.done_by(self.cumulative, self.ends_s, times)

    def glance(self, backlog_s: Floats, at: int, dues_s: Floats, start_s: float) -> Glance:
        """Return whether all are in time, by a look at each step: there are fewer steps than requests that wait.

        Args:
            backlog_s: cumulative work, non-decreasing; that of the candidate at place `at`.
            at: how many go before the candidate.
            dues_s: deadlines of the others in their order (shape: one less than the backlog), by some clock.
            start_s: start of the walk by the same clock.
        """
        return Glance(*loops.glance(self.cumulative, self.ends_s, backlog_s, at, dues_s, start_s))

    def end_s(self, backlog_s: float) -> float:
        """Return the time until one backlog is done: `finish_s`."""
        steps = int(self.cumulative.searchsorted(backlog_s - 1e-9))
        return float(self.ends_s[steps]) if steps < len(self.ends_s) else math.inf

    def done_s(self, time_s: float) -> float:
        """Return the work that is done by one time: `done_by_s`."""
        steps = int(self.ends_s.searchsorted(time_s, side="right"))
        return float(self.cumulative[steps - 1]) if steps else -math.inf


def work_s(cost: CostCoefficients, remaining: Floats, context: Floats) -> Floats:
    """Return the prefill work of pending requests in seconds (shape of the inputs): `CostCoefficients.work_s`."""
    return loops.work(cost.a, cost.x, remaining, context)


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
    base_s = cost.g + cost.k * reserved_tokens
    chunk_s = cost.work_s(min_chunk, 0)
    return Walk(*loops.capacity(base_s, cost.b, chunk_s, pace_s, blocking_s, slack_s, factor, decodes, backlog))


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
    if slot.length_s <= 0 or slot.uniform:
        slots = np.arange(1, len(decodes) + 1, dtype=np.float64)
        room_s = max(slot.room_s, 0.0) if slot.length_s > 0 else 0.0
        # Without a length nothing is ever done; ends in order all the same, as whoever looks them up counts on it.
        ends_s = slot.latest_s(max(slot.length_s, 0.0) * slots) + slot.step_s
        return Walk(np.full(len(slots), room_s).cumsum(), ends_s)
    base_s, lines = cost.g + cost.k * reserved_tokens, np.array(slot.lines).reshape(-1, 2)
    return Walk(*loops.guaranteed(slot.length_s, factor, base_s, cost.b, slot.step_s, lines, decodes, backlog))
