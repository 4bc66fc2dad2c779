"""The registry of policies and the references."""

from __future__ import annotations

import pytest

from _build import pending, request, view
from _loop import Arrival, Loop
from headway.admission import create as create_admission
from headway.core import CostCoefficients, Ledger, Phase, Slo
from headway.errors import InputError
from headway.policies import REGISTRY, create

COST = CostCoefficients(g=0.010, a=0.001, b=0.0005)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    """The message is what a reader needs to mend the flag."""
    with pytest.raises(InputError, match=f"policy = 'fifo': expected one of {', '.join(REGISTRY)}"):
        create("fifo")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("headway", {"minchunk": 5}), ("fcfs", {"window": 5}), ("headway", {"min_chunk": 0}), ("headway", {"window": 0})],
)
def test_a_bad_parameter_is_the_callers_mistake(name: str, parameters: dict) -> None:
    """An unknown name or an impossible value is an InputError that names the policy and the parameter."""
    with pytest.raises(InputError, match=f"policy {name}.*{next(iter(parameters))}"):
        create(name, **parameters)


def test_each_policy_carries_the_name_it_is_registered_under() -> None:
    """What a log prints is what the flag takes."""
    assert [create(name).name for name in REGISTRY] == list(REGISTRY)


def test_fcfs_leaves_everything_to_the_engine() -> None:
    """The whole budget, no chunks, no order, nobody held: a run of it is a run of stock vLLM."""
    ledger = Ledger()
    pending(ledger, request(0), request(1, ttft=0.1))
    plan = create("fcfs").plan(view(ledger, COST, max_step_tokens=512))
    assert (plan.token_budget, plan.open_chunks, plan.starts) == (512, True, None)
    assert (dict(plan.chunks), plan.held, plan.victims, plan.draft_length) == ({}, frozenset(), (), None)


def test_edf_goes_by_deadline() -> None:
    """The later arrival with the tighter target goes first, ties by sequence number."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=5.0), request(1, ttft=1.0), request(2, ttft=1.0))
    plan = create("edf").plan(view(ledger, COST, max_step_tokens=250))
    assert plan.starts == ("r1", "r2", "r0")
    assert dict(plan.chunks) == {"r1": 100, "r2": 100, "r0": 50}
    assert plan.token_budget == 250


def test_priority_goes_by_priority_then_weight_then_arrival() -> None:
    """A smaller number first, as in vLLM; within it the heavier class; within that the earlier arrival."""
    ledger = Ledger()
    pending(
        ledger,
        request(0, priority=1, weight=9.0),
        request(1, weight=1.0),
        request(2, weight=5.0),
        request(3, weight=5.0),
        request(4, priority=-1),
    )
    assert create("priority").plan(view(ledger, COST)).starts == ("r4", "r2", "r3", "r1", "r0")


@pytest.mark.parametrize("name", ["edf", "priority", "headway"])
def test_no_more_start_than_there_are_slots(name: str) -> None:
    """Two slots, one of them taken by a prefill that waits behind the others: one starts and the taken one goes on."""
    ledger = Ledger()
    pending(ledger, request(0, ttft=9.0, priority=9), request(1), request(2))
    ledger.schedule("r0", 50)
    plan = create(name).plan(view(ledger, COST, max_running=2, blocking_s=10.0))
    assert plan.starts == ("r1",)
    assert set(plan.chunks) == {"r0", "r1"}


@pytest.mark.parametrize("name", ["edf", "priority", "headway"])
def test_a_step_never_exceeds_the_engines_budget(name: str) -> None:
    """Decodes and chunks together stay within max_num_batched_tokens."""
    ledger = Ledger()
    pending(ledger, *(request(seq) for seq in range(8)))
    for seq in range(5):
        ledger.token(f"r{seq}", 0.0)
    plan = create(name).plan(view(ledger, COST, max_step_tokens=120, blocking_s=10.0))
    assert sum(plan.chunks.values()) + 5 == plan.token_budget == 120


def served(name: str, arrivals: list[Arrival]) -> list[str]:
    """Return the order of first tokens under a policy, everything admitted."""
    loop = Loop(coefficients=COST, policy=create(name), admission=create_admission("admit_all"), check=True)
    loop.run(arrivals)
    return loop.order


def test_each_policy_decides_differently_on_the_same_load() -> None:
    """Arrival order, static weights and deadlines each serve another request first.

    0 came first; 1 is the heavy class without hurry; 2 is due first. The prompts need two steps each, so the order of
    the first tokens is that of the decisions.
    """
    heavy, urgent = Slo(ttft_s=60.0, weight=9.0), Slo(ttft_s=2.0)
    arrivals = [
        Arrival(at_s=0.0, prompt=1500, output=1, slo=Slo(ttft_s=30.0)),
        Arrival(at_s=0.0, prompt=1500, output=1, slo=heavy),
        Arrival(at_s=0.0, prompt=1500, output=1, slo=urgent),
    ]
    assert served("fcfs", arrivals) == ["0", "1", "2"]
    assert served("priority", arrivals) == ["1", "0", "2"]
    assert served("edf", arrivals) == ["2", "0", "1"]
    assert served("headway", arrivals) == ["2", "0", "1"]


def attained(name: str, arrivals: list[Arrival]) -> int:
    """Return how many requests met their targets under a policy, everything admitted."""
    loop = Loop(coefficients=COST, policy=create(name), admission=create_admission("admit_all"))
    return sum(not outcome.misses() for outcome in loop.run(arrivals))


def test_headway_keeps_what_the_references_break() -> None:
    """Streams of a 60 ms pace beside long prompts: whole-budget steps of two seconds break every stream.

    Eight chats start at once; from 0.3 s on a document of 1,500 tokens comes each 2 s and may wait for 8 s.
    """
    chat, document = Slo(ttft_s=0.6, tpot_s=0.06, weight=5.0), Slo(ttft_s=8.0, tpot_s=0.2)
    arrivals = [Arrival(at_s=0.0, prompt=40, output=60, slo=chat) for _ in range(8)]
    arrivals += [Arrival(at_s=0.3 + 2.0 * number, prompt=1500, output=5, slo=document) for number in range(2)]
    found = {name: attained(name, arrivals) for name in ("fcfs", "priority", "edf", "headway")}
    assert found["headway"] == 10
    assert max(found["fcfs"], found["priority"], found["edf"]) <= 4


def test_a_started_prefill_holds_its_slot_and_a_waiting_one_does_not() -> None:
    """The count that the slot limit rests on."""
    ledger = Ledger()
    pending(ledger, request(0), request(1))
    assert ledger.prefilling == 0
    ledger.schedule("r0", 10)
    assert (ledger.prefilling, ledger.requests["r0"].phase) == (1, Phase.PREFILL)
    ledger.preempt("r0")
    assert ledger.prefilling == 0
