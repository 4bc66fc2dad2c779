"""The default admission test: what it refuses, why, and what it says about it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _build import PLAIN, decoding, pending, request, view
from _loop import Arrival, Loop
from headway.admission import create
from headway.core import Accept, CostCoefficients, Defer, DemandWindow, Ledger, Reason, Reject, Slo, StepCost
from headway.policies import create as create_policy

#: 10 ms a step, 1 ms a prompt token, 1 ms a decode.
COST = CostCoefficients(g=0.010, a=0.001, b=0.001)


def strict(**parameters: object):
    """Return the test that promises only what always holds."""
    return create("response_time", strict=True, foresight=0.0, **parameters)


def busy(ttft: float = 5.0, prompt: int = 400, count: int = 3) -> Ledger:
    """Return a ledger with promised prefills and one stream."""
    ledger = Ledger()
    decoding(ledger, request(900, tpot=0.1, output=50))
    pending(ledger, *(request(seq, ttft=ttft, tpot=0.1, prompt=prompt) for seq in range(count)))
    return ledger


def test_a_prompt_longer_than_the_model_never_fits() -> None:
    """At once, without a retry: waiting changes nothing."""
    verdict = create("response_time").decide(view(Ledger(), max_model_len=100), request(0, prompt=100))
    assert verdict == Reject(reason=Reason.NEVER_FITS)


def test_a_request_larger_than_the_pool_never_fits() -> None:
    """Prompt and max output in blocks against the whole pool, whoever else is there."""
    verdict = create("response_time").decide(view(Ledger(), blocks=10), request(0, prompt=150, output=11))
    assert verdict == Reject(reason=Reason.NEVER_FITS)


def test_a_request_too_slow_alone_never_fits() -> None:
    """600 tokens need 610 ms on an idle engine against a target of 600 ms; the bound says so."""
    verdict = create("response_time").decide(view(busy(), COST), request(9, ttft=0.6, prompt=600))
    assert verdict == Reject(reason=Reason.NEVER_FITS, bound_s=pytest.approx(0.61))


def test_alone_counts_the_steps_that_the_budget_needs() -> None:
    """The same prompt in steps of 200 tokens pays the fixed cost three times."""
    seen = view(busy(), COST, max_step_tokens=200)
    verdict = create("response_time").decide(seen, request(9, ttft=0.62, prompt=600))
    assert verdict == Reject(reason=Reason.NEVER_FITS, bound_s=pytest.approx(0.63))


def test_without_target_nothing_is_promised() -> None:
    """It is served when there is room and has no bound."""
    assert create("response_time").decide(view(busy(), COST), request(9, ttft=None)) == Accept(bound_s=None)


def test_an_unknown_cost_promises_nothing() -> None:
    """Until enough steps were seen everything is served: refusing on a guess would teach nothing."""
    assert create("response_time").decide(view(busy(), StepCost()), request(9, ttft=2.0)) == Accept(bound_s=None)


def test_kv_is_refused_when_the_reservations_fill_the_pool() -> None:
    """Everything accepted may grow to prompt + max output; the retry is when the next stream ends at its pace."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1, prompt=100, output=11))
    verdict = create("response_time").decide(view(ledger, COST, blocks=13), request(9, prompt=80, output=10))
    assert verdict == Reject(reason=Reason.KV, retry_after_s=pytest.approx(10 * 0.1))
    assert isinstance(create("response_time").decide(view(ledger, COST, blocks=20), request(9, prompt=80)), Accept)


def test_kv_is_refused_when_every_slot_is_taken() -> None:
    """A request that is promised a first token needs a slot to run in."""
    verdict = create("response_time").decide(view(busy(), COST, max_running=4), request(9, ttft=5.0))
    assert isinstance(verdict, Reject)
    assert verdict.reason is Reason.KV


def test_tbt_is_refused_when_one_more_decode_breaks_the_pace() -> None:
    """10 + 16 + 25 ms with 25 decodes against a pace of 50 ms; 24 of them pass."""
    for streams, refused in ((23, False), (24, True)):
        ledger = Ledger()
        decoding(ledger, *(request(seq, tpot=0.05, output=20) for seq in range(streams)))
        verdict = create("response_time").decide(view(ledger, COST), request(99, ttft=30.0, tpot=0.05))
        assert (isinstance(verdict, Reject) and verdict.reason is Reason.TBT) is refused
        if isinstance(verdict, Reject):
            assert verdict.bound_s == pytest.approx(0.051)
            assert verdict.retry_after_s == pytest.approx(19 * 0.05)


