"""Skipping steps in which nothing is decided must not change a single bit."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_build import NOISY, make_trace

from headway.replay.targets import Targets
from headway.twin import Profile, Scenario, simulate
from headway.twin.price import Correction

TARGETS = {"default": Targets(ttft_s=0.5, tpot_s=0.05)}


UNEVEN = replace(NOISY, correction=Correction(q_up_to=(0,), n_up_to=(1, 3), factors=((1.0, 0.9, 1.3), (0.8, 1.0, 1.1))))

REQUEST = st.tuples(st.floats(0, 3), st.integers(1, 60), st.integers(1, 60))
SETTINGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fcfs", "edf", "headway", "priority", "sola"]),
        "admission": st.sampled_from(["admit_all", "queue_depth", "response_time", "chronos", "token_bucket"]),
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


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(REQUEST, min_size=1, max_size=25),
    chosen=SETTINGS,
    shared=st.lists(st.integers(0, 2), min_size=25),
    profile=st.sampled_from([NOISY, UNEVEN]),
)
def test_fast_equals_slow(
    rows: list[tuple[float, int, int]], chosen: dict, shared: list[int], profile: Profile
) -> None:
    """With and without skipping, tables and engine facts are equal to the last bit, and nobody is lost."""
    ids = [[10 * prefix + block for block in range(row[1] // 8)] for row, prefix in zip(rows, shared, strict=False)]
    trace = make_trace(rows, ids)
    runs = [
        simulate(trace, Scenario(profile=profile, targets=TARGETS, settings=chosen | {"fast": fast}, seed=3))
        for fast in (True, False)
    ]
    assert runs[0].frame.equals(runs[1].frame)
    left, right = ({k: v for k, v in run.facts.items() if k != "config"} for run in runs)
    assert left == right
    assert runs[0].frame.height == len(rows)
    done = runs[0].frame.filter(pl.col("status") == "ok")
    assert done["generated_tokens"].to_list() == done["max_tokens"].to_list()
    assert done["token_s"].list.len().to_list() == done["generated_tokens"].to_list()
    gaps = done["token_s"].list.diff(null_behavior="drop").explode().drop_nulls()
    assert not len(gaps) or gaps.min() > 0
