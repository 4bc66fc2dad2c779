"""Whom a refusal told when to come back, and the room that is kept for them.

Above capacity a wait alone is no answer: what gets free meanwhile is taken by whoever comes first, so a client that
waits as told finds the queue as full as before. A refusal with a wait is therefore a booking. The bookings of a line (a
class and tenant) follow each other at the rate at which the line's work is admitted, so each wait is the earliest at
which there is room behind those who were told to come before. Requests that come meanwhile are asked as if they
brought those bookings along which the engine will not have made room for by itself; who comes back in time is asked as
it is.

Most clients may never come back. What share of a line's bookings is claimed is measured, bookings count by it, and
below `LEAST_SHARE` not at all: traffic that does not retry is served as if there were no bookings.
"""

from __future__ import annotations

import bisect
import copy
import math
from dataclasses import dataclass, field

from headway.core.cost import CostCoefficients
from headway.core.request import RequestState
from headway.core.tenants import engine_s

#: A booking is claimed up to this long after its time: Retry-After is in whole seconds.
GRACE_S = 2.0

#: And this long before it.
EARLY_S = 0.05

#: Bookings over which the share that is claimed is measured, and those that it starts from: fewer than keep room, so
#: that nothing is kept before somebody has come back.
MEMORY = 64.0
_CLAIMED, _RESOLVED = 0.3, 4.0

#: How late a booking is claimed until that is known, and at least.
LATE_S, LEAST_LATE_S = 0.3, 0.02

#: Lines of which less is claimed keep no room.
LEAST_SHARE = 0.08

#: Time constant of the rate at which work is admitted.
RATE_S = 15.0

#: Room that is kept over what bookings need on average.
MARGIN = 1.3

#: Part of that rate that is booked; the rest makes up for clients that come together.
FILL = 0.8

#: Most bookings of a line, and most lines.
MOST_BOOKINGS, MOST_LINES = 2048, 256


@dataclass(slots=True)
class _Booking:
    fingerprint: str
    at_s: float
    target_s: float  # from then to its deadline
    prefill_s: float
    output_tokens: int
    open: bool = True


@dataclass(slots=True)
class _Rate:
    """Work a second, of about the last `RATE_S`."""

    work_s: float = 0.0  # decayed
    since_s: float = -math.inf
    at_s: float = -math.inf  # when it was decayed to

    def add(self, work_s: float, now_s: float) -> None:
        if self.since_s == -math.inf:
            self.since_s = self.at_s = now_s
        self.work_s = self.work_s * math.exp((self.at_s - now_s) / RATE_S) + work_s
        self.at_s = now_s

    def value(self, now_s: float) -> float:
        """Return the rate, 0 when unknown."""
        span = now_s - self.since_s
        if not 1.0 < span < math.inf:
            return 0.0
        # What a constant rate would have left of itself by now.
        kept = RATE_S * (1.0 - math.exp(-span / RATE_S))
        return self.work_s * math.exp((self.at_s - now_s) / RATE_S) / kept


@dataclass(slots=True)
class _Line:
    bookings: list[_Booking] = field(default_factory=list)  # by time
    end_s: float = -math.inf  # when the next one may come at the earliest
    claimed: float = _CLAIMED
    resolved: float = _RESOLVED
    late_s: float = LATE_S  # how long after its time a booking is claimed, on average
    rate: _Rate = field(default_factory=_Rate)  # engine time of what is admitted

    @property
    def share(self) -> float:
        return self.claimed / self.resolved

    def resolve(self, claimed: bool) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self.claimed = keep * self.claimed + claimed
        self.resolved = keep * self.resolved + 1.0

    def expected(self, age_s: float) -> float:
        """Return the probability that a booking is still claimed `age_s` after its time (negative: before it)."""
        if age_s <= 0:
            return self.share
        later = self.share * math.exp(-age_s / self.late_s)
        return later / (1.0 - self.share + later)


