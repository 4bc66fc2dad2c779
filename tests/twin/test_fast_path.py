"""Skipping steps in which nothing is decided must not change a single bit."""

from __future__ import annotations

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core import CostCoefficients
from headway.replay.targets import Targets
from headway.trace.record import SCHEMA, ReadReport, Trace
from headway.twin import NoiseModel, Profile, Scenario, simulate

PROFILE = Profile(
    name="invented",
    label="measured",
    cost=CostCoefficients(g=0.01, a=0.001, b=0.0005, k=1e-6, x=1e-6),
    noise=NoiseModel(sigma=0.05, stall_share=0.05),
)
TARGETS = {"default": Targets(ttft_s=0.5, tpot_s=0.05)}


def make_trace(rows: list[tuple[float, int, int]], ids: list[list[int]] | None = None) -> Trace:
    """Return a trace of (arrival, input, output) rows, with prefix blocks of 8 tokens where `ids` are given."""
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
        block_size=8 if ids is not None else None,
    )


REQUEST = st.tuples(st.floats(0, 3), st.integers(1, 60), st.integers(1, 60))
SETTINGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fcfs", "edf", "headway", "priority"]),
        "admission": st.sampled_from(["admit_all", "queue_depth", "response_time"]),
        "token_budget": st.sampled_from([16, 48, 256]),
        "max_running": st.sampled_from([2, 8, 64]),
        "kv_blocks": st.sampled_from([16, 32, 200]),
        "block_size": st.sampled_from([8, 16]),
        "async_lag": st.booleans(),
        "prefix_cache": st.booleans(),
        "learn": st.booleans(),
        "replicas": st.sampled_from([1, 1, 2]),
        "router": st.sampled_from(["round_robin", "least_work", "deadline"]),
    }
)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(REQUEST, min_size=1, max_size=25), chosen=SETTINGS, shared=st.lists(st.integers(0, 2), min_size=25)
)
def test_fast_equals_slow(rows: list[tuple[float, int, int]], chosen: dict, shared: list[int]) -> None:
    """With and without skipping, tables and engine facts are equal to the last bit, and nobody is lost."""
    ids = [[10 * prefix + block for block in range(row[1] // 8)] for row, prefix in zip(rows, shared, strict=False)]
    trace = make_trace(rows, ids)
    runs = [
        simulate(trace, Scenario(profile=PROFILE, targets=TARGETS, settings=chosen | {"fast": fast}, seed=3))
        for fast in (True, False)
    ]
    assert runs[0].frame.equals(runs[1].frame)
    left, right = ({k: v for k, v in run.facts.items() if k != "config"} for run in runs)
    assert left == right
    assert runs[0].frame.height == len(rows)
    done = runs[0].frame.filter(pl.col("status") == "ok")
    assert done["generated_tokens"].to_list() == done["max_tokens"].to_list()
    assert done["token_s"].list.len().to_list() == done["generated_tokens"].to_list()
    assert done["token_s"].list.diff(null_behavior="drop").list.min().fill_null(1.0).min() is None or (
        done["token_s"].list.diff(null_behavior="drop").list.min().fill_null(1.0).min() > 0
    )
