"""The learned price of a step."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core import CostCoefficients, Step, StepCost

GPU = CostCoefficients(g=8e-3, a=2.5e-5, b=4e-5, k=1e-8, x=2e-10)
CPU = CostCoefficients(g=0.031, a=0.0014, b=0.0006, k=0.0, x=0.7e-6)


def steps(true: CostCoefficients, count: int, *, noise: float = 0.0, seed: int = 0) -> list[Step]:
    """Return steps of an engine of that cost whose times err by a log-normal factor."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        q = rng.choice((0, rng.randint(1, 2048)))
        n = rng.randint(0 if q else 1, 200)
        K, X = n * rng.randint(50, 2000), q * rng.uniform(0.5, 2.0) * max(q, 200)
        seconds = true.seconds(q, n, K, X) * math.exp(rng.gauss(0.0, noise))
        out.append(Step(q=q, n=n, K=K, X=X, seconds=seconds))
    return out


def worst(cost: StepCost, true: CostCoefficients, seed: int = 99) -> float:
    """Return the largest relative error of the mean over steps that were not learned from."""
    return max(abs(cost.mean.seconds(s.q, s.n, s.K, s.X) / s.seconds - 1) for s in steps(true, 100, seed=seed))


def test_a_step_by_hand() -> None:
    """tau = g + a q + b n + k K + x X."""
    cost = CostCoefficients(g=1.0, a=0.1, b=0.01, k=0.001, x=0.0001)
    assert pytest.approx(cost.seconds(100, 50, 200, 300)) == 1.0 + 10.0 + 0.5 + 0.2 + 0.03
    assert pytest.approx(cost.work_s(100, 40)) == 10.0 + 0.0001 * 100 * (40 + 50)


@settings(max_examples=20, deadline=None)
@given(
    g=st.floats(1e-3, 0.05),
    a=st.floats(1e-5, 2e-3),
    b=st.floats(1e-6, 1e-3),
    k=st.floats(0, 1e-7),
    x=st.floats(0, 1e-6),
    seed=st.integers(0, 1000),
)
def test_exact_steps_give_the_coefficients_back(g: float, a: float, b: float, k: float, x: float, seed: int) -> None:
    """Without noise the fit predicts unseen steps within 5 %, also those a thousand times shorter than others."""
    true = CostCoefficients(g=g, a=a, b=b, k=k, x=x)
    cost = StepCost()
    for step in steps(true, 400, seed=seed):
        cost.observe(step)
    assert worst(cost, true) < 0.05


@pytest.mark.parametrize("true", [GPU, CPU])
def test_noise_averages_out(true: CostCoefficients) -> None:
    """With 8 % noise a step, unseen steps are predicted within 5 %."""
    cost = StepCost()
    for step in steps(true, 1500, noise=0.08):
        cost.observe(step)
    assert worst(cost, true) < 0.05


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 50), st.integers(0, 5000), st.floats(1e-4, 5.0)),
        min_size=1,
        max_size=60,
    )
)
def test_no_coefficient_is_ever_negative(rows: list[tuple[int, int, int, float]]) -> None:
    """Whatever the times, more work never costs less, and every coefficient is a number."""
    cost = StepCost()
    for q, n, K, seconds in rows:
        cost.observe(Step(q=q, n=n, K=K, X=q * q / 2, seconds=seconds))
        mean = cost.mean
        assert all(0 <= c < math.inf for c in (mean.g, mean.a, mean.b, mean.k, mean.x))


@pytest.mark.parametrize("eps", [0.02, 0.05, 0.2])
def test_the_envelope_is_exceeded_as_often_as_it_says(eps: float) -> None:
    """On a stationary stream the share of steps over their envelope is near eps, and `exceeded` counts them."""
    cost, over, judged = StepCost(eps=eps), 0, 0
    for number, step in enumerate(steps(CPU, 3000, noise=0.1)):
        if number >= 600:
            over += step.seconds > cost.envelope(step.q, step.n, step.K, step.X)
            judged += 1
        cost.observe(step)
    assert 0.5 * eps < over / judged < 1.6 * eps
    counted, of = cost.exceeded()
    assert 0.4 * eps < counted / of < 1.8 * eps


def test_a_change_of_the_engine_is_followed() -> None:
    """Steps that become half as long again are predicted within 10 % after four memories."""
    slower = CostCoefficients(g=1.5 * CPU.g, a=1.5 * CPU.a, b=1.5 * CPU.b, k=0.0, x=1.5 * CPU.x)
    cost = StepCost(memory=200)
    for step in steps(CPU, 500, noise=0.05):
        cost.observe(step)
    assert worst(cost, slower) > 0.25
    for step in steps(slower, 800, noise=0.05, seed=1):
        cost.observe(step)
    assert worst(cost, slower) < 0.1


@pytest.mark.parametrize("kept", ["prefill", "decodes"])
def test_what_steps_say_nothing_about_is_not_forgotten(kept: str) -> None:
    """10,000 steps without prefill leave its price as it was, 10,000 without decodes theirs."""
    cost = StepCost()
    for step in steps(CPU, 400, noise=0.05):
        cost.observe(step)
    asked = (500, 0, 0, 500 * 250.0) if kept == "prefill" else (0, 50, 20_000, 0.0)
    before = cost.mean.seconds(*asked)
    rng = random.Random(1)
    for number in range(10_000):
        n = rng.randint(1, 50)
        row = (0, n, 400 * n, 0.0) if kept == "prefill" else (n * 20, 0, 0, n * 20 * 300.0)
        seconds = CPU.seconds(*row) * math.exp(rng.gauss(0.0, 0.05))
        cost.observe(Step(q=row[0], n=row[1], K=row[2], X=row[3], seconds=seconds))
        if number % 1000 == 999:
            assert cost.mean.seconds(*asked) == pytest.approx(before, rel=0.1)