def test_the_candidates_own_pace_counts() -> None:
    """A tighter class than all accepted ones is judged by its own pace."""
    verdict = create("response_time").decide(view(busy(), COST), request(9, ttft=30.0, tpot=0.02))
    assert isinstance(verdict, Reject)
    assert verdict.reason is Reason.TBT


def test_ttft_is_refused_with_the_bound_and_the_time_that_is_missing() -> None:
    """1.2 s of work ahead at 86 ms a step of 100 ms: a target of 1 s is missed, and retrying later makes it up."""
    verdict = create("response_time").decide(view(busy(ttft=0.9), COST), request(9, ttft=1.0, tpot=0.1, prompt=100))
    assert isinstance(verdict, Reject)
    assert verdict.reason is Reason.TTFT
    assert verdict.bound_s is not None
    assert 1.3 < verdict.bound_s < 1.9
    assert verdict.retry_after_s == pytest.approx(1.07 * verdict.bound_s - 1.0 + 0.1)  # a step more, and some doubt


def test_a_bound_is_a_time_that_holds_or_none() -> None:
    """What is done in no step of the walk has no bound to tell."""
    ledger = busy(prompt=90_000, ttft=0.9)
    verdict = create("response_time").decide(view(ledger, COST), request(9, ttft=1.0, tpot=0.1))
    assert verdict == Reject(reason=Reason.TTFT, bound_s=None, retry_after_s=None)


def test_an_accepted_request_is_promised_a_bound_within_its_target() -> None:
    """A later deadline than everything pending, with room to spare."""
    verdict = strict().decide(view(busy(ttft=5.0), COST), request(9, ttft=8.0, tpot=0.1))
    assert isinstance(verdict, Accept)
    assert verdict.bound_s is not None
    assert 1.3 < verdict.bound_s <= 8.0


@pytest.mark.parametrize("parameters", [{}, {"strict": True}, {"method": "closed"}])
def test_promises_behind_the_candidate_are_kept(parameters: dict) -> None:
    """The candidate is due first and in time itself, but 800 ms of it would make the promised one late."""
    ledger = Ledger()
    decoding(ledger, request(900, tpot=0.1, output=50))
    pending(ledger, request(0, ttft=2.0, tpot=0.1, prompt=800))
    test = create("response_time", foresight=0.0, **parameters)
    refused = test.decide(view(ledger, COST), request(9, ttft=1.9, tpot=0.1, prompt=900))
    assert isinstance(refused, Reject)
    assert refused.reason is Reason.TTFT
    assert refused.detail is not None
    assert "promise" in refused.detail
    assert isinstance(test.decide(view(ledger, COST), request(9, ttft=1.9, tpot=0.1, prompt=300)), Accept)


@pytest.mark.parametrize("parameters", [{}, {"strict": True}])
def test_what_was_not_promised_protects_nobody(parameters: dict) -> None:
    """The same candidate goes ahead of a request that was accepted without a bound."""
    ledger = Ledger()
    decoding(ledger, request(900, tpot=0.1, output=50))
    pending(ledger, request(0, ttft=2.0, tpot=0.1, prompt=800), promised=False)
    test = create("response_time", foresight=0.0, **parameters)
    assert isinstance(test.decide(view(ledger, COST), request(9, ttft=1.9, tpot=0.1, prompt=900)), Accept)


def test_a_promise_that_is_lost_refuses_nobody() -> None:
    """800 ms of work due in 100 ms cannot be kept: also the strict test goes on without it."""
    ledger = Ledger()
    decoding(ledger, request(900, tpot=0.1, output=50))
    pending(ledger, request(0, ttft=0.9, tpot=0.1, prompt=800))
    now = 0.8
    candidate = request(9, arrival=now, ttft=0.08, prompt=20, tpot=0.1)
    assert isinstance(strict().decide(view(ledger, PLAIN, now=now), candidate), Reject)
    candidate = request(9, arrival=now, ttft=2.0, prompt=20, tpot=0.1)
    assert isinstance(strict().decide(view(ledger, PLAIN, now=now), candidate), Accept)


