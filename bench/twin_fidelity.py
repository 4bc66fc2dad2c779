"""How near the twin comes to real engines, on load that it was not fitted to.

1. A real vLLM 0.19 run on an RTX 4090 (LLMServingSim's measured run, `--traces`; no step log): the step cost is fitted
   to the request timings of the first half of the requests, the second half is predicted.
2. Real vLLM on this machine: stock behaviour (policy fcfs, nothing refused) and Headway. The cost is fitted to the
   engine's step log of one load; other loads with another seed, at 0.5, 1 and 2 times capacity, are predicted.

Errors: P50 and P99 of TTFT and TPOT relative to the real value; attainment and refusals as absolute shares.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.optimize import minimize

from _report import arguments, finish, folder
from headway.core import CostCoefficients, Slo
from headway.replay.summary import summarise
from headway.trace import SCHEMA, ReadReport, Trace
from headway.twin import Profile, Scenario, find_profile, simulate
from headway.twin.calibration import calibrate, read_steps
from headway.twin.profile import TwinError

QUANTILES = {"p50": 0.50, "p99": 0.99}


def errors(real: pl.DataFrame, twin: pl.DataFrame) -> dict[str, float]:
    """Return metric -> error; served requests for percentiles, all offered ones for shares."""
    left, right = (summarise(frame)["total"] for frame in (real, twin))
    found = {}
    for metric in ("ttft", "tpot"):
        for name in QUANTILES:
            a, b = left[metric][f"{name}_s"], right[metric][f"{name}_s"]
            if a and b:
                found[f"{metric}_{name}"] = round(abs(b / a - 1.0), 4)
    found["attainment"] = round(abs(left["attainment"] - right["attainment"]), 4)
    found["refused"] = round(abs(left["refused"] / left["n"] - right["refused"] / right["n"]), 4)
    return found


# The RTX 4090 run


def measured_run(root: Path) -> tuple[Trace, pl.DataFrame, dict[str, Any]] | None:
    """Return the workload, its measured TTFT and TPOT in order of arrival, and the engine's settings."""
    found = sorted(root.rglob("RTX4090__Llama-3.1-8B__vllm__requests.jsonl"))
    work = sorted(root.rglob("sharegpt-llama-3.1-8b-300-sps10.lengths.jsonl"))
    if not found or not work:
        return None
    engine = json.loads((found[0].parent / found[0].name.replace("requests.jsonl", "meta.json")).read_text())
    rows = [json.loads(line) for line in found[0].read_text().splitlines()]
    ids = [json.loads(line)["hash_ids"] for line in work[0].read_text().splitlines()]
    for row in rows:  # "bench-17" is row 17 of the workload
        row["hash_ids"] = ids[int(row["request_id"].rsplit("-", 1)[1])]
    rows.sort(key=lambda row: row["queued_ts"])
    frame = pl.DataFrame(
        {
            # The engine's own clock: arrival_time is on another one.
            "arrival_s": [row["queued_ts"] - rows[0]["queued_ts"] for row in rows],
            "input_tokens": [row["input_toks"] for row in rows],
            "output_tokens": [row["output_toks"] for row in rows],
            "hash_ids": [row["hash_ids"] for row in rows],
        }
    )
    missing = [pl.lit(None, dtype=dtype).alias(name) for name, dtype in SCHEMA.items() if name not in frame.columns]
    frame = frame.with_columns(missing).select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    trace = Trace(
        frame=frame,
        format="llmservingsim",
        source=work[0].name,
        sha256="0" * 64,
        report=ReadReport(read=len(rows), kept=len(rows)),
        block_size=16,
    )
    truth = pl.DataFrame(
        {
            "ttft_s": [row["first_token_ts"] - row["queued_ts"] for row in rows],
            "tpot_s": [(row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1) for row in rows],
        }
    )
    settings = engine["engine_kwargs"]
    return trace, truth, {
        "token_budget": settings["max_num_batched_tokens"],
        "max_running": settings["max_num_seqs"],
        "max_model_len": settings["max_model_len"],
        "block_size": engine["kv_cache"]["block_size"],
        "kv_blocks": engine["kv_cache"]["num_gpu_blocks"] - 1,  # vLLM keeps one empty block
        "prefix_cache": engine["kv_cache"]["enable_prefix_caching"],
        "async_lag": engine["resolved_config"]["scheduler_config"]["async_scheduling"],
    }  # fmt: skip


