"""Small builders of requests, ledgers and views for the tests of decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headway.core import CostCoefficients, DemandWindow, EngineView, KvView, Ledger, RequestState, Slo, StepCost

#: 10 ms a step and 1 ms a prompt token; a decode costs nothing: easy to compute by hand.
PLAIN = CostCoefficients(g=0.010, a=0.001, b=0.0)


def request(
    seq: int,
    *,
    ttft: float | None = 1.0,
    tpot: float | None = None,
    tbt: float | None = None,
    arrival: float = 0.0,
    prompt: int = 100,
    output: int = 10,
    weight: float = 1.0,
    **more: Any,
) -> RequestState:
    """Return request `r<seq>`, without a verdict."""
    slo = Slo(ttft_s=ttft, tpot_s=tpot, tbt_s=tbt, weight=weight)
    return RequestState(
        id=f"r{seq}", seq=seq, slo=slo, arrival_s=arrival, prompt_tokens=prompt, max_output_tokens=output, **more
    )


def pending(ledger: Ledger, *requests: RequestState, promised: bool = True) -> None:
    """Let the requests arrive and be accepted, each promised its deadline unless told otherwise."""
    for one in requests:
        ledger.arrive(one)
        ledger.accept(one, one.due_s if promised else None)


def decoding(ledger: Ledger, *requests: RequestState, first_s: float = 0.0) -> None:
    """Let the requests arrive, be accepted, and produce their first token at `first_s`."""
    pending(ledger, *requests)
    for one in requests:
        ledger.token(one.id, first_s)


def view(
    ledger: Ledger,
    cost: CostCoefficients | StepCost = PLAIN,
    *,
    now: float = 0.0,
    demand: DemandWindow | None = None,
    blocks: int = 100_000,
    free: int | None = None,
    **more: Any,
) -> EngineView:
    """Return a view of a large engine whose cost is exact."""
    settings: dict[str, Any] = {"max_step_tokens": 10_000, "max_running": 1_000, "max_model_len": 10_000, **more}
    return EngineView(
        now_s=now,
        ledger=ledger,
        cost=cost if isinstance(cost, StepCost) else StepCost.fixed(cost),
        demand=demand or DemandWindow(),
        kv=KvView(block_size=16, total_blocks=blocks, free_blocks=blocks if free is None else free),
        **settings,
    )


def ids(requests: Iterable[RequestState]) -> list[str]:
    """Return the ids of the requests, in their order."""
    return [one.id for one in requests]
