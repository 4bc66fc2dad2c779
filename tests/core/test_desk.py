"""The desk: who is asked at a boundary, in which order, and what the rule of a class makes of the answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from _build import PLAIN, request, view
from headway.admission.response_time import ResponseTime
from headway.core import Accept, Answer, Bookings, Defer, Desk, Ledger, Reason, Reject, RequestState, Slo
from headway.core.desk import GROUP_LATE_S, GROUP_WAIT_S, RETRIES_PER_STEP
from headway.core.verdict import Verdict
from headway.core.view import EngineView

FULL = Reject(reason=Reason.TTFT)


class Script:
    """An admission test that answers by a function and remembers whom it was asked about."""

    name = "script"

    def __init__(self, answer: Callable[[EngineView, RequestState], Verdict]) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the scripted verdict."""
        self.asked.append(request.id)
        return self.answer(view, request)


def arrived(*on_miss: str) -> tuple[Ledger, list[RequestState]]:
    """Return a ledger with an undecided request, due in 1 s, for each rule."""
    ledger, found = Ledger(), []
    for seq, rule in enumerate(on_miss):
        one = request(seq)
        one.slo = Slo(name="default", ttft_s=1.0, on_miss=rule)  # type: ignore[arg-type]
        ledger.arrive(one)
        found.append(one)
    return ledger, found


def verdicts(answers: list[Answer]) -> dict[str, str]:
    """Return id -> kind of verdict."""
    return {state.id: type(a.verdict).__name__ for a in answers for state in a.requests}


def test_the_rules_of_the_classes() -> None:
    """Refused by the test: `reject` is refused now, `defer` at its deadline, `best_effort` served without a target."""
    ledger, (first, second, third) = arrived("reject", "defer", "best_effort")
    desk = Desk(patience_s=60.0)
    now = list(desk.ask(view(ledger), Script(lambda v, r: FULL)))
    assert verdicts(now) == {first.id: "Reject", third.id: "Accept"}
    assert (third.has_target, third.promised, third.due_s) == (False, False, 60.0)
    assert list(desk.ask(view(ledger, now=0.9), Script(lambda v, r: FULL))) == []
    late = list(desk.ask(view(ledger, now=1.0), Script(lambda v, r: FULL)))
    assert verdicts(late) == {second.id: "Reject"}
    assert desk.empty
    ledger.check()


def test_what_cannot_be_refused_is_served_without_a_promise() -> None:
    """Nobody would turn its refusal into an answer, not even of what never fits."""
    ledger, (one,) = arrived("reject")
    one.refusable = False
    (answer,) = Desk().ask(view(ledger), Script(lambda v, r: Reject(reason=Reason.NEVER_FITS)))
    assert isinstance(answer.verdict, Accept)
    assert not one.promised


def test_the_order_of_asking() -> None:
    """Whose time is up, then a few of the deferred in turn, then who is new."""
    ledger, waiting = arrived(*["defer"] * 6)
    desk = Desk()
    list(desk.ask(view(ledger), Script(lambda v, r: FULL)))
    hesitating = request(50)
    ledger.arrive(hesitating)
    list(
        desk.ask(
            view(ledger, now=0.1), Script(lambda v, r: Defer(until_s=0.2, otherwise=FULL) if r.seq == 50 else FULL)
        )
    )
    new = request(51)
    ledger.arrive(new)
    script = Script(lambda v, r: FULL)
    list(desk.ask(view(ledger, now=0.3), script))
    assert script.asked[0] == hesitating.id
    assert script.asked[-1] == new.id
    assert len(script.asked) == 2 + RETRIES_PER_STEP
    # Turn by turn: the first four were asked at 0.1, so the last two come first now.
    assert script.asked[1:3] == [waiting[4].id, waiting[5].id]


def test_what_fell_before_something_raises_stands() -> None:
    """The first is accepted and told; the second breaks the test."""
    ledger, (first, second) = arrived("reject", "reject")

    def broken(view: EngineView, request: RequestState) -> Verdict:
        if request is second:
            raise ZeroDivisionError
        return Accept()

    answers = Desk().ask(view(ledger), Script(broken))
    assert verdicts([next(answers)]) == {first.id: "Accept"}
    with pytest.raises(ZeroDivisionError):
        next(answers)
    assert list(ledger.undecided) == [second.id]


