"""Invented runs for the tests of comparison, gate and report: latencies given, everything else filled in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from headway.replay.arms import Arm
from headway.replay.record import SCHEMA
from headway.replay.store import Run


def frame(ttft, tpot=None, *, classes=None, status=None, target_s=1.0, queue_s=None, gap_s=0.1) -> pl.DataFrame:
    """Return the table of a run: one request every `gap_s`, `ttft` in seconds, two output tokens."""
    ttft = np.asarray(ttft, dtype=float)
    n = len(ttft)
    tpot = np.full(n, 0.02) if tpot is None else np.asarray(tpot, dtype=float)
    status = np.array(status if status is not None else ["ok"] * n)
    scheduled = np.arange(n) * gap_s
    ok = status == "ok"
    end = scheduled + np.where(ok, ttft + tpot, 0.001)
    columns = {
        "index": np.arange(n),
        "trace_row": np.arange(n),
        "slo_class": classes if classes is not None else ["chat"] * n,
        "input_tokens": 10 + np.arange(n) % 100,
        "generated_tokens": np.where(ok, 2, 0),
        "status": status,
        "scheduled_s": scheduled,
        "sent_s": scheduled,
        "end_s": end,
        "first_token_s": scheduled + ttft,
        "last_token_s": scheduled + ttft + tpot,
        "ttft_s": ttft,
        "service_ttft_s": ttft,
        "tpot_s": tpot,
        "tbt_max_s": tpot,
        "e2e_s": ttft + tpot,
        "ttft_target_s": np.full(n, target_s),
        "attained": ok & (ttft <= target_s),
    }
    if queue_s is not None:
        columns["queue_s"] = queue_s
    served = ("first_token_s", "last_token_s", "ttft_s", "service_ttft_s", "tpot_s", "tbt_max_s", "e2e_s")
    made = pl.DataFrame(columns)
    made = made.with_columns(pl.when(pl.col("status") == "ok").then(pl.col(name)).alias(name) for name in served)
    return made.select(
        (pl.col(name) if name in made.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SCHEMA.items()
    )


def run(table: pl.DataFrame, name="run", *, seed=0, sha="a" * 64, selection="all", **meta) -> Run:
    """Return a finished, valid run of `table`."""
    known = {
        "state": "finished", "valid": True, "seed": seed, "trace": {"sha256": sha, "selection": selection}, **meta
    }  # fmt: skip
    return Run(path=Path(name), meta=known, frame=table)


def arm(name, *runs) -> Arm:
    """Return an arm."""
    return Arm(name=name, runs=tuple(runs))


def noisy(seed, n=600, *, slower=1.0, **options) -> pl.DataFrame:
    """Return a run whose TTFT is exponential (mean 100 ms) and TPOT gamma (mean 20 ms), both independent."""
    rng = np.random.default_rng(seed)
    return frame(rng.exponential(0.1, n) * slower, rng.gamma(25, 0.02 / 25, n) * slower, **options)
