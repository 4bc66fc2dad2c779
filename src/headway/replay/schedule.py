"""When each request is due: on the trace's clock (open loop), or after its session's previous turn (closed loop).

No clock in here: times are seconds from the start of the run and come in as arguments.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

import polars as pl


class Schedule:
    """The requests not yet due, earliest first, ties by position in the trace.

    Open loop: every request is due at its `arrival_s`, whatever became of the others.
    Closed loop: later turns of a session are due `think_s` after the end of the previous turn; a turn
    without `think_s` is due at its `arrival_s` or at the end of the previous turn, whichever is later. A turn that
    was refused or failed ends when the client learns of it, and the session goes on.
    """

    def __init__(self, frame: pl.DataFrame, *, closed_loop: bool = False) -> None:
        self._arrivals: list[float] = frame["arrival_s"].to_list()
        self._next_turn: dict[int, int] = {}
        self._think: list[float | None] = frame["think_s"].to_list() if closed_loop else []
        later: set[int] = set()
        if closed_loop:
            sessions: dict[str, list[tuple[int, int]]] = defaultdict(list)
            turns = frame["turn"].to_list()
            for i, session in enumerate(frame["session_id"].to_list()):
                if session is not None:
                    sessions[session].append((turns[i] if turns[i] is not None else i, i))
            for members in sessions.values():
                order = [i for _, i in sorted(members)]
                self._next_turn |= dict(itertools.pairwise(order))
                later.update(order[1:])
        self._heap = [(at, i) for i, at in enumerate(self._arrivals) if i not in later]
        heapq.heapify(self._heap)
        self.waiting_turns = len(later)  # turns whose previous one has not ended

    @property
    def next_due(self) -> float | None:
        """When the earliest request is due; None when none has a due time yet."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> tuple[float, int] | None:
        """Return (due, position) of the earliest request that is due at `now`, or None."""
        if self._heap and self._heap[0][0] <= now:
            return heapq.heappop(self._heap)
        return None

    def ended(self, index: int, now: float) -> bool:
        """Note that a request ended at `now`; return whether another one became due at some time by that."""
        turn = self._next_turn.pop(index, None)
        if turn is None:
            return False
        think = self._think[turn]
        due = max(now, self._arrivals[turn]) if think is None else now + think
        heapq.heappush(self._heap, (due, turn))
        self.waiting_turns -= 1
        return True
