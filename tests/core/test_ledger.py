"""The state of every request: legal sequences of events keep the invariants, deadlines are those of the design."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from _build import decoding, ids, pending, request
from headway.core import Ledger, Phase, RequestState, Slo


class LedgerMachine(RuleBasedStateMachine):
    """Any legal sequence of events, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.seq = 0
        self.now = 0.0

    def pick(self, requests: list[RequestState], data: st.DataObject) -> RequestState:
        """Return any of the requests."""
        return data.draw(st.sampled_from(sorted(requests, key=lambda r: r.seq)))

    @rule(
        ttft=st.sampled_from([None, 0.5, 1.0, 1.0]),
        tpot=st.sampled_from([None, 0.05, 0.1]),
        tbt=st.sampled_from([None, 0.07]),
        prompt=st.integers(1, 40),
        cached=st.integers(0, 50),
        output=st.integers(1, 6),
    )
    def arrive(self, ttft, tpot, tbt, prompt, cached, output) -> None:
        """A request comes in."""
        slo = Slo(ttft_s=ttft, tpot_s=tpot, tbt_s=tbt)
        self.ledger.arrive(
            RequestState(
                id=f"r{self.seq}",
                seq=self.seq,
                slo=slo,
                arrival_s=self.now,
                prompt_tokens=prompt,
                max_output_tokens=output,
                cached_tokens=cached,
            )
        )
        self.seq += 1

    @precondition(lambda self: self.ledger.undecided)
    @rule(data=st.data(), promise=st.booleans())
    def accept(self, data: st.DataObject, promise: bool) -> None:
        """One is accepted."""
        one = self.pick(list(self.ledger.undecided.values()), data)
        self.ledger.accept(one, one.due_s if promise else None)
        assert one.promised is promise

    @precondition(lambda self: self.ledger.pending)
    @rule(data=st.data(), tokens=st.integers(1, 30))
    def schedule(self, data: st.DataObject, tokens: int) -> None:
        """A chunk of one prompt is issued."""
        one = self.pick(self.ledger.pending, data)
        self.ledger.schedule(one.id, tokens)
        assert one.phase is Phase.PREFILL
        assert one.remaining_tokens >= 0

    @precondition(lambda self: self.ledger.pending)
    @rule(data=st.data(), tokens=st.integers(0, 60), started=st.booleans())
    def set_computed(self, data: st.DataObject, tokens: int, started: bool) -> None:
        """The engine corrects what is computed."""
        one = self.pick(self.ledger.pending, data)
        self.ledger.set_computed(one.id, tokens, started=started)
        assert one.phase is Phase.PREFILL or not started

    @precondition(lambda self: self.ledger.pending or self.ledger.decoding)
    @rule(data=st.data(), gap=st.sampled_from([0.0, 0.01, 0.2]), count=st.integers(1, 3))
    def token(self, data: st.DataObject, gap: float, count: int) -> None:
        """Tokens of one come out."""
        self.now += gap
        one = self.pick([*self.ledger.pending, *self.ledger.decoding.values()], data)
        late = one.phase is Phase.WAITING and one.preemptions > 0  # of a step issued before the preemption
        self.ledger.token(one.id, self.now, count)
        assert (one.id in self.ledger.decoding) is not late

    @precondition(lambda self: self.ledger.pending or self.ledger.decoding)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """One loses its KV."""
        one = self.pick([*self.ledger.pending, *self.ledger.decoding.values()], data)
        self.ledger.preempt(one.id)
        assert one.remaining_tokens == one.prompt_tokens + one.output_tokens

    @precondition(lambda self: self.ledger.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """One ends, is refused or aborted, wherever it is."""
        one = self.pick(list(self.ledger.requests.values()), data)
        assert self.ledger.finish(one.id) is one

    @invariant()
    def holds(self) -> None:
        """Every invariant of the ledger, and the columns and places beside it."""
        ledger = self.ledger
        ledger.check()
        dues, remaining, computed, promised = ledger.columns()
        assert dues.tolist() == [r.due_s for r in ledger.pending]
        assert remaining.tolist() == [r.remaining_tokens for r in ledger.pending]
        assert computed.tolist() == [r.computed_tokens for r in ledger.pending]
        assert promised.tolist() == [r.promised for r in ledger.pending]
        assert ledger.pace_s == min(
            [r.slo.pace_s for r in [*ledger.pending, *ledger.decoding.values()]], default=math.inf
        )
        for one in ledger.undecided.values():
            assert ledger.place(one) == sum((r.due_s, r.seq) <= (one.due_s, one.seq) for r in ledger.pending)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_pending_is_in_deadline_order_with_ties_by_sequence() -> None:
    """Earlier deadlines first; of two equal ones the one that came first."""
    ledger = Ledger()
    pending(ledger, request(3, ttft=1.0), request(1, ttft=2.0), request(2, ttft=1.0))
    assert ids(ledger.pending) == ["r2", "r3", "r1"]


def test_the_first_deadline_carries_the_front() -> None:
    """d = arrival + TTFT - front: tokenising and sending take their share of the target."""
    assert request(0, ttft=1.0, arrival=5.0, front_s=0.1).due_s == pytest.approx(5.9)


def test_without_target_the_patience_is_the_deadline() -> None:
    """A request without TTFT target ages: it is due after its patience, and so never starves."""
    one = request(0, ttft=None, arrival=5.0, patience_s=60.0)
    assert one.due_s == pytest.approx(65.0)
    assert not one.has_target


def test_a_tpot_stream_banks_what_it_is_early() -> None:
    """Token m + 1 is due m paces after the first token, however early token m came."""
    ledger = Ledger()
    one = request(0, tpot=0.1)
    decoding(ledger, one, first_s=1.0)
    assert one.next_due_s == pytest.approx(1.1)
    ledger.token("r0", 1.02)
    ledger.token("r0", 1.03)
    assert one.next_due_s == pytest.approx(1.3)
    ledger.token("r0", 1.04, count=3)
    assert one.next_due_s == pytest.approx(1.6)


def test_a_tbt_stream_banks_nothing() -> None:
    """Every gap counts from the token before it; with both targets the tighter one is due."""
    ledger = Ledger()
    hard, both = request(0, tbt=0.1), request(1, tpot=0.3, tbt=0.1)
    decoding(ledger, hard, both, first_s=1.0)
    for name in ("r0", "r1"):
        ledger.token(name, 1.02)
    assert hard.next_due_s == pytest.approx(1.12)
    assert both.next_due_s == pytest.approx(1.12)


def test_a_stream_without_pace_is_never_due() -> None:
    """No decode target, no deadline."""
    ledger = Ledger()
    decoding(ledger, request(0), first_s=1.0)
    assert ledger.decoding["r0"].next_due_s == math.inf


def test_context_and_reserved_tokens_by_hand() -> None:
    """K grows by each token of a decode; the reservation is prompt + max output from acceptance to the end."""
    ledger = Ledger()
    pending(ledger, request(0, prompt=100, output=10), request(1, prompt=50, output=5))
    assert (ledger.context_tokens, ledger.reserved_tokens) == (0, 165)
    ledger.token("r0", 0.1)
    ledger.token("r0", 0.2)
    assert (ledger.context_tokens, ledger.reserved_tokens) == (102, 165)
    ledger.finish("r0")
    assert (ledger.context_tokens, ledger.reserved_tokens) == (0, 55)


def test_a_preempted_stream_comes_back_due_at_its_next_token() -> None:
    """Its prompt and what it had produced are to be computed again, by the deadline of the next token."""
    ledger = Ledger()
    one = request(0, tpot=0.1, prompt=100)
    decoding(ledger, one, first_s=1.0)
    ledger.token("r0", 1.05)
    ledger.preempt("r0")
    assert (one.phase, one.remaining_tokens, one.preemptions) == (Phase.WAITING, 102, 1)
    assert one.due_s == pytest.approx(1.2)
    assert ledger.context_tokens == 0
    ledger.schedule("r0", 102)
    ledger.token("r0", 1.15)
    assert ledger.context_tokens == 103
    assert one.first_token_s == 1.0


def test_an_output_in_flight_at_the_preemption_is_computed_again_too() -> None:
    """It reaches the client, and the request goes on waiting with one token more to compute."""
    ledger = Ledger()
    one = request(0, tpot=0.1, prompt=100)
    decoding(ledger, one, first_s=1.0)
    ledger.preempt("r0")
    ledger.token("r0", 1.05)
    assert (one.phase, one.output_tokens, one.remaining_tokens) == (Phase.WAITING, 2, 102)
    assert ledger.context_tokens == 0
    ledger.check()


def test_a_preempted_stream_without_pace_keeps_its_deadline() -> None:
    """Due never, it would wait behind everything else for ever."""
    ledger = Ledger()
    decoding(ledger, request(0, ttft=1.0), first_s=0.5)
    ledger.preempt("r0")
    assert ledger.pending[0].due_s == 1.0


def test_a_retracted_request_is_undecided_again() -> None:
    """Nothing of its acceptance remains."""
    ledger = Ledger()
    one = request(0, tpot=0.1)
    pending(ledger, one)
    ledger.retract(one)
    assert (one.phase, one.promised, one.bound_s) == (Phase.UNDECIDED, False, None)
    assert (ledger.pending, ledger.reserved_tokens, ledger.paces) == ([], 0, {})
    ledger.check()


def test_a_cached_prompt_still_computes_one_token() -> None:
    """A whole-prompt cache hit leaves the last token, which makes the first output token."""
    assert request(0, prompt=100, cached_tokens=100).remaining_tokens == 1


def test_an_id_arrives_once() -> None:
    """A second request of the same id is a mistake of the adapter."""
    ledger = Ledger()
    ledger.arrive(request(0))
    with pytest.raises(ValueError, match="arrived twice"):
        ledger.arrive(request(0))


def test_only_pending_requests_are_scheduled() -> None:
    """Prompt tokens of a decode or of an undecided request are a mistake of the adapter."""
    ledger = Ledger()
    decoding(ledger, request(0))
    ledger.arrive(request(1))
    for name in ("r0", "r1"):
        with pytest.raises(ValueError, match="not pending"):
            ledger.schedule(name, 1)
