"""How near the twin comes to real engines, on load that it was not fitted to.

1. A real vLLM 0.19 run on an RTX 4090 (LLMServingSim's measured run, `--traces`; no step log): the step cost is fitted
   to the request timings of the first half of the requests, the second half is predicted.
2. Real vLLM on this machine (_fidelity.py): stock behaviour (policy fcfs, nothing refused) and Headway. The cost is
   fitted to the engine's step log of two loads; other seeds at 0.5, 1 and 2 times capacity are predicted. The same
   requests a second time count too, and show how far the real system differs from itself; those of a twin told how fast
   the machine was in each run show what is not the machine's. Then step by step: the arrivals in the log through the
   twin on the clock of the real steps.

Errors: P50 and P99 of TTFT and TPOT relative to the real value; attainment and refusals as absolute shares.
`--out FOLDER` of an earlier run with other `--systems` adds to it; `--judge FOLDER ...` pools what lies there, at the
commit that was measured: the decisions are held against those of the code that runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.optimize import minimize

import _fidelity
from _fidelity_runs import LOADS, measure
from _report import RESULTS, arguments, finish, folder
from headway.core import CostCoefficients
from headway.trace import SCHEMA, ReadReport, Trace
from headway.twin import Profile, Scenario, find_profile, simulate

QUANTILES = {"p50": 0.50, "p99": 0.99}


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


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the RTX 4090 run")
    parser.add_argument("--skip-engine", action="store_true", help="only the RTX 4090 run, which needs no vLLM")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="FOLDER", help="pool the runs there, play none")
    parser.add_argument("--seed", type=int, default=900, help="of the fitted runs; held-out ones have the next")
    # From ten on a held-out run would have the seed of a fitted one.
    parser.add_argument(
        "--seeds", type=int, choices=range(1, 10), default=5, help="held-out runs of each load (--quick: 1)"
    )
    parser.add_argument("--twice", type=int, default=5, help="how many runs of a load are played a second time")
    parser.add_argument(
        "--again", type=float, nargs="*", choices=LOADS, default=LOADS, help="loads at which they are (default: all)"
    )
    parser.add_argument(
        "--loads", type=float, nargs="+", choices=LOADS, default=LOADS, help="of the held-out runs (default: all)"
    )
    parser.add_argument("--systems", default="", help="of no-op, headway (default: both; with --quick: headway)")
    parser.add_argument(
        "--capacity", type=float, default=None, help="requests/s (default: measured; --quick: recorded)"
    )
    options = parser.parse_args()
    out = folder("twin-fidelity", options.out)
    gpu = rtx4090(options.traces, evaluations=60 if options.quick else 160)
    here = None
    if not options.skip_engine:
        if not options.judge:
            systems = (
                options.systems.split(",")
                if options.systems
                else ["headway"]
                if options.quick
                else ["no-op", "headway"]
            )
            measure(
                out,
                model=options.model,
                quick=options.quick,
                capacity=options.capacity or (recorded_capacity() if options.quick else None),
                systems=systems,
                seed=options.seed,
                seeds=options.seeds,
                twice=options.twice,
                again=options.again,
                loads=options.loads,
                say=say,
            )
        here = _fidelity.judge(options.judge or [out], say)
    result: dict[str, Any] = {"worst_p50_error": None, "worst_p99_error": None}
    if here is not None:
        found = [each["errors"] for each in here["loads"].values()]
        worst = lambda names, of: max((e.get(name, 0.0) for e in of if e for name in names), default=None)  # noqa: E731
        p50, p99 = ("ttft_p50", "tpot_p50", "attainment", "refused"), ("ttft_p99", "tpot_p99")
        again, paced = ([each["errors"] for each in here[key].values()] for key in ("again", "paced"))
        result |= {"worst_p50_error": worst(p50, found), "worst_p99_error": worst(p99, found)}
        result |= {"again_p50_error": worst(p50, again), "again_p99_error": worst(p99, again)}
        result |= {"paced_p50_error": worst(p50, paced), "paced_p99_error": worst(p99, paced)}
        decisions = [run for each in here["decisions"].values() for key, run in each.items() if " held " in key]
        steps, same = (sum(each[key] for each in decisions) for key in ("steps", "same_steps"))
        result |= {"steps": steps, "same_steps_share": round(same / steps, 4)}
        verdicts, agreed = (sum(each[key] for each in decisions) for key in ("verdicts", "same_verdicts"))
        result |= {"verdicts": verdicts, "same_verdicts_share": round(agreed / verdicts, 4)}
        given = [each["errors"] for each in decisions]
        result |= {"given_steps_p50_error": worst(p50, given), "given_steps_p99_error": worst(p99, given)}
        for name in here["speed"]:
            own, twice = (
                [each["errors"] for key, each in here[part].items() if key.startswith(f"{name} ")]
                for part in ("loads", "again")
            )
            result[name] = {
                "worst_p50_error": worst(p50, own),
                "worst_p99_error": worst(p99, own),
                "again_p50_error": worst(p50, twice),
                "again_p99_error": worst(p99, twice),
            }
    result["rtx4090_error"] = None if gpu is None else gpu["error"]
    if gpu is not None:
        for name, each in gpu["second_half"].items():
            say(f"RTX 4090, second half, {name}: real {each['real_s']} s, twin {each['twin_s']} s, {each['error']:.2%}")
    rough = (options.quick and not options.judge) or options.skip_engine
    finish("twin_fidelity", result, {"rtx4090": gpu, "engine": here}, quick=rough)


def say(text: str) -> None:
    print(text, flush=True)


def recorded_capacity() -> float | None:
    """Return the capacity that bench/attainment.py found, None when it was not run."""
    path = RESULTS / "attainment.json"
    return float(json.loads(path.read_text())["capacity_req_s"]["mixed"]) if path.exists() else None


if __name__ == "__main__":
    main()
