"""How fast the twin simulates one engine on one core, against the recorded figures of two peers.

Figures of the peers were recorded on a machine of this size (docs/twin.md): Vidur 4,850 batches/s and 890 requests/s,
AISimulate (Rust) 5,200 requests/s. One trace, one run gives both of ours: Poisson arrivals that keep 64 requests
running on an A100 with an 8B model (roofline profile), answers of 320 tokens in the median. The skipping is exact
(tests/twin/test_fast_path.py). Rates are per CPU second of this process, reading the trace's rows and building the
table included, so that other work on the machine does not count; wall times stand beside them.

Last line: RESULT {json} with steps_per_s, x_vidur, x_aisimulate, requests_per_s.
"""

from __future__ import annotations

import resource
import time

from _report import arguments, finish
from headway.replay.targets import Targets
from headway.trace.record import Trace
from headway.trace.synthetic import Lengths, Shape, TrafficClass, demo_trace
from headway.twin import Outcome, Scenario, find_profile, simulate

VIDUR_BATCHES_S, VIDUR_REQUESTS_S, AISIMULATE_REQUESTS_S = 4_850, 890, 5_200

SHAPE = Shape(
    classes=(
        TrafficClass(
            slo_class="default",
            share=1.0,
            inputs=Lengths(median=200, sigma=0.5, low=16, high=2000),
            outputs=Lengths(median=320, sigma=0.4, low=16, high=2000),
        ),
    ),
    gap_cv=1.0,
)


def load(requests: int) -> Trace:
    """Return a trace whose demand is about that of 64 running requests."""
    cost = find_profile("estimated:a100-80g/llama-3.1-8b").cost
    return demo_trace(rate=64 / (345 * cost.seconds(12, 64, 64 * 400, 0)), seed=1, n=requests, shape=SHAPE)


def run(trace: Trace, **settings: object) -> tuple[Outcome, float]:
    """Return the outcome and the CPU seconds it took."""
    scenario = Scenario(
        profile=find_profile("estimated:a100-80g/llama-3.1-8b"),
        targets={"default": Targets(ttft_s=2.0, tpot_s=0.1)},
        settings={"policy": "fcfs", "admission": "admit_all", "max_running": 64, "async_lag": False} | settings,
    )
    started = time.process_time()
    outcome = simulate(trace, scenario)
    return outcome, time.process_time() - started


def rates(trace: Trace, done: tuple[Outcome, float]) -> dict[str, float]:
    outcome, cpu_s = done
    tokens = int(outcome.frame["generated_tokens"].sum())
    return {
        "requests": len(trace),
        "steps": outcome.facts["steps"],
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(outcome.wall_s, 3),
        "steps_per_s": round(outcome.facts["steps"] / cpu_s),
        "requests_per_s": round(len(trace) / cpu_s),
        "mean_running": round(tokens / outcome.facts["steps"], 1),
        "steps_per_request": round(outcome.facts["steps"] / len(trace), 2),
    }


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    size = 8_000 if options.quick else 30_000
    trace = load(size)
    run(load(500))  # imports and caches
    tries = [rates(trace, run(trace)) for _ in range(2 if options.quick else 5)]
    best = max(tries, key=lambda each: each["steps_per_s"])
    small = load(size // 10)
    others = {
        "without skipping": rates(small, run(small, fast=False)),
        "headway + response_time": rates(small, run(small, policy="headway", admission="response_time")),
        "headway + response_time, fixed cost": rates(
            small, run(small, policy="headway", admission="response_time", learn=False)
        ),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    long = load(size * (1 if options.quick else 4))
    started = time.perf_counter()
    run(long)
    others["long trace"] = {
        "requests": len(long),
        "wall_s": round(time.perf_counter() - started, 2),
        "peak_rss_growth_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
    }
    for name, values in {"fcfs + admit_all (best)": best, **others}.items():
        print(f"{name:38s}", "  ".join(f"{key} {value:,}" for key, value in values.items()))
    result = {
        "steps_per_s": best["steps_per_s"],
        "steps_per_s_worst": min(each["steps_per_s"] for each in tries),
        "x_vidur": round(best["steps_per_s"] / VIDUR_BATCHES_S, 2),
        "x_aisimulate": round(best["requests_per_s"] / AISIMULATE_REQUESTS_S, 2),
        "requests_per_s": best["requests_per_s"],
        "mean_running": best["mean_running"],
    }
    finish("twin_speed", result, {"tries": tries, "others": others}, quick=options.quick)


if __name__ == "__main__":
    main()
