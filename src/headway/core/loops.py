"""The numerical parts of the walk over the coming steps (core/walk.py), on plain arrays and numbers.

Floats are seconds. What numba compiles is a part of Python and numpy, and this file keeps to that part.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headway.core.compiling import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Steps over which banked slack is spent at most; later ones count at the pace.
SLACK_STEPS = 64

#: At a glance, what is in time by less than this counts as late: more than sums of seconds are rounded by.
CLEAR_S = 1e-6


# What follows in pairs is a loop as machine code likes it, and the call of numpy that stands for it.


def _up_to(values: Floats, keys: Floats) -> Ints:
    return values.searchsorted(keys, side="right")


@compiled("i8[::1](f8[::1], f8[::1])", plain=_up_to)
def up_to(values: Floats, keys: Floats) -> Ints:
    """Return how many of the values are at most each key; both are in order."""
    found, at = np.empty(len(keys), dtype=np.int64), 0
    for j in range(len(keys)):
        while at < len(values) and values[at] <= keys[j]:
            at += 1
        found[j] = at
    return found


def _below(values: Floats, keys: Floats) -> Ints:
    return values.searchsorted(keys)


@compiled("i8[::1](f8[::1], f8[::1])", plain=_below)
def below(values: Floats, keys: Floats) -> Ints:
    """Return how many of the values are less than each key; both are in order."""
    found, at = np.empty(len(keys), dtype=np.int64), 0
    for j in range(len(keys)):
        while at < len(values) and values[at] < keys[j]:
            at += 1
        found[j] = at
    return found


def _between(values: Floats, places: Ints, total: int) -> Floats:
    bounds = np.empty(len(places) + 2, dtype=np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = 0, places, total
    return values.repeat(bounds[1:] - bounds[:-1])


@compiled("f8[::1](f8[::1], i8[::1], i8)", plain=_between)
def between(values: Floats, places: Ints, total: int) -> Floats:
    """Return `total` entries: the first of `values` before places[0], the next before places[1], ..., the last."""
    found, start = np.empty(total), 0
    for j in range(len(places)):
        found[start : places[j]] = values[j]
        start = places[j]
    found[start:] = values[len(places)]
    return found


def _largest_yet(values: Floats) -> Floats:
    return np.maximum.accumulate(values)


@compiled("f8[::1](f8[::1])", plain=_largest_yet)
def largest_yet(values: Floats) -> Floats:
    """Return the largest of the first 1, 2, ... values."""
    found = values.copy()
    for j in range(1, len(found)):
        found[j] = max(found[j], found[j - 1])
    return found


@compiled("f8[::1](f8[::1], f8[::1], f8[::1])")
def finish(cumulative: Floats, ends_s: Floats, backlog_s: Floats) -> Floats:
    """`Walk.finish_s`."""
    # There are fewer steps than backlogs where time counts, so steps are looked up: how many each has done.
    values = np.empty(len(ends_s) + 1)
    values[:-1] = ends_s
    values[-1] = math.inf
    return between(values, up_to(backlog_s, cumulative + 1e-9), len(backlog_s))


@compiled("f8[::1](f8[::1], f8[::1], f8[::1])")
def done_by(cumulative: Floats, ends_s: Floats, times_s: Floats) -> Floats:
    """`Walk.done_by_s`."""
    values = np.empty(len(cumulative) + 1)
    values[0] = -math.inf
    values[1:] = cumulative
    return between(values, below(times_s, ends_s), len(times_s))


@compiled("Tuple((f8, b1, b1))(f8[::1], f8[::1], f8[::1], i8, f8[::1], f8)")
def glance(
    cumulative: Floats, ends_s: Floats, backlog_s: Floats, at: int, dues_s: Floats, start_s: float
) -> tuple[float, bool, bool]:
    """`Walk.glance`."""
    done = up_to(backlog_s, cumulative + 1e-9)
    # Of those who are due before a step is over, each must be done a step earlier.
    needed = below(dues_s, ends_s + (start_s + CLEAR_S))
    needed[np.searchsorted(needed, at, side="right") :] += 1  # in the backlog the candidate stands among them
    place = np.searchsorted(done, at, side="right")
    end_s = ends_s[place] if place < len(done) else math.inf
    if needed[0]:
        return end_s, at == 0, False
    # Who is needed and not done stands at place `done` of that step; all before the first such are in time.
    missing = np.flatnonzero(done[:-1] < needed[1:])
    in_time = done[missing[0] if len(missing) else -1]
    return end_s, in_time >= at, in_time == len(backlog_s)


@compiled("f8[::1](f8, f8, f8[::1], f8[::1])")
def work(a: float, x: float, remaining: Floats, context: Floats) -> Floats:
    """`CostCoefficients.work_s` of each request."""
    return remaining * (a + x * (context + 0.5 * remaining))


@compiled("Tuple((f8[::1], f8[::1]))(f8[::1], i8, f8)")
def cumulate(works_s: Floats, at: int, own_s: float) -> tuple[Floats, Floats]:
    """Return the cumulative work, and the same with `own_s` more at place `at`."""
    ahead = np.cumsum(works_s)
    with_it = np.empty(len(ahead) + 1)
    with_it[:at] = ahead[:at]
    with_it[at] = (ahead[at - 1] if at else 0.0) + own_s
    with_it[at + 1 :] = ahead[at:] + own_s
    return ahead, with_it


@compiled("f8[::1](i8[::1], i8)")
def decode_counts(left: Ints, steps: int) -> Floats:
    """Return how many of the decodes with `left` tokens to come may still run in step 1, 2, ..., `steps`."""
    # A decode with m tokens left runs in steps 1..m.
    ended = np.cumsum(np.bincount(np.minimum(np.maximum(left, 0), steps), None, steps + 1)[:steps])
    return len(left) - ended.astype(np.float64)


@compiled("f8[::1](i8, f8, f8, f8, f8, f8[::1], f8, f8)")
def lengths(
    steps: int,
    pace_s: float,
    blocking_s: float,
    slack_s: float,
    floor_s: float,
    base_s: Floats,
    until_s: float,
    factor: float,
) -> Floats:
    """Return the length L_j of each of `steps` steps.

    Args:
        steps: how many, at least 1.
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
        alone = math.ceil(min(until_s / max(blocking_s - base_s[0], 1e-9), float(steps)))
        out[:alone] = blocking_s
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
        if length < floor_s:
            length = base_s[j]  # decode-only: the streams gain slack
        else:
            done += length - base_s[j]
        out[j] = length
        slack_s += pace_s - length / factor
    return out


