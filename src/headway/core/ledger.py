"""The one place where the state of requests changes.

An engine (real, simulated or fake) tells the ledger what happened; policies and admission tests read it:

    arrive -> UNDECIDED --accept--> WAITING --schedule--> PREFILL --token--> DECODE --finish--> gone
                  |                    ^                                        |
                  +--finish (refused)  +----------------- preempt <-------------+

`pending` (accepted prefills, started or not) is kept in deadline order, ties by sequence number.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from headway.core.request import Phase, RequestState


class Ledger:
    """State of every request of one engine.

    Attributes:
        requests: every live request by id.
        undecided: requests without a verdict, in order of arrival.
        pending: accepted requests whose prompt is not computed yet, by (due_s, seq).
        decoding: requests that produce tokens, by id.
        context_tokens: K, the context tokens that a step with all decodes reads.
        reserved_tokens: sum of prompt + max output over everything accepted.
        paces: decode pace (seconds a token) -> accepted requests that have it.
        prefilling: how many of `pending` have been started and hold a slot of the engine.
        completing: those of `pending` whose last chunk is in flight (asynchronous scheduling), by id: they decode in
            the next step.
        loose: those of `decoding` without a pace: nobody is promised their tokens, so they may skip steps.
        loose_tokens: the part of `reserved_tokens` that belongs to requests without a pace.
        hoped: those of `pending` that hold nothing yet but count on hits in the prefix cache, by id.
    """

    __slots__ = (
        "_columns",
        "_context",
        "_dues",
        "_keys",
        "_left",
        "_next_dues",
        "_promised",
        "_remaining",
        "completing",
        "context_tokens",
        "decoding",
        "hoped",
        "loose",
        "loose_tokens",
        "paces",
        "pending",
        "prefilling",
        "requests",
        "reserved_tokens",
        "undecided",
    )

    def __init__(self) -> None:
        self.requests: dict[str, RequestState] = {}
        self.undecided: dict[str, RequestState] = {}
        self.pending: list[RequestState] = []
        self.decoding: dict[str, RequestState] = {}
        self.context_tokens = 0
        self.reserved_tokens = 0
        self.paces: dict[float, int] = {}
        self.prefilling = 0
        self.completing: dict[str, RequestState] = {}
        self.loose: dict[str, RequestState] = {}
        self.loose_tokens = 0
        self.hoped: dict[str, RequestState] = {}
        # Columns beside `pending`, so that admission can work on arrays without touching 1,000 objects.
        self._keys: list[tuple[float, int]] = []
        self._dues = array("d")
        self._remaining = array("d")
        self._context = array("d")
        self._promised = array("b")
        # Columns beside `decoding`, in no order: a decode that ends gives its place to the last one.
        self._columns: list[RequestState] = []
        self._next_dues = array("d")
        self._left = array("q")

    # What happened

    def arrive(self, request: RequestState) -> None:
        """A request came in and has no verdict yet.

        Raises:
            ValueError: its id is already known.
        """
        if request.id in self.requests:
            raise ValueError(f"request {request.id} arrived twice")
        self.requests[request.id] = request
        self.undecided[request.id] = request

    def accept(self, request: RequestState, bound_s: float | None) -> None:
        """The request is served; with a bound its first token is promised for then.

        Without one it goes behind every promise that is pending: nobody counted on its work.
        """
        del self.undecided[request.id]
        request.promised = bound_s is not None
        request.bound_s = bound_s
        request.phase = Phase.WAITING
        if not request.promised:
            self._give_way(request)
        self.reserved_tokens += request.reserved_tokens
        pace = request.slo.pace_s
        self.paces[pace] = self.paces.get(pace, 0) + 1
        if math.isinf(pace):
            self.loose_tokens += request.reserved_tokens
        self._insert(request)

    def retract(self, request: RequestState) -> None:
        """An accepted request that was not started has no verdict again (its group could not be accepted whole)."""
        self.finish(request.id)
        request.phase = Phase.UNDECIDED
        request.promised = False
        request.bound_s = None
        self.arrive(request)

    def schedule(self, request_id: str, tokens: int) -> None:
        """A step that computes `tokens` more prompt tokens of a pending request was issued."""
        request = self.requests[request_id]
        at = self._index(request)
        self._start(request)
        request.computed_tokens = min(request.target_tokens, request.computed_tokens + tokens)
        self._computed(request, at)

    def set_computed(self, request_id: str, computed_tokens: int, *, started: bool = False) -> None:
        """The engine knows better how many prompt tokens are computed (prefix-cache hit, failed load).

        `started`: a step that works on it was issued, as after `schedule`.
        """
        request = self.requests[request_id]
        at = self._index(request)
        if started:
            self._start(request)
        request.computed_tokens = min(computed_tokens, request.target_tokens)
        self._computed(request, at)

    def token(self, request_id: str, now_s: float, count: int = 1) -> None:
        """`count` output tokens of the request came out of the step that ended at `now_s`."""
        request = self.requests[request_id]
        if request.phase is Phase.WAITING and request.preemptions:
            # Preempted while this output was in flight (asynchronous scheduling): it is the client's, but its KV is
            # lost, so it must be computed again with the prompt.
            request.target_tokens += count
            self._computed(request, self._index(request))
        elif request.phase is not Phase.DECODE:
            self._remove(request)
            request.phase = Phase.DECODE
            request.computed_tokens = request.target_tokens
            self.decoding[request_id] = request
            request.column = len(self._columns)
            self._columns.append(request)
            self._next_dues.append(math.inf)
            self._left.append(0)
            self.context_tokens += request.target_tokens
            if math.isinf(request.slo.pace_s):
                self.loose[request_id] = request
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        request.output_tokens += count
        # Virtual deadlines (docs/design.md, section 4), anchored at the real first token because that is where
        # the measured TPOT starts.
        slo = request.slo
        due = math.inf
        if slo.tpot_s is not None:
            due = request.first_token_s + request.output_tokens * slo.tpot_s
        if slo.tbt_s is not None:
            due = min(due, now_s + slo.tbt_s)
        request.next_due_s = due
        if request.phase is Phase.DECODE:
            self.context_tokens += count
            at = request.column
            self._next_dues[at] = due
            self._left[at] = request.max_output_tokens - request.output_tokens

    def preempt(self, request_id: str) -> None:
        """The request lost its KV and must be computed again: its prompt and what it had produced."""
        request = self.requests[request_id]
        if request.phase is Phase.DECODE:
            self._leave_decoding(request)
            if math.isfinite(request.next_due_s):  # without a pace its old deadline stands, so that it cannot starve
                request.due_s = request.next_due_s
        else:
            self._remove(request)
        if not request.promised:
            self._give_way(request)
        request.preemptions += 1
        request.phase = Phase.WAITING
        request.computed_tokens = 0
        request.target_tokens = request.prompt_tokens + request.output_tokens
        self._insert(request)

    def postpone(self, request: RequestState, due_s: float) -> None:
        """A pending request gets another deadline for its first token, because the one that it had is lost."""
        started = request.phase is Phase.PREFILL
        self._remove(request)
        request.due_s = due_s
        self._insert(request)
        self.prefilling += started

    def finish(self, request_id: str) -> RequestState:
        """The request ended, was refused, or was aborted by its client."""
        request = self.requests.pop(request_id)
        if request.phase is Phase.UNDECIDED:
            del self.undecided[request_id]
            return request
        self.reserved_tokens -= request.reserved_tokens
        pace = request.slo.pace_s
        self.paces[pace] -= 1
        if not self.paces[pace]:
            del self.paces[pace]
        if math.isinf(pace):
            self.loose_tokens -= request.reserved_tokens
        if request.phase is Phase.DECODE:
            self._leave_decoding(request)
        else:
            self._remove(request)
        return request

    # What can be asked

    def columns(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Return due_s, remaining tokens, computed tokens and promised of `pending`, copies in its order."""
        return (
            np.array(self._dues),
            np.array(self._remaining),
            np.array(self._context),
            np.array(self._promised, dtype=np.int8).view(np.bool_),
        )

    def outputs_left(self) -> NDArray[np.int64]:
        """Return how many tokens each request that decodes in the next step may still produce, in no order.

        Shape: `decoding` and `completing`. Less than 0 beyond a declared output.
        """
        left = np.array(self._left, dtype=np.int64)
        if not self.completing:
            return left
        joining = [r.max_output_tokens - r.output_tokens for r in self.completing.values()]
        return np.concatenate((left, np.array(joining, dtype=np.int64)))

    @property
    def next_due_s(self) -> float:
        """Earliest deadline of the next token of a decode; inf when nothing decodes."""
        # A vector of its own: the buffer of an array that is exported cannot grow.
        return float(np.array(self._next_dues).min(initial=math.inf))

    def place(self, request: RequestState) -> int:
        """Return how many of `pending` come before a request that is not among them."""
        return bisect.bisect_right(self._keys, (request.due_s, request.seq))

    def idle_behind(self, at: int) -> tuple[int, int]:
        """Return how many of `pending` from place `at` on nothing is promised, nor to any behind, and not started.

        The second number is what they reserve, tokens. Nobody with a promise waits for them.
        """
        count = tokens = 0
        for place in range(len(self.pending) - 1, at - 1, -1):
            if self._promised[place]:
                break
            request = self.pending[place]
            if request.phase is Phase.WAITING:
                count += 1
                tokens += request.reserved_tokens
        return count, tokens

    @property
    def pace_s(self) -> float:
        """Tightest decode pace among the accepted requests, seconds a token; inf when none has one."""
        return min(self.paces, default=math.inf)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken (for tests and idle moments)."""
        assert self._keys == [(r.due_s, r.seq) for r in self.pending] == sorted(self._keys)
        assert list(self._dues) == [r.due_s for r in self.pending]
        assert list(self._remaining) == [r.remaining_tokens for r in self.pending]
        assert list(self._context) == [r.computed_tokens for r in self.pending]
        assert list(self._promised) == [r.promised for r in self.pending]
        assert all(r.phase in (Phase.WAITING, Phase.PREFILL) for r in self.pending)
        assert self.prefilling == sum(r.phase is Phase.PREFILL for r in self.pending)
        assert self.completing.keys() == {r.id for r in self.pending if not r.remaining_tokens}
        assert self.hoped.keys() == {r.id for r in self.pending if r.phase is Phase.WAITING and r.computed_tokens}
        assert all(r.phase is Phase.DECODE for r in self.decoding.values())
        assert all(r.phase is Phase.UNDECIDED for r in self.undecided.values())
        assert self._columns == [*dict.fromkeys(self._columns)]
        assert {r.id for r in self._columns} == self.decoding.keys()
        assert [r.column for r in self._columns] == list(range(len(self._columns)))
        assert list(self._next_dues) == [r.next_due_s for r in self._columns]
        assert list(self._left) == [r.max_output_tokens - r.output_tokens for r in self._columns]
        assert self.requests.keys() == ({r.id for r in self.pending} | self.decoding.keys() | self.undecided.keys())
        served = [*self.pending, *self.decoding.values()]
        assert self.reserved_tokens == sum(r.reserved_tokens for r in served)
        assert self.paces == Counter(r.slo.pace_s for r in served)
        assert self.loose_tokens == sum(r.reserved_tokens for r in served if math.isinf(r.slo.pace_s))
        assert self.loose.keys() == {r.id for r in self.decoding.values() if math.isinf(r.slo.pace_s)}
        assert self.context_tokens == sum(r.target_tokens + self._decoded_since(r) for r in self.decoding.values())

    @staticmethod
    def _decoded_since(request: RequestState) -> int:
        """Output tokens since the last (re)computation of the prompt."""
        return request.prompt_tokens + request.output_tokens - request.target_tokens

    def _leave_decoding(self, request: RequestState) -> None:
        del self.decoding[request.id]
        self.loose.pop(request.id, None)
        self.context_tokens -= request.target_tokens + self._decoded_since(request)
        at, last = request.column, self._columns.pop()
        due, left = self._next_dues.pop(), self._left.pop()
        if last is not request:
            last.column = at
            self._columns[at], self._next_dues[at], self._left[at] = last, due, left
        request.column = -1

    def _start(self, request: RequestState) -> None:
        if request.phase is Phase.WAITING:
            request.phase = Phase.PREFILL
            self.prefilling += 1

    def _computed(self, request: RequestState, at: int) -> None:
        """The computed tokens of the pending request at this place have changed."""
        left = request.target_tokens - request.computed_tokens
        self._remaining[at] = left
        self._context[at] = request.computed_tokens
        if left:
            self.completing.pop(request.id, None)
        else:
            self.completing[request.id] = request
        if request.phase is Phase.WAITING and request.computed_tokens:
            self.hoped[request.id] = request
        else:
            self.hoped.pop(request.id, None)

    def _give_way(self, request: RequestState) -> None:
        """Order a request without a promise behind every pending promise."""
        at = self._promised.tobytes().rfind(1)
        if at >= 0 and request.due_s <= self._dues[at]:
            request.due_s = math.nextafter(self._dues[at], math.inf)

    def _index(self, request: RequestState) -> int:
        at = bisect.bisect_left(self._keys, (request.due_s, request.seq))
        if at >= len(self.pending) or self.pending[at] is not request:
            raise ValueError(f"{request!r} is not pending")
        return at

    def _insert(self, request: RequestState) -> None:
        key = (request.due_s, request.seq)
        at = bisect.bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.pending.insert(at, request)
        self._dues.insert(at, request.due_s)
        self._remaining.insert(at, 0)
        self._context.insert(at, 0)
        self._promised.insert(at, request.promised)
        self._computed(request, at)

    def _remove(self, request: RequestState) -> None:
        at = self._index(request)
        self.prefilling -= request.phase is Phase.PREFILL
        del self.pending[at], self._keys[at], self._dues[at]
        del self._remaining[at], self._context[at], self._promised[at]
        self.completing.pop(request.id, None)
        self.hoped.pop(request.id, None)