def test_a_group_has_one_verdict() -> None:
    """Asked about when all are there, at the latest after the wait; who comes later follows."""
    ledger, (first, second) = arrived("reject", "reject")
    desk = Desk()
    for one in (first, second):
        desk.join(one.id, group="g", size=3, now_s=0.0)
    accept = Script(lambda v, r: Accept(bound_s=r.due_s - r.seq))
    assert list(desk.ask(view(ledger), accept)) == []
    (answer,) = desk.ask(view(ledger, now=GROUP_WAIT_S), accept)
    assert ([r.id for r in answer.requests], answer.late) == ([first.id, second.id], False)
    assert isinstance(answer.verdict, Accept)
    assert answer.verdict.bound_s == 1.0  # that of the last first token
    third = request(2)
    ledger.arrive(third)
    desk.join(third.id, group="g", size=3, now_s=2.0)
    (answer,) = desk.ask(view(ledger, now=2.0), Script(lambda v, r: FULL))
    assert isinstance(answer.verdict, Accept)
    assert answer.late
    assert desk.empty


@pytest.mark.parametrize(
    ("reason", "pace", "prompt", "others", "told", "wait"),
    [
        (Reason.KV, 1.0, 100, False, Reason.NEVER_FITS, None),
        # Two decodes: 10 ms a step. Two prompts of p tokens: 10 + 2 p ms, and they are due in 1,000.
        (Reason.TBT, 0.009, 100, False, Reason.NEVER_FITS, None),
        (Reason.TBT, 0.011, 100, False, Reason.TBT, None),
        (Reason.TTFT, 1.0, 496, False, Reason.NEVER_FITS, None),
        (Reason.TTFT, 1.0, 494, False, Reason.TTFT, None),
        (Reason.TENANT_SHARE, 1.0, 496, False, Reason.TENANT_SHARE, 1.0),
        (Reason.KV, 1.0, 100, True, Reason.KV, 1.0),
        (Reason.TBT, 0.009, 100, True, Reason.TBT, 1.0),
        (Reason.TTFT, 1.0, 496, True, Reason.TTFT, 1.0),
    ],
)
def test_a_group_that_is_in_its_own_way(
    reason: Reason, pace: float, prompt: int, others: bool, told: Reason, wait: float | None
) -> None:
    """What takes too long at the mean cost alone does so at any time; no wait is known for the rest."""
    ledger, (first, second) = arrived("reject", "reject")
    for one in (first, second):
        one.slo = Slo(name="default", ttft_s=1.0, tbt_s=pace)
        one.prompt_tokens = one.target_tokens = prompt
    if others:
        other = request(7)
        ledger.arrive(other)
        ledger.accept(other, 1.0)
    desk = Desk()
    for one in (first, second):
        desk.join(one.id, group="g", size=2, now_s=0.0)
    full = Reject(reason=reason, retry_after_s=1.0)
    (answer,) = desk.ask(view(ledger, now=0.3), Script(lambda v, r: full if r is second else Accept()))
    assert isinstance(answer.verdict, Reject)
    assert answer.verdict.reason is told
    assert answer.verdict.retry_after_s == wait


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("size", "served"), [(4, True), (30, False)])
def test_sequences_whose_prompts_take_longer_than_their_target(strict: bool, size: int, served: bool) -> None:
    """0.1 s of prefill each, due in 1 s: four can be promised, thirty are late on any day, and wait for none."""
    ledger, desk = Ledger(), Desk()
    for seq in range(size):
        one = request(seq)
        one.slo = Slo(name="default", ttft_s=1.0, on_miss="defer")
        ledger.arrive(one)
        desk.join(one.id, group="g", size=size, now_s=0.0)
    (answer,) = desk.ask(view(ledger), ResponseTime(strict=strict, foresight=0.0))
    assert isinstance(answer.verdict, Accept) == served
    if isinstance(answer.verdict, Reject):
        assert (answer.verdict.reason, answer.verdict.retry_after_s) == (Reason.NEVER_FITS, None)
        assert not ledger.requests


