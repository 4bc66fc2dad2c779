"""Token bucket, Chronos' closed form and the clairvoyant: the references of the tournament."""

from __future__ import annotations

import pytest

from _build import PLAIN, pending, request, view
from headway.admission import create
from headway.core import Accept, Ledger, Reject, StepCost
from headway.errors import InputError


def test_bucket_fills_at_its_rate() -> None:
    """100 tokens at once, then 10 a second: a second prompt of 100 passes after 10 s, and is told so."""
    test, ledger = create("token_bucket", rate=10.0, burst=100.0), Ledger()
    assert isinstance(test.decide(view(ledger), request(0, prompt=100)), Accept)
    refused = test.decide(view(ledger, now=4.0), request(1, prompt=100))
    assert isinstance(refused, Reject)
    assert refused.retry_after_s == 6.0
    assert isinstance(test.decide(view(ledger, now=10.0), request(2, prompt=100)), Accept)


def test_prompt_larger_than_the_bucket_leaves_a_debt() -> None:
    """It passes when the bucket is full; nothing passes until the debt is paid."""
    test, ledger = create("token_bucket", rate=10.0, burst=100.0), Ledger()
    assert isinstance(test.decide(view(ledger), request(0, prompt=150)), Accept)
    assert isinstance(test.decide(view(ledger, now=5.0), request(1, prompt=1)), Reject)
    assert isinstance(test.decide(view(ledger, now=5.2), request(2, prompt=1)), Accept)


def test_chronos_knows_rates_only() -> None:
    """rho = 0.3 passes (0.3 / 0.7 + 0.3 <= 1), rho = 0.6 does not with an empty queue; a look ahead accepts it."""
    test, ledger = create("chronos", window_s=1.0), Ledger()
    seen = view(ledger, PLAIN, blocking_s=0.1)
    # 240 tokens at 90 tokens a step of 0.1 s: three steps.
    verdicts = [test.decide(seen, request(i, prompt=240, ttft=1.0)) for i in range(3)]
    assert [Accept, Accept, Reject] == [type(each) for each in verdicts]
    assert pytest.approx(verdicts[1].bound_s) == 0.3 / 0.7 + 0.3
    assert isinstance(create("response_time").decide(seen, request(3, prompt=240, ttft=1.0)), Accept)


def test_clairvoyant_keeps_no_margin() -> None:
    """What the envelope of the same cost refuses by a little, the mean accepts."""
    ledger, cost = Ledger(), StepCost.fixed(PLAIN, factor=1.25)
    pending(ledger, request(0, prompt=600, ttft=1.0))
    asked = request(1, prompt=200, ttft=1.0)
    seen = view(ledger, cost, blocking_s=0.1)
    verdicts = [create(name, foresight=0).decide(seen, asked) for name in ("response_time", "clairvoyant")]
    assert [Reject, Accept] == [type(each) for each in verdicts]


PARAMETERS = [("token_bucket", "rate"), ("token_bucket", "burst"), ("chronos", "window_s")]


@pytest.mark.parametrize(("name", "key"), PARAMETERS)
def test_parameters_are_checked(name: str, key: str) -> None:
    """Zero is refused by name."""
    with pytest.raises(InputError, match=key):
        create(name, **{key: 0.0})