class Bookings:
    """Refused requests that were told when to come back, by class and tenant."""

    __slots__ = ("_by_print", "_lines", "_prefill")

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], _Line] = {}
        self._by_print: dict[str, _Booking] = {}
        self._prefill = _Rate()  # of everything admitted

    def claim(self, request: RequestState, now_s: float) -> bool:
        """A request came: whether it is one that was told to come now."""
        booking = self._by_print.get(request.fingerprint)
        if booking is None or not booking.at_s - EARLY_S <= now_s <= booking.at_s + GRACE_S:
            return False
        line = self._line(request)
        late = max(LEAST_LATE_S, now_s - booking.at_s)
        line.late_s += (late - line.late_s) / 16
        self._close(request.fingerprint, line, claimed=True)
        return True

    def admitted(self, request: RequestState, cost: CostCoefficients, now_s: float) -> None:
        """A request was accepted."""
        line = self._line(request)
        line.rate.add(engine_s(request, cost), now_s)
        self._prefill.add(cost.work_s(request.remaining_tokens, request.computed_tokens), now_s)
        if request.fingerprint in self._by_print:  # it came early and was lucky
            self._close(request.fingerprint, line, claimed=None)

    def book(self, request: RequestState, cost: CostCoefficients, wait_s: float, now_s: float) -> float:
        """Book a refused request that could pass after `wait_s` if nobody else came; return the wait to tell.

        One that had a booking and finds no room goes to the head of its line.
        """
        if not request.fingerprint:
            return wait_s
        line = self._line(request)
        self._expire(line, now_s)
        if request.fingerprint in self._by_print:
            self._close(request.fingerprint, line, claimed=None)
        if len(line.bookings) >= MOST_BOOKINGS:
            return max(wait_s, line.end_s - now_s)
        at = now_s + wait_s
        if not request.booked:
            at = max(at, line.end_s)
            rate = line.rate.value(now_s)
            if rate > 0 and line.share >= LEAST_SHARE:
                line.end_s = max(line.end_s, now_s) + line.share * engine_s(request, cost) / (FILL * rate)
        prefill = cost.work_s(request.remaining_tokens, request.computed_tokens)
        booking = _Booking(
            request.fingerprint, at, request.due_s - request.arrival_s, prefill, request.max_output_tokens
        )
        bisect.insort(line.bookings, booking, key=lambda each: each.at_s)
        self._by_print[request.fingerprint] = booking
        return at - now_s

    def beside(
        self, request: RequestState, cost: CostCoefficients, now_s: float, *, only_own: bool
    ) -> RequestState | None:
        """Return the request as if it brought along what must stay free for bookings; None when that is nothing.

        Args:
            request: the one that is asked about.
            cost: coefficients of the mean step.
            now_s: engine clock.
            only_own: count its own line only (a tenant below its share does not make way for others).

        One that was booked itself makes way for shorter targets only: those go before it whatever comes.
        """
        own = self._line(request) if only_own else None
        shorter = request.due_s - request.arrival_s - 1e-6 if request.booked else math.inf
        coming: list[tuple[float, float, float]] = []
        for line in self._lines.values():
            if not line.bookings or (own is not None and line is not own):
                continue
            self._expire(line, now_s)
            if line.share < LEAST_SHARE:
                continue
            for booking in line.bookings:
                if booking.at_s > request.due_s:
                    break
                if booking.open and booking.target_s < shorter:
                    part = line.expected(now_s - booking.at_s)
                    due = booking.at_s + booking.target_s
                    coming.append((due, part * booking.prefill_s, part * booking.output_tokens))
        # Those due before this one go ahead of it. For one that is due later, the engine goes on serving until then.
        coming.sort()
        drain = self._prefill.value(now_s)
        prefill = output = most = 0.0
        for due, work, tokens in coming:
            prefill += work
            output += tokens
            most = max(most, prefill - drain * max(0.0, due - request.due_s))
        prefill = MARGIN * most
        if not prefill:
            return None
        shadow = copy.copy(request)
        tokens = cost.tokens_within(prefill, 0)
        shadow.prompt_tokens += tokens
        shadow.target_tokens += tokens
        shadow.max_output_tokens += int(output)
        return shadow

    @property
    def open(self) -> int:
        """How many bookings are neither claimed nor over."""
        return len(self._by_print)

    def _line(self, request: RequestState) -> _Line:
        key = (request.slo.name, request.tenant)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= MOST_LINES:
                idle = [k for k, each in self._lines.items() if not each.bookings]
                for old in idle[: MOST_LINES // 4]:
                    del self._lines[old]
            line = self._lines[key] = _Line()
        return line

    def _close(self, fingerprint: str, line: _Line, *, claimed: bool | None) -> None:
        self._by_print.pop(fingerprint).open = False
        if claimed is not None:
            line.resolve(claimed)

    def _expire(self, line: _Line, now_s: float) -> None:
        over = 0
        for booking in line.bookings:
            if booking.open:
                if booking.at_s + GRACE_S >= now_s:
                    break
                self._close(booking.fingerprint, line, claimed=False)
            over += 1
        del line.bookings[:over]
