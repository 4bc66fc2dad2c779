"""SOLA: which side is served, and that it differs from arrival order and from static weights."""

from __future__ import annotations

from _build import decoding, pending, request, view
from headway.core import CostCoefficients, Ledger
from headway.policies import create

COST = CostCoefficients(g=0.010, a=0.001, b=0.0)


def test_prefill_mode_fills_up_to_the_pace_in_tiles() -> None:
    """A stream whose next token is due in 90 ms leaves 80 ms of prefill: 80 tokens, a multiple of 16."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1), first_s=0.0)
    pending(ledger, request(1, ttft=0.02, arrival=0.0, prompt=500))
    plan = create("sola").plan(view(ledger, COST, now=0.01))
    assert dict(plan.chunks) == {"r1": 80}


def test_decode_mode_gives_the_fewest_tokens_that_lose_nobody() -> None:
    """The stream is the less fulfilled: a prompt that can still wait a step gets nothing in this one."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1), first_s=0.0)
    pending(ledger, request(1, ttft=10.0, arrival=0.05, prompt=500))
    plan = create("sola").plan(view(ledger, COST, now=0.06))
    assert dict(plan.chunks) == {}
    assert plan.token_budget == 1


def test_both_broken_bounds_by_the_median_stream() -> None:
    """With one hopeless stream of three and a late prompt, the step is bounded by the median stream, not the worst."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.01), first_s=0.0)
    decoding(ledger, request(1, tpot=0.3), request(2, tpot=0.3), first_s=0.0)
    pending(ledger, request(3, ttft=0.05, arrival=0.0, prompt=500))
    assert dict(create("sola").plan(view(ledger, COST, now=0.11)).chunks) == {"r3": 176}


def test_differs_from_fcfs_and_from_static_weights() -> None:
    """Both of those would spend the whole budget beside a stream that is due; sola keeps its pace."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1), first_s=0.0)
    pending(ledger, request(1, ttft=0.02, prompt=500))
    seen = view(ledger, COST, now=0.01)
    budgets = {name: create(name).plan(seen).token_budget for name in ("fcfs", "priority", "sola")}
    assert budgets["sola"] < budgets["priority"] <= budgets["fcfs"]


def test_an_idle_engine_always_gets_work() -> None:
    """Without decodes a prompt is started whatever its deadline says."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=0.001, prompt=5))
    assert dict(create("sola").plan(view(ledger, COST, now=9.0)).chunks) == {"r0": 5}
