"""One tenant floods its class: what the other one gets, with the real driver and admission test on the scripted engine.

Poisson arrivals for 25 s, log-normal lengths, 10 ms a step, 0.5 ms a prompt token and 0.5 ms a decode: prompts of 200
tokens and answers of 30 come at about eight a second at most.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from headway.config import Config
from headway.core import CostCoefficients
from headway.engine.fake import FakeEngine

TRUE = CostCoefficients(g=0.010, a=0.0005, b=0.0005)


class Flow(NamedTuple):
    """Requests of one tenant: a second, tokens of prompt and answer (medians)."""

    tenant: str
    rate: float
    prompt: int
    output: int


class Got(NamedTuple):
    """What a tenant got: share of its requests accepted, work of those in seconds, and reasons of refusals."""

    accepted: float
    work_s: float
    reasons: set[str]


def served(*flows: Flow, weight: float = 1.0, fair: bool = True) -> dict[str, Got]:
    """Serve the flows beside each other; return what each tenant got. Nobody who was promised missed."""
    chat = {"ttft_ms": 1000, "tpot_ms": 60}
    named = {"flood": {"keys_sha256": ["0" * 64], "weight": weight}}
    settings = {"front_ms": 0, "default_class": "chat", "fair_share": fair, "class": {"chat": chat}, "tenant": named}
    fake = FakeEngine(Config.model_validate(settings), coefficients=TRUE, max_step_tokens=2048, max_running=256)
    rows = []
    for flow in flows:
        rng, at = random.Random(flow.tenant), 0.0
        while (at := at + rng.expovariate(flow.rate)) < 25.0:
            sizes = [max(2, int(size * rng.lognormvariate(0, 0.5))) for size in (flow.prompt, flow.output)]
            rows.append((at, *sizes, flow.tenant))
    rows.sort()
    coming = 0
    while coming < len(rows) or fake._live:
        if not fake._live:
            fake.now_s = max(fake.now_s, rows[coming][0])
        while coming < len(rows) and rows[coming][0] <= fake.now_s:
            at, prompt, output, tenant = rows[coming]
            fake.add(str(coming), prompt_tokens=prompt, output_tokens=output, tenant=tenant, arrival_unix_s=at)
            coming += 1
        fake.step()
    promised = [m for m in fake.messages if m["kind"] == "done" and m["promised"]]
    late = [m for m in promised if m["ttft_s"] > 1.0 + 1e-9 or (m["tpot_s"] or 0.0) > 0.06 + 1e-9]
    assert len(late) <= 0.01 * len(promised)
    found = {}
    for flow in flows:
        mine = {str(i): row for i, row in enumerate(rows) if row[3] == flow.tenant}
        about = [m for m in fake.messages if m.get("group") in mine]
        accepted = [mine[m["group"]] for m in about if m["kind"] == "accepted"]
        work = sum(prompt * TRUE.a + output * TRUE.b for _, prompt, output, _ in accepted)
        found[flow.tenant] = Got(
            len(accepted) / len(mine), work, {m["reason"] for m in about if m["kind"] == "refused"}
        )
    return found


@pytest.mark.parametrize(
    ("quiet", "flood", "within"),
    [
        (Flow("quiet", 2, 200, 30), Flow("flood", 40, 200, 30), 0.04),  # the same kind of requests
        (Flow("quiet", 4, 80, 20), Flow("flood", 20, 600, 30), 0.02),  # the flood's are larger
        (Flow("quiet", 2, 40, 200), Flow("flood", 40, 40, 200), 0.02),  # decodes are what is scarce
        (Flow("quiet", 1.5, 300, 30), Flow("flood", 60, 60, 20), 0.15),  # smaller and so more valuable to admit
    ],
)
def test_a_flood_takes_nobody_elses_admission(quiet: Flow, flood: Flow, within: float) -> None:
    """A tenant that needs less than its share is accepted as if it were alone, and the flood has what is left."""
    alone = served(quiet)["quiet"]
    both = served(quiet, flood)
    assert both["quiet"].accepted >= alone.accepted - within
    assert "tenant_share" in both["flood"].reasons
    assert both["flood"].work_s > 0.6 * served(flood)["flood"].work_s - both["quiet"].work_s


def test_without_fair_share_the_flood_takes_most() -> None:
    """What the setting is for: the same load without it."""
    found = served(Flow("quiet", 2, 200, 30), Flow("flood", 40, 200, 30), fair=False)
    assert found["quiet"].accepted < 0.6
    assert "tenant_share" not in found["flood"].reasons


def test_two_floods_divide_by_weight() -> None:
    """Equal weights: equal work; weight 2 for one: about twice the other's."""
    for weight in (1.0, 2.0):
        found = served(Flow("quiet", 20, 200, 30), Flow("flood", 40, 200, 30), weight=weight)
        assert found["flood"].work_s / found["quiet"].work_s == pytest.approx(weight, rel=0.2)


def test_one_tenant_alone_is_not_limited() -> None:
    """The same verdicts with and without the setting."""
    flood = Flow("flood", 40, 200, 30)
    assert served(flood) == served(flood, fair=False)
