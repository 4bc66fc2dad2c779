"""Invented traces and profiles for the tests of the twin."""

from __future__ import annotations

import polars as pl

from headway.core import CostCoefficients
from headway.replay.targets import Targets
from headway.trace.record import SCHEMA, ReadReport, Trace
from headway.twin import NoiseModel, Outcome, Profile, Scenario, simulate

#: One second a step, a tenth of a second a prompt token: sums that fit in the head.
SIMPLE = Profile(
    name="simple", label="measured", cost=CostCoefficients(g=1.0, a=0.1, b=0.0), engine={"token_budget": 10}
)

NOISY = Profile(
    name="noisy",
    label="measured",
    cost=CostCoefficients(g=0.01, a=0.001, b=0.0005, k=1e-6, x=1e-6),
    noise=NoiseModel(sigma=0.05, stall_share=0.05),
)


def make_trace(rows: list[tuple[float, int, int]], ids: list[list[int]] | None = None, *, block: int = 8) -> Trace:
    """Return a trace of (arrival, input, output) rows, with prefix blocks of `block` tokens where `ids` are given."""
    frame = pl.DataFrame(
        {
            "arrival_s": [row[0] for row in rows],
            "input_tokens": [row[1] for row in rows],
            "output_tokens": [row[2] for row in rows],
            "hash_ids": ids if ids is not None else [None] * len(rows),
        },
        schema={key: SCHEMA[key] for key in ("arrival_s", "input_tokens", "output_tokens", "hash_ids")},
    )
    frame = frame.with_columns(pl.lit(None, dtype=d).alias(n) for n, d in SCHEMA.items() if n not in frame.columns)
    return Trace(
        frame=frame.select(list(SCHEMA)).sort("arrival_s"),
        format="invented",
        source="invented",
        sha256="0" * 64,
        report=ReadReport(read=len(rows), kept=len(rows)),
        block_size=block if ids is not None else None,
    )


def run(rows: list[tuple[float, int, int]], profile: Profile = SIMPLE, **settings: object) -> Outcome:
    """Simulate rows under stock behaviour unless `settings` say otherwise."""
    ids = settings.pop("ids", None)
    block = settings.pop("ids_block", 8)
    targets = settings.pop("targets", {"default": Targets(ttft_s=100.0)})
    on_step = settings.pop("on_step", None)
    chosen = {"policy": "fcfs", "admission": "admit_all"} | settings
    scenario = Scenario(profile=profile, targets=targets, settings=chosen)  # type: ignore[arg-type]
    trace = make_trace(rows, ids, block=block)  # type: ignore[arg-type]
    return simulate(trace, scenario, on_step=on_step)  # type: ignore[arg-type]
