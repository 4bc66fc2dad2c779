"""Bookings: waits that follow each other, room for who may come back, and what share of them does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from _build import decoding, request, view
from headway.core import Accept, Bookings, CostCoefficients, Desk, Ledger, Reason, Reject, RequestState
from headway.core.bookings import EARLY_S, FILL, GRACE_S, LEAST_SHARE, MARGIN
from headway.core.verdict import Verdict
from headway.core.view import EngineView

#: A millisecond a prompt token and nothing else: 100 tokens are 0.1 s.
COST = CostCoefficients(g=0.0, a=0.001, b=0.0)


def asked(seq: int, at: float = 0.0, prompt: int = 100, **more: str) -> RequestState:
    """A request of a second's target that tells who it is."""
    return request(seq, arrival=at, prompt=prompt, fingerprint=f"print {seq}", **more)


def resolve(bookings: Bookings, claimed: Iterable[bool], **more: str) -> None:
    """Let bookings long ago have been claimed or not."""
    for number, come in enumerate(claimed):
        at = -1000.0 + 10 * number
        one = asked(100_000 + number, at, **more)
        bookings.book(one, COST, 1.0, at)
        assert bookings.claim(one, at + 1.0 if come else at + 9.0) is come
        bookings.beside(asked(1), COST, at + 9.0, only_own=False)  # what is over is found out when somebody asks


def test_waits_follow_each_other_at_the_rate_of_admission() -> None:
    """All come back, and 0.5 s of work is admitted a second: bookings of 0.1 s are 0.2 s / FILL apart."""
    bookings = Bookings()
    resolve(bookings, [True] * 500)
    for step in range(1000):
        bookings.admitted(asked(step), COST, -200.0 + 0.2 * step)
    waits = [bookings.book(asked(1000 + number), COST, 0.05, 0.0) for number in range(4)]
    gaps = [second - first for first, second in itertools.pairwise(waits)]
    assert waits[0] == 0.05
    assert gaps[1:] == pytest.approx([0.2 / FILL] * 2, rel=0.05)


def test_a_wait_is_never_shorter_than_what_the_engine_needs() -> None:
    """The line is free, the engine is not."""
    assert Bookings().book(asked(1), COST, 2.5, 0.0) == 2.5


def test_who_is_not_named_gets_the_wait_and_no_booking() -> None:
    """Without a fingerprint nobody could be recognised."""
    bookings = Bookings()
    assert bookings.book(request(1), COST, 2.5, 0.0) == 2.5
    assert bookings.open == 0


@pytest.mark.parametrize(
    ("after", "claimed"), [(-2 * EARLY_S, False), (0.0, True), (GRACE_S, True), (GRACE_S + 0.1, False)]
)
def test_a_booking_is_claimed_in_time(after: float, claimed: bool) -> None:
    """From just before its moment until the grace is over, once."""
    bookings = Bookings()
    bookings.book(asked(1), COST, 3.0, 0.0)
    assert bookings.claim(asked(1), 3.0 + after) is claimed
    assert bookings.claim(asked(1), 3.0 + after) is False
    assert bookings.claim(asked(2), 3.0) is False


def test_room_is_kept_for_those_who_usually_come() -> None:
    """A booking of 0.1 s that is due before the one that asks: it is asked as if it were larger by that share of it."""
    for history, share in (([True] * 500, 1.0), ([True, False] * 250, 0.5), ([False] * 500, 0.0)):
        bookings = Bookings()
        resolve(bookings, history)
        bookings.book(asked(1), COST, 0.5, 0.0)
        shadow = bookings.beside(asked(2), COST, 0.0, only_own=False)
        if share == 0.0:
            assert share < LEAST_SHARE
            assert shadow is None
        else:
            assert shadow is not None
            assert shadow.prompt_tokens - 100 == pytest.approx(MARGIN * share * 100, rel=0.05)
            assert shadow.remaining_tokens == shadow.prompt_tokens


def test_who_is_overdue_is_expected_less_and_less() -> None:
    """Clients that come to the moment: a second later hardly any room is kept."""
    bookings = Bookings()
    resolve(bookings, [True] * 200)
    bookings.book(asked(1), COST, 0.0, 0.0)
    rooms = []
    for now in (0.0, 0.05, 1.0):
        shadow = bookings.beside(asked(2, now), COST, now, only_own=False)
        rooms.append(0 if shadow is None else shadow.prompt_tokens - 100)
    assert rooms[0] > rooms[1] > rooms[2]
    assert rooms[2] < 5


def test_a_tenant_below_its_share_does_not_make_way_for_others() -> None:
    """With `only_own` bookings of other lines do not count."""
    bookings = Bookings()
    resolve(bookings, [True] * 100, tenant="a")
    bookings.book(asked(1, tenant="a"), COST, 0.5, 0.0)
    assert bookings.beside(asked(2, tenant="b"), COST, 0.0, only_own=True) is None
    assert bookings.beside(asked(2, tenant="b"), COST, 0.0, only_own=False) is not None


def test_a_second_refusal_goes_to_the_head_of_the_line() -> None:
    """It waited already; and it has one booking, not two."""
    bookings = Bookings()
    resolve(bookings, [True] * 100)
    for step in range(100):
        bookings.admitted(asked(step), COST, -10.0 + 0.1 * step)
    for number in range(20):
        bookings.book(asked(1000 + number), COST, 0.1, 0.0)
    again = asked(1000, 0.1)
    again.booked = bookings.claim(again, 0.1)
    assert again.booked
    assert bookings.book(again, COST, 0.3, 0.1) == pytest.approx(0.3)
    assert bookings.open == 20


class Room:
    """An admission test with room for so many prompt tokens."""

    name = "room"

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Accept what is small enough."""
        if request.prompt_tokens <= self.tokens:
            return Accept(bound_s=view.now_s)
        return Reject(reason=Reason.TTFT, retry_after_s=0.5)


def test_at_the_desk_who_comes_back_is_asked_as_it_is() -> None:
    """Room for 150 tokens, one of 100 told to come now: it has the place, and another of 100 is told why not."""
    bookings = Bookings()
    resolve(bookings, [True] * 500)
    bookings.book(asked(1), COST, 0.0, 0.0)
    ledger = Ledger()
    decoding(ledger, request(0))
    desk, back, new = Desk(bookings=bookings), asked(1), asked(2)
    ledger.arrive(new)
    desk.arrive(new, COST, 0.0)
    (answer,) = desk.ask(view(ledger, COST), Room(150))
    assert isinstance(answer.verdict, Reject)
    assert answer.verdict.detail is not None
    assert "come back" in answer.verdict.detail
    ledger.arrive(back)
    desk.arrive(back, COST, 0.0)
    (answer,) = desk.ask(view(ledger, COST), Room(150))
    assert isinstance(answer.verdict, Accept)