def test_a_slow_minute_is_unlearned() -> None:
    """400 steps that took a quarter more, then as before: 600 steps later the mean is right again."""
    cost = StepCost()
    slow = CostCoefficients(g=1.25 * CPU.g, a=1.25 * CPU.a, b=1.25 * CPU.b, k=0.0, x=1.25 * CPU.x)
    for seed, (true, count) in enumerate(((CPU, 1000), (slow, 400), (CPU, 600))):
        for step in steps(true, count, noise=0.03, seed=seed):
            cost.observe(step)
    assert worst(cost, CPU) < 0.06


def test_the_envelope_widens_when_steps_get_noisier() -> None:
    """The margin is that of the recent steps."""
    cost = StepCost()
    for step in steps(CPU, 500, noise=0.02):
        cost.observe(step)
    calm = cost.factor
    for step in steps(CPU, 700, noise=0.15, seed=1):
        cost.observe(step)
    assert calm < 1.08 < 1.15 < cost.factor


def test_nothing_is_promised_from_too_few_steps() -> None:
    """A fit is ready after twelve steps with prefill; decode-only steps say nothing about prefill."""
    cost = StepCost()
    for _ in range(50):
        cost.observe(Step(q=0, n=4, K=100, X=0, seconds=0.03))
    assert not cost.ready
    for number in range(StepCost.READY_AFTER):
        assert not cost.ready
        cost.observe(Step(q=10 * number + 1, n=4, K=100, X=0, seconds=0.03 + 0.001 * number))
    assert cost.ready


def test_a_saved_profile_is_ready_at_once() -> None:
    """A profile is believed, and predicts what it says."""
    cost = StepCost(GPU)
    assert cost.ready
    assert cost.mean == GPU


def test_stalls_of_the_host_do_not_spoil_the_fit() -> None:
    """One step in fifty that takes thirty times as long moves the prediction by less than 10 %."""
    cost = StepCost()
    for number, step in enumerate(steps(CPU, 1500, noise=0.03)):
        slow = 30.0 if number > 60 and number % 50 == 0 else 1.0
        cost.observe(Step(q=step.q, n=step.n, K=step.K, X=step.X, seconds=slow * step.seconds))
    assert worst(cost, CPU) < 0.1


def test_one_stall_does_not_set_the_envelope() -> None:
    """The margin is a quantile, so a single stall leaves it."""
    cost = StepCost()
    for number, step in enumerate(steps(CPU, 600, noise=0.03)):
        slow = 50.0 if number == 500 else 1.0
        cost.observe(Step(q=step.q, n=step.n, K=step.K, X=step.X, seconds=slow * step.seconds))
    assert cost.factor < 1.15


@given(
    a=st.floats(1e-6, 1e-2),
    x=st.one_of(st.just(0.0), st.floats(1e-12, 1e-5)),
    seconds=st.floats(1e-5, 10.0),
    context=st.integers(0, 100_000),
)
def test_tokens_within_inverts_the_work(a: float, x: float, seconds: float, context: int) -> None:
    """The chunk fits and one token more does not, up to rounding."""
    cost = CostCoefficients(g=0.0, a=a, b=0.0, x=x)
    tokens = cost.tokens_within(seconds, context)
    assert cost.work_s(tokens, context) <= seconds * (1 + 1e-6) + 1e-9 * (a + x * (context + tokens))
    assert cost.work_s(tokens + 1, context) > seconds * (1 - 1e-6)


def test_no_time_carries_no_tokens_and_free_tokens_have_no_limit() -> None:
    """The two ends of `tokens_within`."""
    assert CPU.tokens_within(0.0, 0) == 0
    assert CPU.tokens_within(-1.0, 0) == 0
    assert CostCoefficients(g=1.0, a=0.0, b=0.0).tokens_within(1e-3, 5) > 10**9


def test_same_steps_same_fit() -> None:
    """Two fits of the same steps agree to the last bit."""
    first, second = StepCost(), StepCost()
    for step in steps(CPU, 300, noise=0.1):
        first.observe(step)
        second.observe(step)
    assert first.mean == second.mean
    assert first.factor == second.factor


def test_observe_returns_measured_over_predicted() -> None:
    """The ratio is judged by the fit of before the step."""
    cost = StepCost.fixed(CostCoefficients(g=0.01, a=0.0, b=0.0))
    assert pytest.approx(cost.observe(Step(q=0, n=1, K=10, X=0, seconds=0.03))) == 3.0


@pytest.mark.parametrize("eps", [0.0, 1.0, -0.1, math.nan])
def test_eps_is_a_share(eps: float) -> None:
    """An envelope that is never or always exceeded is not one."""
    with pytest.raises(ValueError, match="eps"):
        StepCost(eps=eps)


def test_a_fixed_cost_has_the_envelope_it_is_given() -> None:
    """For the twin and for tests: known mean, known margin, for steps with and without prefill."""
    cost = StepCost.fixed(GPU, factor=1.5)
    assert cost.ready
    assert 1.5 * GPU.seconds(10, 5, 100, 50) == pytest.approx(cost.envelope(10, 5, 100, 50))
    assert 1.5 * GPU.seconds(0, 5, 100, 0) == pytest.approx(cost.envelope(0, 5, 100, 0))
