"""The strict test and the default policy together: no accepted request is ever late while steps keep their envelope."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _loop import Arrival, Loop, Outcome
from headway.admission import create as create_admission
from headway.core import CostCoefficients, Line, Slo
from headway.policies import create as create_policy

costs = st.builds(
    CostCoefficients,
    g=st.sampled_from([0.002, 0.01, 0.03]),
    a=st.sampled_from([2e-5, 2e-4, 1e-3]),
    b=st.sampled_from([0.0, 5e-5, 5e-4]),
    k=st.sampled_from([0.0, 1e-8, 1e-6]),
    x=st.sampled_from([0.0, 1e-9, 1e-6]),
)


@st.composite
def classes(draw: st.DrawFn, g: float) -> list[Slo]:
    """Return one to three classes whose paces are a few fixed costs, banked or hard."""
    out = []
    for number in range(draw(st.integers(1, 3))):
        pace = g * draw(st.sampled_from([1.5, 3.0, 8.0, 20.0]))
        hard = draw(st.booleans())
        out.append(
            Slo(
                name=str(number),
                ttft_s=draw(st.sampled_from([0.2, 0.5, 1.0, 3.0, 6.0])),
                tpot_s=None if hard else pace,
                tbt_s=pace if hard else None,
            )
        )
    return out


@st.composite
def loads(draw: st.DrawFn) -> tuple[CostCoefficients, list[Arrival]]:
    """Return a cost and 1 to 25 requests that come at up to a few times what it can serve."""
    cost = draw(costs)
    known = draw(classes(cost.g))
    mean = (cost.work_s(400, 0) + cost.g) * draw(st.sampled_from([0.2, 0.5, 1.0, 2.0]))
    out, now = [], 0.0
    for gap in draw(st.lists(st.sampled_from([0.0, 0.0, 0.3, 1.0, 3.0]), min_size=1, max_size=25)):
        now += gap * mean
        output = draw(st.sampled_from([1, 2, 8, 40]))
        out.append(
            Arrival(
                at_s=now,
                prompt=draw(st.sampled_from([1, 8, 50, 200, 400, 1000, 1800])),
                output=output,
                early=draw(st.sampled_from([0, 0, output // 2])),
                slo=draw(st.sampled_from(known)),
            )
        )
    return cost, out


def run(
    cost: CostCoefficients,
    arrivals: list[Arrival],
    *,
    method: str = "walk",
    policy: str = "headway",
    skip: bool = False,
    **more: object,
) -> list[Outcome]:
    """Serve the load under the strict test without foresight and without jumps."""
    parameters = {"jump": False, "skip": skip} if policy == "headway" else {}
    loop = Loop(
        coefficients=cost,
        policy=create_policy(policy, **parameters),
        admission=create_admission("response_time", strict=True, foresight=0.0, method=method),
        **more,
    )
    return loop.run(arrivals)


def broken(outcomes: list[Outcome]) -> list[tuple[int, list[str]]]:
    """Return the accepted requests that missed a target, with the targets."""
    return [(at, o.misses()) for at, o in enumerate(outcomes) if o.verdict == "accept" and o.misses()]


engines = {
    "blocking_s": st.sampled_from([0.05, 0.25, 1.0]),
    "max_step_tokens": st.sampled_from([20, 150, 2048]),
    "method": st.sampled_from(["walk", "walk", "closed"]),
    "skip": st.booleans(),
}


@settings(max_examples=150, deadline=None)
@given(load=loads(), **engines)
def test_no_accepted_request_misses_a_target(
    load: tuple[CostCoefficients, list[Arrival]], blocking_s: float, max_step_tokens: int, method: str, skip: bool
) -> None:
    """First tokens by their deadline, streams at their pace: whatever arrives, on an engine of exact cost."""
    outcomes = run(*load, method=method, skip=skip, blocking_s=blocking_s, max_step_tokens=max_step_tokens)
    assert broken(outcomes) == []
    assert all(o.bound_s is not None and o.bound_s <= o.due_s for o in outcomes if o.verdict == "accept")


@settings(max_examples=100, deadline=None)
@given(load=loads(), seed=st.integers(0, 10_000), **engines)
def test_the_guarantee_holds_for_every_course_under_the_envelope(
    load: tuple[CostCoefficients, list[Arrival]],
    seed: int,
    blocking_s: float,
    max_step_tokens: int,
    method: str,
    skip: bool,
) -> None:
    """Steps may take anything up to 1.3 times their mean, as an envelope of that factor says."""
    rng = random.Random(seed)
    ratios = [rng.uniform(0.3, 1.3) for _ in range(37)]
    more = {"blocking_s": blocking_s, "max_step_tokens": max_step_tokens, "skip": skip}
    assert broken(run(*load, method=method, factor=1.3, ratios=ratios, **more)) == []


@settings(max_examples=200, deadline=None)
@given(
    load=loads(),
    seed=st.integers(0, 10_000),
    lines=st.lists(
        st.tuples(st.sampled_from([1.0, 1.05, 1.2]), st.sampled_from([0.0, 0.5, 2.0, 6.0])), min_size=1, max_size=2
    ),
    low=st.sampled_from([0.3, 1.0, 1.6]),
    **engines,
)
def test_the_guarantee_holds_for_every_course_under_the_envelopes_of_stretches(
    load: tuple[CostCoefficients, list[Arrival]],
    seed: int,
    lines: list[tuple[float, float]],
    low: float,
    blocking_s: float,
    max_step_tokens: int,
    method: str,
    skip: bool,
) -> None:
    """Single steps take up to 1.6 times their mean, steps in a row no more than their rate and burst allow."""
    rng = random.Random(seed)
    more = {
        "blocking_s": blocking_s,
        "max_step_tokens": max_step_tokens,
        "skip": skip,
        "ratios": [rng.choice([low, rng.uniform(low, 1.6), 1.6]) for _ in range(37)],
        "lines": tuple(Line(rate, times * load[0].g) for rate, times in lines),
    }
    assert broken(run(*load, method=method, factor=1.6, **more)) == []


def test_a_promise_counts_on_what_steps_in_a_row_take() -> None:
    """Ten prompts at once, steps of up to 1.5 times their mean, in a row 1.05 times: knowing that, more is promised."""
    cost = CostCoefficients(g=0.01, a=1e-3, b=0.0)
    arrivals = [Arrival(at_s=0.0, prompt=100, output=1, slo=Slo(name="a", ttft_s=1.0)) for _ in range(10)]
    more = {"factor": 1.5, "ratios": [1.5], "blocking_s": 0.15}
    alone = run(cost, arrivals, **more)
    together = run(cost, arrivals, lines=(Line(1.05, 0.03),), **more)
    assert broken(alone) == broken(together) == []
    counts = [sum(o.verdict == "accept" for o in outcomes) for outcomes in (alone, together)]
    assert counts[0] < counts[1]


@pytest.mark.parametrize("seed", range(6))
def test_the_guarantee_holds_in_a_long_overload(seed: int) -> None:
    """120 requests at about twice what fits: some are accepted, many refused, none is late."""
    rng = random.Random(seed)
    cost = CostCoefficients(g=0.01, a=2e-4, b=5e-5, k=1e-8, x=1e-8)
    known = [Slo(name="chat", ttft_s=0.5, tpot_s=0.03), Slo(name="document", ttft_s=3.0, tbt_s=0.1)]
    arrivals, now = [], 0.0
    for _ in range(120):
        now += rng.expovariate(1 / 0.05)
        prompt = int(min(1800, max(8, rng.lognormvariate(5.5, 1.0))))
        arrivals.append(Arrival(at_s=now, prompt=prompt, output=rng.randint(1, 60), slo=rng.choice(known)))
    outcomes = run(cost, arrivals, check=True)
    assert broken(outcomes) == []
    verdicts = [o.verdict for o in outcomes]
    assert verdicts.count("accept") > 20
    assert verdicts.count("reject") > 20


def test_the_policy_is_part_of_the_guarantee() -> None:
    """The same test in front of a policy with whole-budget steps breaks the paces it promised."""
    cost = CostCoefficients(g=0.01, a=1e-3, b=0.0)
    slo = Slo(ttft_s=6.0, tpot_s=0.05)
    arrivals = [Arrival(at_s=0.3 * number, prompt=600, output=10, slo=slo) for number in range(6)]
    assert broken(run(cost, arrivals)) == []
    assert broken(run(cost, arrivals, policy="edf"))


def test_a_longer_step_than_the_walks_is_no_anomaly() -> None:
    """A counter-example to the first version, shrunk: the prompt of 1,000 tokens came 5 ms too late.

    Behind 201 tokens it needs one step of 250 ms and a little of the next. The walk had that one last a pace, 15 ms;
    really it lasted 250 ms again, filled with the document. Now a step that completes a first token ends by its
    deadline, and a bound counts one step more because steps may be out of phase with the walk's.
    """
    cost = CostCoefficients(g=0.01, a=2e-4, b=0.0)
    chat, document = Slo(ttft_s=0.5, tpot_s=0.015), Slo(ttft_s=3.0, tpot_s=0.015)
    arrivals = [
        Arrival(at_s=0.0, prompt=1, output=1, slo=chat),
        Arrival(at_s=0.005, prompt=1800, output=1, slo=document),
    ]
    arrivals += [Arrival(at_s=0.005, prompt=prompt, output=1, slo=chat) for prompt in (1, 200, 1000)]
    outcomes = run(cost, arrivals)
    assert broken(outcomes) == []
    everything = Loop(
        coefficients=cost, policy=create_policy("headway", jump=False), admission=create_admission("admit_all")
    ).run(arrivals)
    assert [o.misses() for o in everything] == [[]] * 5