def rtx4090(root: Path, *, evaluations: int) -> dict[str, Any] | None:
    """Fit on the first half of the requests, predict the second; return errors and coefficients."""
    read = measured_run(root)
    if read is None:
        print(f"skipped: no RTX 4090 run under {root}")
        return None
    trace, truth, engine = read
    half = len(trace) // 2
    start = find_profile("estimated:rtx4090/llama-3.1-8b").cost

    def predicted(steps: np.ndarray) -> pl.DataFrame:
        g, a, k, b = np.exp(steps)
        cost = CostCoefficients(g=start.g * g, a=start.a * a, b=start.b * b, k=start.k * k, x=start.x)
        profile = Profile(name="rtx4090", label="measured", cost=cost, engine=engine)
        settings = {"policy": "fcfs", "admission": "admit_all"}
        return simulate(trace, Scenario(profile=profile, settings=settings)).frame

    def loss(steps: np.ndarray) -> float:
        seen, real = predicted(steps).head(half), truth.head(half)
        ttft = ((seen["ttft_s"] - real["ttft_s"]).abs() / (real["ttft_s"] + 1.0)).mean()
        tpot = (seen["tpot_s"] / real["tpot_s"] - 1.0).abs().mean()
        return float(ttft) + 2.0 * float(tpot)  # type: ignore[arg-type]

    simplex = np.array([[0, 0, 0, 0], [0.15, 0, 0, 0], [0, -0.3, 0, 0], [0, 0, -0.3, 0], [0, 0, 0, 0.5]])
    options = {"maxfev": evaluations, "initial_simplex": simplex, "xatol": 0.003, "fatol": 0.0005}
    best = minimize(loss, np.zeros(4), method="Nelder-Mead", options=options)
    seen = predicted(best.x)
    report: dict[str, Any] = {"loss_first_half": round(float(best.fun), 4), "requests": len(trace)}
    for name, rows in (("first_half", slice(0, half)), ("second_half", slice(half, len(trace)))):
        part = {}
        for metric in ("ttft_s", "tpot_s"):
            for label, q in (*QUANTILES.items(), ("p90", 0.90)):
                real, twin = (float(np.quantile(frame[metric].to_numpy()[rows], q)) for frame in (truth, seen))
                part[f"{metric[:-2]}_{label}"] = {
                    "real_s": round(real, 4),
                    "twin_s": round(twin, 4),
                    "error": round(abs(twin / real - 1.0), 4),
                }
        report[name] = part
    report["error"] = max(each["error"] for each in report["second_half"].values())
    return report


# Real vLLM on this machine


