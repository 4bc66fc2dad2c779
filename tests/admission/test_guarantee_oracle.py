"""The strict test against brute force: schedules and courses of service times enumerated on small cases."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _build import view
from _loop import Arrival, Loop
from _oracle import Oracle, Work, works
from headway.admission import create as create_admission
from headway.core import Accept, Admission, CostCoefficients, EngineView, Ledger, RequestState, Slo, Verdict
from headway.policies import create as create_policy

UNIT = 40
COST = CostCoefficients(g=0.01, a=2e-4, b=1e-3, k=1e-6, x=1e-7)
CLASSES = [
    Slo(name="short", ttft_s=0.06, tpot_s=0.03),
    Slo(name="hard", ttft_s=0.1, tbt_s=0.03),
    Slo(name="late", ttft_s=0.2, tpot_s=0.05),
    Slo(name="exact", ttft_s=0.01 + 80 * 2e-4 + 80 * 40 * 1e-7, tpot_s=0.1),  # one prompt of 80 alone, to the last bit
]


@dataclass
class Judged:
    """The strict test with the oracle beside it: `seen` counts (accepted, feasible)."""

    inner: Admission
    name: str = "response_time"
    seen: Counter[tuple[bool, bool | None]] = field(default_factory=Counter)

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the strict verdict, after asking the oracle the same question."""
        verdict = self.inner.decide(view, request)
        ledger = view.ledger
        known = works([*ledger.pending, *ledger.decoding.values(), request])
        self.seen[isinstance(verdict, Accept), Oracle(view, unit=UNIT).feasible(view.now_s, known)] += 1
        return verdict


def judged(arrivals: list[Arrival], factor: float, ratio: float, cost: CostCoefficients = COST) -> Judged:
    """Serve the load, every step at `ratio` times its mean; return what was judged."""
    admission = Judged(create_admission("response_time", strict=True, foresight=0.0))
    loop = Loop(
        coefficients=cost,
        policy=create_policy("headway", jump=False),
        admission=admission,
        factor=factor,
        ratios=[ratio],
        blocking_s=0.05,
        max_step_tokens=400,
    )
    outcomes = loop.run(arrivals)
    assert [o.misses(1e-9) for o in outcomes if o.verdict == "accept" and o.misses(1e-9)] == []
    return admission


def small_loads() -> st.SearchStrategy[list[Arrival]]:
    """1 to 4 requests: bursts (equal deadlines), one huge prompt, a deadline that equals the cost exactly."""
    one = st.builds(
        Arrival,
        at_s=st.sampled_from([0.0, 0.0, 0.013, 0.05, 0.11]),
        prompt=st.sampled_from([40, 80, 80, 160, 400]),
        output=st.integers(1, 3),
        slo=st.sampled_from(CLASSES),
    )
    burst = st.builds(lambda a, n: [a] * n, one, st.integers(2, 4))
    return st.one_of(st.lists(one, min_size=1, max_size=4), burst)


@settings(max_examples=60, deadline=None)
@given(arrivals=small_loads(), factor=st.sampled_from([1.0, 1.3]), low=st.booleans())
def test_what_is_accepted_has_a_schedule(arrivals: list[Arrival], factor: float, low: bool) -> None:
    """Never a false accept: what the strict test takes, brute force can schedule with every step at its envelope."""
    assert judged(arrivals, factor, 0.5 if low else factor).seen[True, False] == 0


@settings(max_examples=12, deadline=None)
@given(arrivals=small_loads())
def test_every_course_of_service_times_is_survived(arrivals: list[Arrival]) -> None:
    """Each of the first six steps at 0.4, 1 or 1.3 of its mean, all 729 courses: nobody accepted is late."""
    for course in itertools.product((0.4, 1.0, 1.3), repeat=6):
        loop = Loop(
            coefficients=COST,
            policy=create_policy("headway", jump=False),
            admission=create_admission("response_time", strict=True, foresight=0.0),
            factor=1.3,
            ratios=[*course, *[1.3] * 60],
            blocking_s=0.05,
            max_step_tokens=400,
        )
        outcomes = loop.run(arrivals)
        assert [(course, o) for o in outcomes if o.verdict == "accept" and o.misses(1e-9)] == []


@pytest.mark.parametrize("slower", [False, True])
def test_a_deadline_of_exactly_the_cost(slower: bool) -> None:
    """Alone on an idle engine a prompt of 80 tokens makes it to the last bit, yet is refused: a counted false reject.

    The bound has a slot to spare, so that no step out of phase can break it.
    """
    slo = CLASSES[3]
    arrival = Arrival(at_s=0.0, prompt=120 if slower else 80, output=1, slo=slo)
    assert judged([arrival], 1.0, 1.0).seen == {(False, not slower): 1}


def test_the_oracle_itself() -> None:
    """By hand: 80 tokens take 26 ms, two such prompts 42 ms in one step, 52 ms one after the other."""
    oracle = Oracle(view(Ledger(), CostCoefficients(g=0.01, a=2e-4, b=0.0)), unit=80)

    def prompt(due: float, tokens: int = 80, left: int = 1) -> Work:
        return Work(tokens, 0, left, due, math.inf, 0.03)

    assert oracle.feasible(0.0, [prompt(0.0261)])
    assert oracle.feasible(0.0, [prompt(0.0259)]) is False
    assert oracle.feasible(0.0, [prompt(0.0421), prompt(0.0421)])
    assert oracle.feasible(0.0, [prompt(0.0421), prompt(0.0419)]) is False
    assert oracle.feasible(0.0, [prompt(0.0261), prompt(0.0521)])  # in order, not together
    # Two more tokens at 10 ms each; the second prompt has to wait until they are out, or slow them down to 26 ms.
    assert oracle.feasible(0.0, [prompt(0.0261, left=3), prompt(0.0521)])
    assert oracle.feasible(0.0, [prompt(0.0261, left=3), prompt(0.0501)]) is False