@pytest.mark.parametrize(("refused_alone", "told"), [(True, Reason.NEVER_FITS), (False, Reason.KV)])
def test_places_that_are_kept_for_others_do_not_make_a_group_too_large(refused_alone: bool, told: Reason) -> None:
    """Refused beside who was told to come back, accepted without: not for ever."""
    ledger, own = arrived("reject", "reject")
    bookings = Bookings()
    for number in range(20):  # who is told to come back usually does
        one = request(100 + number, fingerprint=f"{number}")
        bookings.book(one, PLAIN, 1.0, 10.0 * number - 900.0)
        assert bookings.claim(one, 10.0 * number - 899.0)
    bookings.book(request(7, fingerprint="other"), PLAIN, 0.5, 0.0)
    desk = Desk(bookings=bookings)
    for one in own:
        desk.join(one.id, group="g", size=2, now_s=0.0)

    def answer(view: EngineView, asked: RequestState) -> Verdict:
        beside = all(asked is not one for one in own)
        return Reject(reason=Reason.KV) if asked.seq and (beside or refused_alone) else Accept()

    (found,) = desk.ask(view(ledger), Script(answer))
    assert isinstance(found.verdict, Reject)
    assert found.verdict.reason is told


def test_who_follows_a_sequence_without_a_promise_gets_none() -> None:
    """Its prefix will be computed some day, so the few tokens of its own say nothing."""
    ledger = Ledger()
    slo = Slo(name="default", ttft_s=1.0, on_miss="best_effort")
    first = request(0, prompt=800)
    second = request(1, prompt=800, cached_tokens=784, follows=first)
    for one in (first, second):
        one.slo = slo
        ledger.arrive(one)
    script = Script(lambda v, r: FULL if r is first else Accept(bound_s=0.1))
    list(Desk().ask(view(ledger), script))
    assert script.asked == [first.id]
    assert [(one.promised, one.has_target, one.due_s) for one in (first, second)] == [(False, False, 60.0)] * 2


def test_members_that_never_come_are_forgotten() -> None:
    """A decided group is kept for a while only."""
    ledger, (first,) = arrived("reject")
    desk = Desk()
    desk.join(first.id, group="g", size=2, now_s=0.0)
    list(desk.ask(view(ledger, now=GROUP_WAIT_S), Script(lambda v, r: Accept())))
    assert not desk.empty
    other = request(7)
    ledger.arrive(other)
    desk.join(other.id, group="h", size=1, now_s=GROUP_LATE_S + 1.0)
    list(desk.ask(view(ledger, now=GROUP_LATE_S + 1.0), Script(lambda v, r: Accept())))
    assert desk.empty


def test_who_leaves_is_not_asked_about() -> None:
    """A client that went away while it was deferred."""
    ledger, (first, second, third) = arrived("defer", "reject", "reject")
    desk = Desk()
    list(desk.ask(view(ledger), Script(lambda v, r: FULL if r is first else Defer(until_s=9.0, otherwise=FULL))))
    desk.leave(first.id)
    ledger.finish(first.id)
    script = Script(lambda v, r: Accept())
    found = list(desk.ask(view(ledger, now=0.1), script))
    assert verdicts(found) == {second.id: "Accept", third.id: "Accept"}


def test_a_lost_deadline_at_the_head_is_renewed() -> None:
    """A document of 2 s that is due in 1 s gets another of its targets; who can make it, and who has none, does not."""
    ledger = Ledger()
    lost = request(0, ttft=6.0, prompt=2000, arrival=-5.0)
    fine = request(1, ttft=6.0, prompt=500, arrival=-5.0)
    free = request(2, ttft=None, patience_s=1.0, prompt=2000)
    for one in (lost, fine, free):
        ledger.arrive(one)
        ledger.accept(one, one.due_s)
    ledger.schedule(lost.id, 100)
    assert list(Desk().ask(view(ledger), Script(lambda v, r: FULL))) == []
    assert (lost.due_s, fine.due_s, free.due_s) == (6.0, 1.0, 1.0)
    assert (lost.remaining_tokens, ledger.prefilling) == (1900, 1)
    assert [one.id for one in ledger.pending] == [fine.id, free.id, lost.id]
    ledger.check()


def test_a_lost_document_does_not_refuse_the_chats_behind_it() -> None:
    """The policy serves them first, so the admission test must not count it as served before them."""
    ledger = Ledger()
    lost = request(0, ttft=6.0, prompt=3000, arrival=-5.0, tpot=0.5)
    other = request(1, ttft=9.0, prompt=100, tpot=0.5)
    for one in (lost, other):
        ledger.arrive(one)
        ledger.accept(one, one.due_s)
    chat = request(2, ttft=1.5, prompt=50, tpot=0.5)
    ledger.arrive(chat)
    (answer,) = Desk().ask(view(ledger), ResponseTime())
    assert isinstance(answer.verdict, Accept)