def test_an_idle_engine_serves_except_in_strict() -> None:
    """A cost learned in a bad moment is only unlearned by serving; a strict promise is never made for that."""
    slow = CostCoefficients(g=0.3, a=0.001, b=0.0)
    candidate = request(0, ttft=5.0, tpot=0.1)
    assert isinstance(create("response_time").decide(view(Ledger(), slow), candidate), Accept)
    assert isinstance(strict().decide(view(Ledger(), slow), candidate), Reject)


def test_a_preempted_stream_without_deadline_is_no_error() -> None:
    """A horizon without end is walked as far as walks go."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=1.0, patience_s=60.0), request(1, ttft=None, patience_s=math.inf))
    assert isinstance(create("response_time").decide(view(ledger, COST), request(9, ttft=5.0)), Accept)


def test_same_view_same_verdict() -> None:
    """A test is a function of view and request."""
    ledger, candidate = busy(), request(9, ttft=3.0, tpot=0.1)
    test = create("response_time")
    assert test.decide(view(ledger, COST), candidate) == test.decide(view(ledger, COST), candidate)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 1200), max_size=8),
    targets=st.sampled_from([(0.5, 3.0), (1.0, 9.0), (4.0, 4.0)]),
    streams=st.integers(0, 20),
    prompt=st.integers(1, 1500),
    ttft=st.sampled_from([0.4, 1.0, 3.0, 9.0]),
    factor=st.sampled_from([1.0, 1.2]),
    budget=st.sampled_from([100, 10_000]),
)
def test_the_walk_accepts_everything_that_the_closed_form_accepts(
    prompts: list[int],
    targets: tuple[float, float],
    streams: int,
    prompt: int,
    ttft: float,
    factor: float,
    budget: int,
) -> None:
    """In time as well. On equal slots it is never later (core/walk); one that stops at longer slots may be."""
    ledger = Ledger()
    decoding(ledger, *(request(500 + seq, tpot=0.1, output=3 + seq) for seq in range(streams)))
    pending(ledger, *(request(seq, ttft=targets[seq % 2], tpot=0.1, prompt=p) for seq, p in enumerate(prompts)))
    seen = view(ledger, StepCost.fixed(COST, factor=factor), max_step_tokens=budget)
    candidate = request(99, ttft=ttft, tpot=0.1, prompt=prompt)
    closed, walk = strict(method="closed").decide(seen, candidate), strict().decide(seen, candidate)
    if isinstance(closed, Accept):
        assert isinstance(walk, Accept)
        assert closed.bound_s is not None
        assert walk.bound_s is not None
        assert max(closed.bound_s, walk.bound_s) <= candidate.due_s + 1e-9


def demand(works: list[float], every: float = 0.1) -> DemandWindow:
    """Return a window: for 20 s a request of each work, due later than any here, came every so many seconds."""
    window = DemandWindow()
    for number in range(int(20 / every)):
        for work in works:
            window.add(number * every, work_s=work, ttft_s=1e3)
    return window


def test_above_capacity_a_long_prompt_makes_room_for_short_ones() -> None:
    """0.5 s of short work and 1 s of long work a second: the long one would be late behind the short ones to come."""
    ledger = busy(count=1, prompt=200)
    for one in (*ledger.pending, *ledger.decoding.values()):
        one.arrival_s, one.due_s = one.arrival_s + 20.0, one.due_s + 20.0
    seen = view(ledger, COST, now=20.0, demand=demand([0.05, 0.1]))
    long, short = (
        request(9, arrival=20.0, ttft=1.3, tpot=0.1, prompt=700),
        request(9, arrival=20.0, ttft=1.3, tpot=0.1, prompt=50),
    )
    test = create("response_time", hesitate=0.0)
    refused = test.decide(seen, long)
    assert isinstance(refused, Reject)
    assert refused.reason is Reason.TTFT
    assert isinstance(test.decide(seen, short), Accept)
    assert isinstance(create("response_time", foresight=0.0).decide(seen, long), Accept)


def test_what_only_foresight_denies_waits_for_its_answer() -> None:
    """Until half of the target is gone, or until it could not be met even alone; then the refusal stands."""
    ledger = busy(count=1, prompt=200)
    for one in (*ledger.pending, *ledger.decoding.values()):
        one.due_s += 20.0
    long = request(9, arrival=20.0, ttft=1.3, tpot=0.1, prompt=700)
    test = create("response_time", hesitate=0.3)
    verdict = test.decide(view(ledger, COST, now=20.0, demand=demand([0.05, 0.1])), long)
    assert isinstance(verdict, Defer)
    assert verdict.until_s == pytest.approx(20.39)
    assert verdict.otherwise.reason is Reason.TTFT
    later = test.decide(view(ledger, COST, now=20.4, demand=demand([0.05, 0.1])), long)
    assert isinstance(later, Reject)


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([1.5, 2.0, 4.0]), min_size=3, max_size=12),
    prompts=st.lists(st.integers(10, 400), min_size=12, max_size=12),
)
def test_below_capacity_foresight_refuses_nothing_more(gaps: list[float], prompts: list[int]) -> None:
    """At less than a third of what the steps carry, both accept the same."""
    slo = Slo(ttft_s=2.0, tpot_s=0.1)
    arrivals, now = [], 0.0
    for gap, prompt in zip(gaps, prompts, strict=False):
        now += gap
        arrivals.append(Arrival(at_s=now, prompt=prompt, output=5, slo=slo))
    found = [
        [
            outcome.verdict
            for outcome in Loop(
                coefficients=COST, policy=create_policy("headway"), admission=create("response_time", foresight=share)
            ).run(arrivals)
        ]
        for share in (0.0, 1.0)
    ]
    assert found[0] == found[1]


def test_at_overload_foresight_serves_more_requests() -> None:
    """1.4 s of work a second, half of it long prompts without hurry that would be promised first: density wins more."""
    long, short = Slo(name="long", ttft_s=4.0, tpot_s=0.1), Slo(name="short", ttft_s=1.0, tpot_s=0.1)
    arrivals = [Arrival(at_s=0.085 * number, prompt=60, output=3, slo=short) for number in range(350)]
    arrivals += [Arrival(at_s=0.05 + 1.0 * number, prompt=700, output=3, slo=long) for number in range(30)]
    good = []
    for share in (0.0, 1.0):
        loop = Loop(
            coefficients=COST, policy=create_policy("headway"), admission=create("response_time", foresight=share)
        )
        outcomes = loop.run(arrivals)
        good.append(sum(o.verdict == "accept" and not o.misses() for o in outcomes))
    assert good[1] > 1.1 * good[0]


def test_a_long_target_leaves_room_for_short_ones_to_come() -> None:
    """Below capacity too: 0.6 s of work a second with a target of 0.5 s comes before a deadline 3 s away.

    The candidate's 1.2 s and the 0.6 * 2.5 s to come do not fit; without those arrivals, or with targets as long as
    its own, it is accepted.
    """
    ledger = busy(count=1, prompt=200)
    for one in (*ledger.pending, *ledger.decoding.values()):
        one.due_s += 20.0
    long = request(9, arrival=20.0, ttft=3.0, tpot=0.1, prompt=1200)
    test = create("response_time", hesitate=0.0)
    answers = []
    for target in (0.5, 3.0):
        window = DemandWindow()
        for number in range(200):
            window.add(0.1 * number, work_s=0.06, ttft_s=target)
        answers.append(test.decide(view(ledger, COST, now=20.0, demand=window), long))
    assert isinstance(answers[0], Reject)
    assert isinstance(answers[1], Accept)


def test_at_overload_what_is_modest_is_served() -> None:
    """Denser demand fills every step, yet a request that needs little of the time it has is no burden."""
    ledger = busy(count=1, prompt=20)
    for one in (*ledger.pending, *ledger.decoding.values()):
        one.due_s += 20.0
    modest = request(9, arrival=20.0, ttft=3.0, tpot=0.1, prompt=300)
    seen = view(ledger, COST, now=20.0, demand=demand([0.05, 0.05], every=0.05))
    assert isinstance(create("response_time", hesitate=0.0).decide(seen, modest), Accept)
    assert isinstance(create("response_time", hesitate=0.0, concede=0.0).decide(seen, modest), Reject)
