"""Fair shares between tenants: whose share is what, when it counts, and what a reserve leaves."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _build import decoding, pending, request, view
from headway.core import Accept, CostCoefficients, Desk, FairShares, Ledger, Reason, Reject, RequestState
from headway.core.tenants import CALM_S, GONE_S, LEVEL_EVERY_S, MEMORY_S, MOST_TENANTS
from headway.core.verdict import Verdict
from headway.core.view import EngineView

#: A second of work a prompt token and nothing else.
SECOND = CostCoefficients(g=0.0, a=1.0, b=0.0)


class Demand:
    """Requests of tenants that are offered and, some of them, admitted, all at the same time."""

    def __init__(self, shares: FairShares) -> None:
        self.shares = shares
        self.seq = 0

    def offer(self, tenant: str, work: int, *, admitted: bool, now: float = 0.0) -> RequestState:
        """One request of `work` seconds."""
        self.seq += 1
        one = request(self.seq, prompt=work, tenant=tenant)
        self.shares.offered(one, SECOND, now)
        if admitted:
            self.shares.admitted(one, SECOND, now)
        else:
            self.shares.refused(one, now)
        return one


def have(shares: FairShares, *tenants: str, now: float = 2 * LEVEL_EVERY_S) -> list[bool]:
    """Return which tenants have their share."""
    return [shares.has_share(request(9000, tenant=tenant), now) for tenant in tenants]


def test_shares_by_hand() -> None:
    """100 s admitted: c offered 10 and keeps them, a and b divide 90. a has 55 and so its share, b has 35."""
    shares = FairShares()
    demand = Demand(shares)
    demand.offer("a", 55, admitted=True)
    demand.offer("a", 500, admitted=False)
    demand.offer("b", 35, admitted=True)
    demand.offer("b", 60, admitted=False)
    demand.offer("c", 10, admitted=True)
    assert have(shares, "a", "b") == [True, False]


def test_a_tenant_that_is_gone_while_its_request_waits_has_no_share() -> None:
    """A deferred request outlives the memory of who sent it: asked about again, it is a request of a new tenant."""
    shares = FairShares()
    demand = Demand(shares)
    demand.offer("a", 55, admitted=True)
    waits = demand.offer("a", 500, admitted=False)
    late = GONE_S + 1.0
    demand.offer("b", 5, admitted=False, now=late - 1.5)
    assert not shares.has_share(waits, late)
    assert not shares.has_share(waits, late)


def test_a_weight_is_a_larger_share() -> None:
    """With weight 3 a may have three quarters: 70 of 100 is below that, and 30 is above b's quarter."""
    for weights, expected in (({}, [True, False]), ({"a": 3.0}, [False, True])):
        shares = FairShares(weights)
        demand = Demand(shares)
        demand.offer("a", 70, admitted=True)
        demand.offer("a", 500, admitted=False)
        demand.offer("b", 30, admitted=True)
        demand.offer("b", 500, admitted=False)
        assert have(shares, "a", "b") == expected


def test_nobody_is_limited_alone_or_while_nobody_is_refused() -> None:
    """One tenant; two that both get everything; two of different classes; and again once the class has calmed down."""
    alone = FairShares()
    Demand(alone).offer("a", 500, admitted=False)
    assert have(alone, "a") == [False]
    calm = FairShares()
    Demand(calm).offer("a", 50, admitted=True)
    Demand(calm).offer("b", 1, admitted=True)
    assert have(calm, "a", "b") == [False, False]
    calm.refused(request(1, tenant="a"), 1.0)
    assert have(calm, "a", "b", now=1.0) == [True, False]
    assert have(calm, "a", "b", now=1.0 + CALM_S) == [False, False]


def test_what_is_long_ago_weighs_less() -> None:
    """a had everything two minutes ago and b has it now: b has its share."""
    shares = FairShares()
    demand = Demand(shares)
    demand.offer("a", 100, admitted=True)
    for at in (4 * MEMORY_S, 4 * MEMORY_S + 1):
        demand.offer("a", 5, admitted=True, now=at)
        demand.offer("b", 50, admitted=True, now=at)
        demand.offer("b", 50, admitted=False, now=at)
    assert have(shares, "a", "b", now=at + 1) == [False, True]


def test_the_sums_stay_finite_for_days() -> None:
    """The scale that makes old work lighter starts over before it overflows."""
    shares = FairShares()
    demand = Demand(shares)
    for hour in range(100):
        demand.offer("a", 10, admitted=True, now=3600.0 * hour)
        demand.offer("b", 1, admitted=False, now=3600.0 * hour)
    tenants = shares._classes["default"].tenants
    assert all(math.isfinite(each.offered) for each in tenants.values())
    assert have(shares, "a", "b", now=3600.0 * 99 + 1) == [True, False]


