"""When what is queued is done: the finishing times that admission test `response_time` promises by."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from headway.core import EngineView, RequestState
from headway.core.loops import Flags, Floats, Ints, decode_counts, longest, short_steps
from headway.core.walk import MAX_STEPS, Slot, Walk, capacity, guaranteed, worst_slot


class Load(NamedTuple):
    """What steps count with: everything accepted that may run before the last promise is kept, and the candidate."""

    pace_s: float  # the tightest of all
    served: int  # n*
    reserved_tokens: int  # K*
    factor: float  # envelope / mean, f
    lines: tuple[tuple[float, float], ...] = ()  # envelopes of steps in a row (`Slot.lines`)


class Queue(NamedTuple):
    """The accepted prefills in deadline order, and where the candidate goes."""

    dues: Floats  # of what is accepted, absolute times
    promised: Flags
    at: int  # how many of them go before the candidate
    left: Ints  # output tokens to come of each decode
    remaining: Floats  # prompt tokens of what is accepted
    computed: Floats


class Expected:
    """The expected course: the walk `capacity`.

    Args:
        view: the moment.
        load: what steps count with.
        queue: what is accepted.
        backlog: cumulative work, seconds; the candidate's at `queue.at`, or, to see how it is without, nobody's.
        horizon_s: what is not done until then may count as never (inf).
        min_chunk: prompt tokens below which a step carries no prefill.
    """

    def __init__(
        self, view: EngineView, load: Load, queue: Queue, backlog: Floats, *, horizon_s: float, min_chunk: int
    ) -> None:
        self.start_s = view.now_s + view.residual_s
        self.queue = queue
        self.behind = backlog[queue.at :]
        self.walk = capacity(
            view.cost.mean,
            pace_s=load.pace_s,
            blocking_s=view.blocking_s,
            slack_s=view.slack_s,
            factor=load.factor,
            min_chunk=min_chunk,
            decodes=decode_counts(queue.left, _steps(horizon_s * load.factor, min(load.pace_s, view.blocking_s))),
            reserved_tokens=load.reserved_tokens,
            backlog=backlog,
        )

    def kept_s(self) -> float | None:
        """Return when the candidate is done, if by then and later all behind it are in time for certain; else None."""
        queue = self.queue
        seen = self.walk.glance(self.behind, 0, queue.dues[queue.at :], self.start_s)
        return seen.end_s if seen.all else None

    def finish_s(self) -> Floats:
        """Return the time from the start of the next step until each of the candidate and those behind it is done."""
        return self.walk.finish_s(self.behind)


class Worst:
    """Every course under the envelopes: the walk `guaranteed`, or the closed form.

    Args:
        view: the moment.
        request: the candidate.
        load: what steps count with.
        queue: what is accepted.
        backlog: cumulative work, seconds, the candidate's at `queue.at`.
        min_chunk: prompt tokens that every step must still be able to carry.
        closed: one constant capacity instead of the walk.
    """

    def __init__(
        self,
        view: EngineView,
        request: RequestState,
        load: Load,
        queue: Queue,
        backlog: Floats,
        *,
        min_chunk: int,
        closed: bool,
    ) -> None:
        self.view = view
        self.backlog = backlog
        self.start_s = view.now_s + view.residual_s
        self.due_s = request.due_s - self.start_s  # the candidate's, as all times here from the start of the next step
        self.load = load
        self.queue = queue
        self.closed = closed
        most = max(request.prompt_tokens, longest(queue.remaining, queue.computed))
        self.waste_s = view.cost.mean.work_s(min_chunk, most)
        self.fixed_s = view.cost.mean.seconds(0, load.served, load.reserved_tokens, 0)  # of any step
        self._decodes: Floats = np.empty(0)
        #: Least time that a step has: that of the tightest pace, and of the tightest but for the candidate's.
        self._step_s = min(load.pace_s, view.blocking_s)
        self._own_s = min(view.ledger.pace_s if queue.at or view.decodes else math.inf, view.blocking_s)
        self._walks = self._both(self._step_s, self._own_s)
        first = self._walks[0]
        self._seen = first.glance(backlog, queue.at, queue.dues, self.start_s) if isinstance(first, Walk) else None

    def kept_s(self) -> float | None:
        """Return when the candidate is done, if it and all others are in time for certain; None: see `finish_s`."""
        seen = self._seen
        if seen is None or not seen.all or seen.end_s > self.due_s or self._own_s > self._step_s:
            return None
        return seen.end_s

    def finish_s(self) -> Floats:
        """Return the time from the start of the next step until each of the candidate and those behind it is done.

        Its own pace does not bind the steps before a request's first token, so the candidate is timed without it. Any
        slot that is no longer than the shortest step gives a bound: short ones suit near deadlines, where the step that
        a bound has to spare counts most. When something is over a step and a half late, or late in short slots too,
        times are only about right.
        """
        queue, at, due, backlog, walks = self.queue, self.queue.at, self.due_s, self.backlog, self._walks
        own, step = self._own_s, self._step_s
        hopeless = 1.5 * max(own, step)  # shorter slots gain less than that

        # When the candidate is hopelessly late in the first slots that are tried, nothing else is looked at.
        finish = self._timed(walks, step, give_up_s=due + hopeless if own <= step else math.inf)
        # Half as long slots end half a step sooner and pay the fixed part of a step twice as often: for near deadlines.
        fixed_s = self.load.factor * (self.view.cost.mean.g + self.view.cost.mean.k * self.load.reserved_tokens)
        if due * fixed_s > hopeless * step:
            return finish  # and all others are due later
        late, latest, due_s = float(finish[0]) - due, 0, due
        if late <= hopeless and at < len(queue.dues):
            overdue = np.where(queue.promised[at:], finish[1:] - (queue.dues[at:] - self.start_s), -math.inf)
            place = int(overdue.argmax())
            if overdue[place] > late:
                late, latest, due_s = float(overdue[place]), place + 1, float(queue.dues[at + place]) - self.start_s
        if not 0 < late <= hopeless or due_s * fixed_s > hopeless * step:
            return finish
        # They are of use only when what is latest in long ones is in time in them, were no step short.
        work_s = float(backlog[at + latest]) - 1e-9
        halves = self._both(step / 2, own / 2, beyond=False)
        if all(walk.done_s(due_s) < work_s for walk in (halves[:1] if latest else halves)):
            return finish
        sooner = self._timed(halves, step / 2)
        # Who is in time in short slots alone may end a step early, and so shorten it for those behind.
        dues = np.concatenate(((due,), queue.dues[at:] - self.start_s))
        promised = np.concatenate(((True,), queue.promised[at:]))
        early = 0
        for _ in range(3):
            in_need = promised & (finish > dues)
            count = np.count_nonzero(in_need)
            if (sooner > dues)[in_need].any():
                return finish
            if count == early:
                return np.minimum(finish, sooner)
            early = int(count)
            finish = self._timed(walks, step, early=early)
        return finish

    def _both(self, step_s: float, own_s: float, *, beyond: bool = True) -> list[Walk | Slot]:
        """Return what full steps of at least `step_s` carry and, where they are longer, those that bind the candidate.

        Without `beyond` it does not matter when things are done that are not done in time.
        """
        walks = [self._walk(step_s, self.backlog, beyond=beyond)]
        if own_s > step_s:
            walks.append(self._walk(own_s, self.backlog[: self.queue.at + 1], beyond=beyond))
        return walks

    def _timed(
        self,
        walks: list[Walk | Slot],
        step_s: float,
        *,
        give_up_s: float = math.inf,
        early: int = 0,
    ) -> Floats:
        """`_after_short_steps` of the first walk, and where that is sooner the candidate in the second one."""
        finish = self._after_short_steps(walks[0], step_s, self.backlog, give_up_s=give_up_s, early=early)
        for own in walks[1:]:
            finish[0] = min(finish[0], self._after_short_steps(own, step_s, self.backlog[: self.queue.at + 1])[0])
        return finish

    def _after_short_steps(
        self,
        walk: Walk | Slot,
        step_s: float,
        backlog: Floats,
        *,
        give_up_s: float = math.inf,
        early: int = 0,
    ) -> Floats:
        """Return finishing times with a step's fixed part more for each promise ahead whose last step may be short.

        A step that completes a first token ends by its deadline. Promises made at other paces may leave it less than
        a full step.

        Args:
            walk: what full steps carry. Decodes join as if no step were short: that is no later than they can.
            step_s: least length of a full step.
            backlog: cumulative work, the candidate's at `queue.at`.
            give_up_s: a candidate that is not done by then even so is told about: a step for each short one.
            early: how many more are short, of the candidate and those behind it.
        """
        queue, at = self.queue, self.queue.at
        if not early and self._seen is not None and self._seen.ahead and walk is self._walks[0]:
            return walk.finish_s(backlog[at:])  # none is short
        ahead, promised = backlog[:at], queue.promised[:at]
        in_time = walk.done_by_s(queue.dues[:at] - self.start_s) + 1e-9
        count, settled = short_steps(ahead, in_time, promised, self.fixed_s)
        if count and give_up_s < math.inf and walk.end_s(float(backlog[at])) > give_up_s:
            return walk.finish_s(backlog[at:]) + step_s * count
        if settled < 0:
            return np.full(len(backlog) - at, math.inf)
        return walk.finish_s(backlog[at:] + self.fixed_s * (settled + early))

    def _walk(self, step_s: float, backlog: Floats, *, beyond: bool = True) -> Walk | Slot:
        """Return what full steps of at least `step_s` carry, until the backlog is done.

        As short steps may be counted it looks further: until the last deadline is over, or their work is done too.
        Without `beyond` it looks no further than the last deadline.
        """
        slot = self._slot(step_s)
        if self.closed or slot.uniform:
            return slot
        at, dues, work_s = self.queue.at, self.queue.dues, float(backlog[-1])
        last_s = max(self.due_s, float(dues[-1]) - self.start_s) if len(backlog) > at + 1 else self.due_s
        slots = MAX_STEPS
        if slot.length_s > 0:
            slots = int(min(MAX_STEPS, max(slot.within_s(last_s - slot.step_s), 0.0) / slot.length_s + 1.0))
        slots = min(slots, self._slots(slot, work_s + self.fixed_s * at))
        if beyond:
            slots = max(slots, self._slots(slot, work_s))
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
            lines=load.lines,
        )

    @staticmethod
    def _slots(slot: Slot, work_s: float) -> int:
        """Slots after which all is done that is done at all: the walk is never later than the closed form."""
        if slot.room_s <= 0:
            return MAX_STEPS
        return math.ceil(min(MAX_STEPS - 1, work_s / slot.room_s)) + 1

    def _decoding(self, slots: int) -> Floats:
        if len(self._decodes) < slots:
            self._decodes = decode_counts(self.queue.left, slots)
        return self._decodes[:slots]


class Constant(Worst):
    """One constant capacity, that of the shortest step, which no first token ends early: the plain closed form."""

    def finish_s(self) -> Floats:
        """Return the time from the start of the next step until each of the candidate and those behind it is done."""
        return self._walks[0].finish_s(self.backlog[self.queue.at :])


#: Whether and when the candidate and those behind it are done.
Course = Expected | Worst


def _steps(horizon_s: float, step_s: float) -> int:
    """Steps that a walk needs to look as far as the horizon."""
    return max(1, math.ceil(min(MAX_STEPS - 1, horizon_s / step_s)) + 1) if step_s > 0 else 1
