"""When what is queued is done: the finishing times that admission test `response_time` promises by."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core import EngineView, RequestState
from headway.core.walk import (
    MAX_STEPS,
    Floats,
    Ints,
    Slot,
    capacity,
    closed_form,
    decode_counts,
    guaranteed,
    worst_slot,
)


class Load(NamedTuple):
    """What steps count with: everything accepted that may run before the last promise is kept, and the candidate."""

    pace_s: float  # the tightest of all
    served: int  # n*
    reserved_tokens: int  # K*


class Queue(NamedTuple):
    """The accepted prefills in deadline order, and where the candidate goes."""

    dues: Floats  # of what is accepted, absolute times
    promised: NDArray[np.bool_]
    at: int  # how many of them go before the candidate
    left: Ints  # output tokens to come of each decode
    longest: float  # tokens of the longest prompt, the candidate's included


def expected(
    view: EngineView, load: Load, queue: Queue, backlog: Floats, *, horizon_s: float, min_chunk: int
) -> Floats:
    """Return the time from the start of the next step until each entry of `backlog[queue.at:]` is done, as expected.

    Args:
        view: the moment.
        load: what steps count with.
        queue: what is accepted.
        backlog: cumulative work, seconds.
        horizon_s: what is not done until then may count as never (inf).
        min_chunk: prompt tokens below which a step carries no prefill.
    """
    factor = view.cost.factor
    step = min(load.pace_s, view.blocking_s)
    walk = capacity(
        view.cost.mean,
        pace_s=load.pace_s,
        blocking_s=view.blocking_s,
        slack_s=view.slack_s,
        factor=factor,
        min_chunk=min_chunk,
        decodes=decode_counts(queue.left, _steps(horizon_s * factor, step)),
        reserved_tokens=load.reserved_tokens,
        backlog=backlog,
    )
    return walk.finish_s(backlog[queue.at :])


class Worst:
    """Finishing times for every course under the envelope: those of the walk `guaranteed`, or of the closed form.

    Args:
        view: the moment.
        load: what steps count with.
        queue: what is accepted.
        factor: envelope / mean.
        min_chunk: prompt tokens that every step must still be able to carry.
        closed: one constant capacity instead of the walk.
    """

    def __init__(
        self, view: EngineView, load: Load, queue: Queue, *, factor: float, min_chunk: int, closed: bool
    ) -> None:
        self.view = view
        self.load = load
        self.queue = queue
        self.factor = factor
        self.closed = closed
        self.waste_s = view.cost.mean.work_s(min_chunk, queue.longest)
        self._decodes: Floats = np.empty(0)

    def finish_s(self, request: RequestState, backlog: Floats) -> Floats:
        """Return the time from the start of the next step until each entry of `backlog[queue.at:]` is done.

        Its own pace does not bind the steps before a request's first token, so the candidate is timed without it. Any
        slot that is no longer than the shortest step gives a bound: short ones suit near deadlines, where the step that
        a bound has to spare counts most. When the candidate is over a step and a half late, times are only about right.
        """
        view, queue, at = self.view, self.queue, self.queue.at
        spare = queue.dues - (view.now_s + view.residual_s)
        due = request.due_s - view.now_s - view.residual_s
        watched = np.flatnonzero(queue.promised[at:])
        others = view.ledger.pace_s if at or view.decodes else math.inf
        own = min(others, view.blocking_s)
        step = min(self.load.pace_s, view.blocking_s)
        hopeless = 1.5 * max(own, step)  # shorter slots gain less than that

        def late_s(found: Floats) -> tuple[float, int]:
            """How late the latest of the candidate and the promises behind it is, and which it is."""
            late, latest = float(found[0]) - due, 0
            if len(watched):
                overdue = found[1:][watched] - spare[at:][watched]
                if (most := float(overdue.max())) > late:
                    late, latest = most, int(watched[overdue.argmax()]) + 1
            return late, latest

        finish: Floats = np.full(len(backlog) - at, math.inf)
        latest = 0
        for share in (1.0, 0.5):
            steps = (share * step, share * own) if own > step and not latest else (share * step,)
            if share < 1:
                in_s = float(spare[at + latest - 1]) if latest else due
                if not any(self._may_be_done(each, float(backlog[at + latest]), in_s) for each in steps):
                    continue
            # When the candidate is hopelessly late in the first slots that are tried, nothing else is looked at.
            give_up_s = due + hopeless if share == 1 and own <= step else math.inf
            finish = np.minimum(finish, self._after_short_steps(share * step, backlog, spare, give_up_s))
            if own > step:
                finish[0] = min(finish[0], self._after_short_steps(share * own, backlog[: at + 1], spare)[0])
            late, latest = late_s(finish)
            if late <= 0 or late > hopeless:
                break
        return finish

    def _after_short_steps(self, step_s: float, backlog: Floats, spare: Floats, give_up_s: float = math.inf) -> Floats:
        """`at_once`, with a step's fixed part more for each promise ahead whose last step may have to be a short one.

        A step that completes a first token ends by its deadline. Promises made at other paces may leave it less than
        a full step. A candidate that is not done by `give_up_s` even without them is told about: a step for each.
        """
        queue, load, at = self.queue, self.load, self.queue.at
        promised = queue.promised[:at]
        finish = self.at_once(step_s, backlog)
        short = promised & (finish[:at] > spare[:at])
        if finish[at] > give_up_s:
            return np.asarray(finish[at:] + step_s * np.count_nonzero(short))
        if not short.any():
            return finish[at:]
        fixed = self.view.cost.mean.seconds(0, load.served, load.reserved_tokens, 0)
        for _ in range(3):
            extra = fixed * short.cumsum()
            shifted = backlog + extra[-1]
            shifted[:at] = backlog[:at] + extra
            finish = self.at_once(step_s, shifted)
            found = promised & (finish[:at] > spare[:at]) & ~short
            if not found.any():
                return finish[at:]
            short |= found
        return np.full(len(backlog) - at, math.inf)

    def _may_be_done(self, step_s: float, backlog_s: float, spare_s: float) -> bool:
        """Whether slots of this length can carry so much in time when no pending prefill ever decodes."""
        slot = self._slot(step_s)
        slots = int(min(MAX_STEPS, (spare_s - step_s) / slot.length_s + 1e-9)) if slot.length_s > 0 else 0
        if slots < 1:
            return False
        cost = self.view.cost.mean
        room = slot.length_s / self.factor - cost.g - cost.k * self.load.reserved_tokens
        done = room * np.arange(1, slots + 1) - cost.b * self._decoding(slots).cumsum()
        return bool(done.max() >= backlog_s - 1e-9)

    def at_once(self, step_s: float, backlog: Floats) -> Floats:
        """Return when each entry of `backlog` is done, with full steps of at least `step_s`."""
        slot = self._slot(step_s)
        if self.closed or slot.uniform:
            return closed_form(slot, backlog)
        walk = guaranteed(
            self.view.cost.mean,
            slot,
            factor=self.factor,
            decodes=self._decoding(self._slots(slot, float(backlog[-1]))),
            reserved_tokens=self.load.reserved_tokens,
            backlog=backlog,
        )
        return walk.finish_s(backlog)

    def _slot(self, step_s: float) -> Slot:
        load = self.load
        return worst_slot(
            self.view.cost.mean,
            step_s=step_s,
            factor=self.factor,
            served=load.served,
            reserved_tokens=load.reserved_tokens,
            waste_s=self.waste_s,
            step_tokens=self.view.max_step_tokens - load.served,
        )

    @staticmethod
    def _slots(slot: Slot, backlog_s: float) -> int:
        """Slots after which all is done that is done at all: the walk is never later than the closed form."""
        if slot.room_s <= 0:
            return MAX_STEPS
        return math.ceil(min(MAX_STEPS - 1, backlog_s / slot.room_s)) + 1

    def _decoding(self, slots: int) -> Floats:
        if len(self._decodes) < slots:
            self._decodes = decode_counts(self.queue.left, slots)
        return self._decodes[:slots]


def _steps(horizon_s: float, step_s: float) -> int:
    """Steps that a walk needs to look as far as the horizon."""
    return max(1, math.ceil(min(MAX_STEPS - 1, horizon_s / step_s)) + 1) if step_s > 0 else 1
