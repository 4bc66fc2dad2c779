"""The registry of admission tests and the references without deadlines."""

from __future__ import annotations

import pytest

from _build import decoding, pending, request, view
from headway.admission import REGISTRY, create
from headway.core import Accept, Ledger, Reason, Reject
from headway.errors import InputError


def test_an_unknown_test_lists_the_known_ones() -> None:
    """The message is what a reader needs to mend the flag."""
    known = ", ".join(REGISTRY)
    assert {"admit_all", "queue_depth", "queued_tokens", "response_time"} <= REGISTRY.keys()
    with pytest.raises(InputError, match=f"admission = 'magic': expected one of {known}"):
        create("magic")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("admit_all", {"limit": 5}),
        ("queue_depth", {"depth": 5}),
        ("queue_depth", {"limit": 0}),
        ("queued_tokens", {"limit": -1}),
        ("response_time", {"method": "guess"}),
        ("response_time", {"foresight": 1.5}),
        ("response_time", {"hesitate": -0.1}),
        ("response_time", {"min_chunk": 0}),
    ],
)
def test_a_bad_parameter_is_the_callers_mistake(name: str, parameters: dict) -> None:
    """An unknown name or an impossible value is an InputError that names the test and the parameter."""
    with pytest.raises(InputError, match=f"admission {name}.*{next(iter(parameters))}"):
        create(name, **parameters)


def test_each_test_carries_the_name_it_is_registered_under() -> None:
    """What a log prints is what the flag takes."""
    assert [create(name).name for name in REGISTRY] == list(REGISTRY)


def test_admit_all_promises_nothing() -> None:
    """Whatever is pending, everything is accepted without a bound."""
    ledger = Ledger()
    pending(ledger, *(request(seq, prompt=5000) for seq in range(50)))
    assert create("admit_all").decide(view(ledger), request(99, prompt=9999)) == Accept(bound_s=None)


def test_queue_depth_counts_what_waits_for_its_first_step() -> None:
    """Started prefills and decodes do not count; size, class and deadline do not matter."""
    ledger = Ledger()
    pending(ledger, request(0), request(1), request(2))
    decoding(ledger, request(3))
    ledger.schedule("r0", 10)
    assert isinstance(create("queue_depth", limit=3).decide(view(ledger), request(9)), Accept)
    assert create("queue_depth", limit=2).decide(view(ledger), request(9)) == Reject(reason=Reason.QUEUE_FULL)


def test_queued_tokens_counts_whole_prompts_in_prefill() -> None:
    """Progress is not subtracted and the candidate's own size does not count, as in vLLM's valve."""
    ledger = Ledger()
    pending(ledger, request(0, prompt=300), request(1, prompt=100))
    decoding(ledger, request(2, prompt=900))
    ledger.schedule("r0", 250)
    assert isinstance(create("queued_tokens", limit=401).decide(view(ledger), request(9, prompt=5000)), Accept)
    verdict = create("queued_tokens", limit=400).decide(view(ledger), request(9, prompt=1))
    assert verdict == Reject(reason=Reason.QUEUE_FULL)