@compiled("Tuple((f8[::1], f8[::1]))(f8, f8, f8, f8, f8, f8, f8, f8[::1], f8[::1])")
def capacity(
    base_s: float,
    b: float,
    chunk_s: float,
    pace_s: float,
    blocking_s: float,
    slack_s: float,
    factor: float,
    decodes: Floats,
    backlog_s: Floats,
) -> tuple[Floats, Floats]:
    """`capacity` of core/walk.py: (cumulative, ends_s). `base_s`: g + k K*; `chunk_s`: work of the smallest chunk."""
    load = b * decodes
    until_s = factor * backlog_s[0] if len(backlog_s) else math.inf
    floor_s = factor * (base_s + load[0] + chunk_s)
    each = lengths(len(decodes), pace_s, blocking_s, slack_s, floor_s, factor * (base_s + load), until_s, factor)
    # Pass 1: capacity if no pending prefill ever joined the decodes: their earliest completion.
    free = each / factor - base_s - load
    first = np.cumsum(np.maximum(free, 0.0))
    # Done within step j, a decode from step j + 1 on: at index j, those done in steps 1..j.
    free[1:] -= b * up_to(backlog_s, first[:-1] + 1e-9).astype(np.float64)
    cumulative: Floats = np.cumsum(np.maximum(free, 0.0))
    return cumulative, np.cumsum(each)


@compiled("Tuple((f8[::1], f8[::1]))(f8, f8, f8, f8, f8, f8[:, ::1], f8[::1], f8[::1])")
def guaranteed(
    length_s: float,
    factor: float,
    base_s: float,
    b: float,
    step_s: float,
    lines: Floats,
    decodes: Floats,
    backlog_s: Floats,
) -> tuple[Floats, Floats]:
    """`guaranteed` of core/walk.py: (cumulative, ends_s). `base_s`: g + k K*; `lines`: (slope, burst) a row."""
    slots = np.arange(1, len(decodes) + 1).astype(np.float64)
    joined = below(backlog_s, slots * (length_s / factor)).astype(np.float64)
    done: Floats = np.maximum(np.cumsum(length_s / factor - base_s - b * (decodes + joined)), 0.0)
    envelope_s = length_s * slots
    ends_s: Floats = envelope_s.copy()
    for line in lines:
        ends_s = np.minimum(ends_s, line[0] * envelope_s + line[1])
    return largest_yet(done), ends_s + step_s


@compiled("Tuple((i8, i8))(f8[::1], f8[::1], b1[::1], f8)")
def short_steps(ahead_s: Floats, in_time_s: Floats, promised: Flags, fixed_s: float) -> tuple[int, int]:
    """Return how many promises ahead may be in a step that ends early: at once, and when each such costs `fixed_s`.

    Args:
        ahead_s: cumulative work of those ahead.
        in_time_s: work that full steps have done by the deadline of each.
        promised: to whom something is promised.
        fixed_s: work that a step less leaves undone. The second number is -1 when it does not settle.
    """
    short = promised & (ahead_s > in_time_s)
    first = count = int(np.count_nonzero(short))
    # Most often no other becomes short when each is counted with all of them.
    if not count or np.count_nonzero(promised & (ahead_s + fixed_s * count > in_time_s)) == count:
        return first, count
    for _ in range(3):
        short = promised & (ahead_s + fixed_s * np.cumsum(short) > in_time_s)
        before, count = count, int(np.count_nonzero(short))
        if count == before:
            return first, count
    return first, -1


@compiled("i8(f8[::1], f8[::1], b1[::1])")
def last_late(finish_s: Floats, dues_s: Floats, promised: Flags) -> int:
    """Return how many there are up to the last promised one that is done after it is due; 0 when there is none."""
    late = np.flatnonzero(promised & (finish_s > dues_s))
    return int(late[-1]) + 1 if len(late) else 0


@compiled("i8(f8[::1], f8[::1], i8)")
def first_in_time(finish_s: Floats, dues_s: Floats, behind: int) -> int:
    """Return the first place from `behind` on that is done before the next of `dues_s`; its length when none is."""
    found = np.flatnonzero(finish_s[behind:-1] <= dues_s[behind:])
    return behind + int(found[0]) if len(found) else len(dues_s)


@compiled("f8(f8[::1], f8[::1])")
def longest(remaining: Floats, computed: Floats) -> float:
    """Return the most tokens of a prompt, 0 when there is none."""
    return float(np.max(remaining + computed)) if len(remaining) else 0.0