def test_tenants_are_forgotten_and_bounded() -> None:
    """Whoever is silent for a minute is gone; a thousand keys in a second are not kept."""
    shares = FairShares()
    demand = Demand(shares)
    for number in range(4 * MOST_TENANTS):
        demand.offer(f"t{number}", 1, admitted=False, now=number * 1e-3)
    assert shares.known == MOST_TENANTS
    demand.offer("new", 1, admitted=True, now=5.0 + GONE_S)
    assert shares.known == 1


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.floats(0.1, 100.0), st.floats(0.0, 1.0), st.sampled_from([0.5, 1.0, 2.0, 4.0])),
        min_size=2,
        max_size=8,
    )
)
def test_the_level_is_that_of_max_min_fairness(rows: list[tuple[float, float, float]]) -> None:
    """Against filling in small drops: the capacity divided by weight, nobody beyond what it offered."""
    shares = FairShares({f"t{i}": weight for i, (_, _, weight) in enumerate(rows)})
    for i, (offered, part, _) in enumerate(rows):
        one = request(i, tenant=f"t{i}", prompt=1)
        work = CostCoefficients(g=0.0, a=offered, b=0.0)
        shares.offered(one, work, 0.0)
        shares.admitted(one, CostCoefficients(g=0.0, a=offered * part, b=0.0), 0.0)
    capacity = sum(offered * part for offered, part, _ in rows)
    got = [0.0] * len(rows)
    drop = max(capacity, 1e-9) / 4000
    for _ in range(4000):
        open_ = [i for i, (offered, _, _) in enumerate(rows) if got[i] < offered - 1e-9]
        if not open_:
            break
        total = sum(rows[i][2] for i in open_)
        for i in open_:
            got[i] += drop * rows[i][2] / total
    level = shares._level(shares._classes["default"])
    for i, (offered, _, weight) in enumerate(rows):
        assert min(offered, weight * level) == pytest.approx(got[i], abs=capacity * 0.01 + 1e-6)


# At the desk


class Room:
    """An admission test with room up to a deadline: a request is accepted when it is due at `free_s` or later."""

    name = "room"

    def __init__(self, free_s: float) -> None:
        self.free_s = free_s

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Accept when its deadline leaves enough."""
        late = self.free_s - request.due_s
        return Accept(bound_s=self.free_s) if late <= 0 else Reject(reason=Reason.TTFT, retry_after_s=late)


def at_desk(shares: FairShares, free_s: float, *tenants: str) -> list[Accept | Reject]:
    """Return the verdicts on a request of each tenant, due in 1 s, beside one that decodes."""
    ledger = Ledger()
    decoding(ledger, request(8000))
    for number, tenant in enumerate(tenants):
        ledger.arrive(request(8001 + number, tenant=tenant))
    found = Desk(shares=shares).ask(view(ledger), Room(free_s))
    return [answer.verdict for answer in found]


def contended() -> FairShares:
    """a has far more than its share, b next to nothing."""
    shares = FairShares(reserve=0.3)
    demand = Demand(shares)
    for tenant, work, admitted in (("a", 100, True), ("b", 1, True), ("a", 100, False)):
        demand.offer(tenant, work, admitted=admitted, now=-1.0)
    return shares


def test_only_the_tenant_with_its_share_leaves_room() -> None:
    """Free at 0.8 s: in time for b, due at 1.0, and too late for a, which must leave 0.3 of it."""
    a, b = at_desk(contended(), 0.8, "a", "b")
    assert isinstance(b, Accept)
    assert isinstance(a, Reject)
    assert (a.reason, a.retry_after_s) == (Reason.TENANT_SHARE, pytest.approx(0.1))
    assert [type(v) for v in at_desk(contended(), 0.6, "a", "b")] == [Accept, Accept]


def test_without_room_the_other_is_refused_for_its_own_reason() -> None:
    """Free at 1.5 s: too late for everybody."""
    a, b = at_desk(contended(), 1.5, "a", "b")
    assert isinstance(a, Reject)
    assert isinstance(b, Reject)
    assert (a.reason, b.reason) == (Reason.TENANT_SHARE, Reason.TTFT)


def test_an_idle_engine_has_room_for_everybody() -> None:
    """Nothing is pending or decodes: whom should the room be kept for?"""
    ledger = Ledger()
    ledger.arrive(request(1, tenant="a"))
    (answer,) = Desk(shares=contended()).ask(view(ledger), Room(0.9))
    assert isinstance(answer.verdict, Accept)


def test_the_reserve_is_of_slack_blocks_slots_and_decodes() -> None:
    """0.3 of each; the request and the ledger themselves are untouched."""
    ledger = Ledger()
    pending(ledger, request(1))
    one = request(2, tenant="a")
    now = view(ledger, CostCoefficients(g=0.01, a=0.001, b=0.007), blocks=1000, free=500, max_running=10)
    smaller, shadow = FairShares(reserve=0.3).reserved(now, one)
    assert (one.due_s, shadow.due_s) == (pytest.approx(1.0), pytest.approx(0.7))
    assert (smaller.kv.total_blocks, smaller.kv.free_blocks, smaller.max_running) == (700, 200, 7)
    assert smaller.cost.mean.b == pytest.approx(0.01)
    assert (now.cost.mean.b, smaller.ledger) == (0.007, ledger)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), keys=st.integers(2, 6))
def test_who_is_far_below_the_others_never_leaves_room(seed: int, keys: int) -> None:
    """Whatever was offered and admitted: a tenant with less than half of another's, and refused some, is protected."""
    rng = random.Random(seed)
    shares = FairShares()
    demand = Demand(shares)
    for _ in range(60):
        demand.offer(f"t{rng.randrange(keys)}", rng.randint(1, 50), admitted=rng.random() < 0.5)
    tenants = shares._classes["default"].tenants
    most = max(each.admitted for each in tenants.values())
    for name, each in tenants.items():
        if each.admitted < 0.5 * most and each.offered > each.admitted == min(t.admitted for t in tenants.values()):
            assert have(shares, name) == [False]