def engine_facts(metrics: str) -> dict[str, Any]:
    """Return what the server tells about its KV pool."""
    line = next(line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info"))
    number = lambda key: int(re.search(rf'{key}="(\d+)"', line)[1])  # type: ignore[index] # noqa: E731
    caching = 'enable_prefix_caching="True"' in line
    return {"kv_blocks": number("num_gpu_blocks") - 1, "block_size": number("block_size"), "prefix_cache": caching}


def on_vllm(out: Path, *, model: str | None, quick: bool) -> dict[str, Any]:
    """Calibrate on one load, predict others; return errors by system and load."""
    from headway.demo.arena import Arena
    from headway.demo.capacity import measure
    from headway.demo.systems import System, headway, no_op, stock
    from headway.demo.workload import MIXED, WEIGHTS, Workload
    from headway.engine.vllm.launch import EMBEDDED_MAX_MODEL_LEN

    workload = Workload(kind="mixed")
    duration = 30.0 if quick else 90.0
    report: dict[str, Any] = {"loads": {}}
    plain = {name: Slo(name=name, **each.as_dict()) for name, each in MIXED.items()}
    weighted = {name: replace(slo, weight=WEIGHTS[name]) for name, slo in plain.items()}
    systems: list[tuple[System, Mapping[str, Slo], dict[str, Any]]] = [
        (no_op(), plain, {"policy": "fcfs", "admission": "admit_all"}),
        (headway(MIXED, WEIGHTS), weighted, {"policy": "headway", "admission": "response_time"}),
    ]
    with Arena(out, model=model, say=print) as arena:
        base = stock()
        arena.start(base)
        capacity, _ = measure(arena, base, workload, n=60 if quick else 120)
        arena.stop(base)
        report["capacity_req_s"] = round(capacity, 3)
        for system, slos, settings in systems:
            log = out / f"{system.name}.steps.jsonl"
            os.environ["HEADWAY_STEP_LOG"] = str(log)
            arena.start(system)
            facts = engine_facts(arena.metrics(system))
            engine = {**facts, "token_budget": 2048, "max_running": 256, "max_model_len": EMBEDDED_MAX_MODEL_LEN}

            def play(load: float, seed: int, label: str, system: System = system) -> tuple[Trace, pl.DataFrame]:
                trace = workload.offered(rate=load * capacity, seed=seed, duration_s=duration)
                run = arena.run(system, trace, workload.targets, seed=seed, label=label, grace_s=600.0)
                return trace, run.frame

            # Fit: one load below and one above capacity, so that the log holds small and large batches.
            trained = [play(load, 900, f"{system.name}-fit-{load:g}x") for load in (0.7, 1.3)]
            profile = calibrate(read_steps(log), name=system.name, engine=engine, note=f"vLLM, {system.title}")
            profile = with_front(profile, trained, settings, slos)
            entries = []
            for load in (0.5, 1.0, 2.0):
                trace, real = play(load, 901, f"{system.name}-{load:g}x")
                outcome = simulate(trace, Scenario(profile=profile, slos=slos, settings=settings, seed=1))
                found = errors(real, outcome.frame)
                report["loads"][f"{system.name} {load:g}x"] = found
                print(f"{system.name} {load:g}x: {found}", flush=True)
                busy = float(outcome.facts["busy_share"])
                entries.append(TwinError(load=f"{load:g}x", busy_max=round(busy, 3), errors=found))
            entries[-1] = replace(entries[-1], busy_max=1.0)
            replace(profile, twin_error=tuple(entries)).save(out / f"{system.name}.profile.toml")
            arena.stop(system)
    return report


def with_front(
    profile: Profile, runs: list[tuple[Trace, pl.DataFrame]], settings: dict[str, Any], slos: Mapping[str, Slo]
) -> Profile:
    """Return the profile with the time outside the engine: the median by which real first tokens come later."""
    late: list[float] = []
    for trace, real in runs[:1]:
        twin = simulate(trace, Scenario(profile=profile, slos=slos, settings=settings)).frame
        both = real.filter(pl.col("status") == "ok").join(
            twin.filter(pl.col("status") == "ok").select("index", twin_ttft_s="ttft_s"), on="index"
        )
        late += (both["ttft_s"] - both["twin_ttft_s"]).to_list()
    front = max(0.0, float(np.median(late))) if late else 0.0
    return replace(profile, engine={**profile.engine, "front_s": round(front, 5)})


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the RTX 4090 run")
    parser.add_argument("--skip-engine", action="store_true", help="only the RTX 4090 run, which needs no vLLM")
    options = parser.parse_args()
    out = folder("twin-fidelity", options.out)
    gpu = rtx4090(options.traces, evaluations=60 if options.quick else 160)
    here = None if options.skip_engine else on_vllm(out, model=options.model, quick=options.quick)
    result: dict[str, Any] = {"worst_p50_error": None, "worst_p99_error": None}
    if here is not None:
        found = list(here["loads"].values())
        worst = lambda names: max(each.get(name, 0.0) for each in found for name in names)  # noqa: E731
        result["worst_p50_error"] = worst(("ttft_p50", "tpot_p50", "attainment", "refused"))
        result["worst_p99_error"] = worst(("ttft_p99", "tpot_p99"))
    result["rtx4090_error"] = None if gpu is None else gpu["error"]
    if gpu is not None:
        for name, each in gpu["second_half"].items():
            print(
                f"RTX 4090, second half, {name}: real {each['real_s']} s, twin {each['twin_s']} s, {each['error']:.2%}"
            )
    finish("twin_fidelity", result, {"rtx4090": gpu, "engine": here}, quick=options.quick or options.skip_engine)


if __name__ == "__main__":
    main()
