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
    Walk,
    capacity,
    decode_counts,
    guaranteed,
    worst_slot,
)


class Load(NamedTuple):
    """What steps count with: everything accepted that may run before the last promise is kept, and the candidate."""

    pace_s: float  # the tightest of all
    served: int  # n*
    reserved_tokens: int  # K*
    factor: float  # envelope / mean, f


class Queue(NamedTuple):
    """The accepted prefills in deadline order, and where the candidate goes."""

    dues: Floats  # of what is accepted, absolute times
    promised: NDArray[np.bool_]
    at: int  # how many of them go before the candidate
    left: Ints  # output tokens to come of each decode
    remaining: Floats  # prompt tokens of what is accepted
    computed: Floats


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
    step = min(load.pace_s, view.blocking_s)
    walk = capacity(
        view.cost.mean,
        pace_s=load.pace_s,
        blocking_s=view.blocking_s,
        slack_s=view.slack_s,
        factor=load.factor,
        min_chunk=min_chunk,
        decodes=decode_counts(queue.left, _steps(horizon_s * load.factor, step)),
        reserved_tokens=load.reserved_tokens,
        backlog=backlog,
    )
    return walk.finish_s(backlog[queue.at :])


class Worst:
    """Finishing times for every course under the envelope: those of the walk `guaranteed`, or of the closed form.

    Args:
        view: the moment.
        request: the candidate.
        load: what steps count with.
        queue: what is accepted.
        min_chunk: prompt tokens that every step must still be able to carry.
        closed: one constant capacity instead of the walk.
    """

    def __init__(
        self,
        view: EngineView,
        request: RequestState,
        load: Load,
        queue: Queue,
        *,
        min_chunk: int,
        closed: bool,
    ) -> None:
        self.view = view
        self.start_s = view.now_s + view.residual_s
        self.due_s = request.due_s - self.start_s  # the candidate's, as all times here from the start of the next step
        self.load = load
        self.queue = queue
        self.closed = closed
        longest = max(request.prompt_tokens, float((queue.remaining + queue.computed).max(initial=0.0)))
        self.waste_s = view.cost.mean.work_s(min_chunk, longest)
        self._decodes: Floats = np.empty(0)

    def finish_s(self, backlog: Floats) -> Floats:
        """Return the time from the start of the next step until each entry of `backlog[queue.at:]` is done.

        Its own pace does not bind the steps before a request's first token, so the candidate is timed without it. Any
        slot that is no longer than the shortest step gives a bound: short ones suit near deadlines, where the step that
        a bound has to spare counts most. When something is over a step and a half late, or late in short slots too,
        times are only about right.
        """
        view, queue, at, due = self.view, self.queue, self.queue.at, self.due_s
        others = view.ledger.pace_s if at or view.decodes else math.inf
        own = min(others, view.blocking_s)
        step = min(self.load.pace_s, view.blocking_s)
        hopeless = 1.5 * max(own, step)  # shorter slots gain less than that

        # When the candidate is hopelessly late in the first slots that are tried, nothing else is looked at.
        finish = self._timed(step, own, backlog, give_up_s=due + hopeless if own <= step else math.inf)
        late, latest, due_s = float(finish[0]) - due, 0, due
        if late <= hopeless and at < len(queue.dues):
            overdue = np.where(queue.promised[at:], finish[1:] - (queue.dues[at:] - self.start_s), -math.inf)
            place = int(overdue.argmax())
            if overdue[place] > late:
                late, latest, due_s = float(overdue[place]), place + 1, float(queue.dues[at + place]) - self.start_s
        if not 0 < late <= hopeless:
            return finish
        # Half as long slots are of use only when what is latest in long ones is in time in them.
        halves = (step / 2, own / 2) if own > step and not latest else (step / 2,)
        if not any(self._in_time(each, float(backlog[at + latest]), due_s, backlog) for each in halves):
            return finish
        return np.minimum(finish, self._timed(step / 2, own / 2, backlog, beyond=False))

    def _timed(
        self, step_s: float, own_s: float, backlog: Floats, *, give_up_s: float = math.inf, beyond: bool = True
    ) -> Floats:
        """`_after_short_steps`, and where that is sooner the candidate with steps of `own_s`, which bind it alone."""
        finish = self._after_short_steps(step_s, backlog, give_up_s=give_up_s, beyond=beyond)
        if own_s > step_s:
            finish[0] = min(finish[0], self._after_short_steps(own_s, backlog[: self.queue.at + 1], beyond=beyond)[0])
        return finish

    def _in_time(self, step_s: float, work_s: float, due_s: float, backlog: Floats) -> bool:
        """Whether full steps of at least `step_s` have done so much of the backlog in time, if none is short."""
        done = self._walk(step_s, backlog, until_s=due_s, beyond=False).done_by_s(np.array([due_s]))
        return float(done[0]) >= work_s - 1e-9

    def _after_short_steps(
        self, step_s: float, backlog: Floats, *, give_up_s: float = math.inf, beyond: bool = True
    ) -> Floats:
        """Return finishing times with a step's fixed part more for each promise ahead whose last step may be short.

        A step that completes a first token ends by its deadline. Promises made at other paces may leave it less than
        a full step.

        Args:
            step_s: least length of a full step.
            backlog: cumulative work, the candidate's at `queue.at`.
            give_up_s: a candidate that is not done by then even so is told about: a step for each short one.
            beyond: whether it matters when things are done that are not done in time.
        """
        queue, at, load = self.queue, self.queue.at, self.load
        last_s = max(self.due_s, float(queue.dues[-1]) - self.start_s if len(backlog) > at + 1 else -math.inf)
        fixed = self.view.cost.mean.seconds(0, load.served, load.reserved_tokens, 0)
        # Decodes join as if no step were short: that is no later than they can.
        walk = self._walk(step_s, backlog, until_s=last_s, more_s=fixed * at, beyond=beyond)
        ahead, promised = backlog[:at], queue.promised[:at]
        in_time = walk.done_by_s(queue.dues[:at] - self.start_s) + 1e-9
        short = promised & (ahead > in_time)
        count = np.count_nonzero(short)
        if not count:
            return walk.finish_s(backlog[at:])
        if give_up_s < math.inf:
            finish = walk.finish_s(backlog[at:])
            if finish[0] > give_up_s:
                return finish + step_s * count
        for _ in range(3):
            extra = fixed * short.cumsum()
            short = promised & (ahead + extra > in_time)
            before, count = count, np.count_nonzero(short)
            if count == before:
                return walk.finish_s(backlog[at:] + fixed * count)
        return np.full(len(backlog) - at, math.inf)

    def at_once(self, step_s: float, backlog: Floats) -> Floats:
        """Return when each entry of `backlog` is done, with full steps of at least `step_s`."""
        return self._walk(step_s, backlog).finish_s(backlog)

    def _walk(
        self, step_s: float, backlog: Floats, *, until_s: float = 0.0, more_s: float = 0.0, beyond: bool = True
    ) -> Walk | Slot:
        """Return what full steps of at least `step_s` carry.

        It looks until the backlog is done, and until `more_s` more work is done or `until_s` is over; without `beyond`
        no further than `until_s`.
        """
        slot = self._slot(step_s)
        if self.closed or slot.uniform:
            return slot
        until = MAX_STEPS
        if slot.length_s > 0:
            until = int(min(MAX_STEPS, max(until_s - slot.step_s, 0.0) / slot.length_s + 1.0))
        total = float(backlog[-1])
        if beyond:
            slots = max(self._slots(slot, total), min(until, self._slots(slot, total + more_s)))
        else:
            slots = min(until, self._slots(slot, total + more_s))
        return guaranteed(
            self.view.cost.mean,
            slot,
            factor=self.load.factor,
            decodes=self._decoding(slots),
            reserved_tokens=self.load.reserved_tokens,
            backlog=backlog,
        )

    def _slot(self, step_s: float) -> Slot:
        load = self.load
        return worst_slot(
            self.view.cost.mean,
            step_s=step_s,
            factor=load.factor,
            served=load.served,
            reserved_tokens=load.reserved_tokens,
            waste_s=self.waste_s,
            step_tokens=self.view.max_step_tokens - load.served,
        )

    @staticmethod
    def _slots(slot: Slot, work_s: float) -> int:
        """Slots after which all is done that is done at all: the walk is never later than the closed form."""
        if slot.room_s <= 0:
            return MAX_STEPS
        return math.ceil(min(MAX_STEPS - 1, work_s / slot.room_s)) + 1

    def _decoding(self, slots: int) -> Floats:
        if len(self._decodes) < slots:
            # For half as long slots as well.
            self._decodes = decode_counts(self.queue.left, min(MAX_STEPS, 2 * slots))
        return self._decodes[:slots]


def _steps(horizon_s: float, step_s: float) -> int:
    """Steps that a walk needs to look as far as the horizon."""
    return max(1, math.ceil(min(MAX_STEPS - 1, horizon_s / step_s)) + 1) if step_s > 0 else 1
