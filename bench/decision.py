"""What does a decision cost? Python time of one policy.plan and one admission.decide, 256 running, 1,000 waiting.

A modelled engine with GPU-like step cost (g = 8 ms, a = 25 us, b = 40 us, k = 10 ns, x = 0.2 ns) serves requests with
TTFT targets of 0.5 to 10 s. Every step: tokens arrive, streams end, the plan is applied, new requests arrive, and one
candidate is decided. Timed is what an engine would wait for: building the view, the verdict, the plan. The numbers
running and waiting are held constant. `share_of_step` is the decision's time over the modelled time of the same step
(means over the steps).

The pace is 1.25 times the worst step of that size, at least 50 ms: under a tighter one the TBT test would refuse
every candidate before the expensive part. Percentiles are nearest-rank over all measured steps; the first 50 steps
warm up and are left out; the garbage collector is off while timing, as in an engine that froze its heap. `CPU P99` is
the same on the thread's CPU clock: on a busy machine it lacks what other processes took.

    python bench/decision.py [--quick]
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections import Counter

from _report import arguments, finish
from headway.admission import create as create_admission
from headway.core import (
    Accept,
    CostCoefficients,
    DemandWindow,
    EngineView,
    KvView,
    Ledger,
    Line,
    RequestState,
    Slo,
    StepCost,
)
from headway.policies import create as create_policy

GPU = CostCoefficients(g=8e-3, a=2.5e-5, b=4e-5, k=1e-8, x=2e-10)
SIZES = ((64, 250), (128, 500), (256, 1000), (512, 2000))
HEADLINE = (256, 1000)
LINES = (Line(1.01, 0.08), Line(1.02, 0.05), Line(1.05, 0.02), Line(1.08, 0.01))  # what strict promises count on
WARM_UP = 50
MEAN_RESERVED = 400  # tokens, prompt + max output
PROMPT_MU = (
    4.0  # log of the median prompt: 1,000 that wait can be served within their targets, or none would be accepted
)
TARGETS = ((0.5, 1.0, 2.0, 5.0, 10.0), (1, 1, 2, 4, 12))  # TTFT seconds and how often


class Engine:
    """Modelled engine that keeps `running` streams and `waiting` accepted prompts alive."""

    def __init__(self, running: int, waiting: int, seed: int) -> None:
        self.running, self.waiting = running, waiting
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.seq = 0
        served = running + waiting + 1
        self.pace = max(0.05, 1.25 * GPU.seconds(16, served, served * MEAN_RESERVED, 0))
        self.ledger, self.demand = Ledger(), DemandWindow()
        self.cost = StepCost.fixed(GPU, factor=1.1, lines=LINES)
        blocks = served * MEAN_RESERVED // 4
        self.kv = KvView(block_size=16, total_blocks=blocks, free_blocks=blocks)
        for _ in range(self.demand.limit):
            work = GPU.work_s(self.rng.randint(50, 3000), 0)
            self.demand.add(self.now, work_s=work, ttft_s=self.rng.choices(*TARGETS)[0])
        while len(self.ledger.decoding) < running:
            request = self.arrive()
            self.ledger.accept(request, self.now)
            self.ledger.token(request.id, self.now + self.rng.uniform(-0.5, 1.0) * self.pace)
        self.refill()

    def arrive(self) -> RequestState:
        """Return a new request without a verdict."""
        rng = self.rng
        self.seq += 1
        request = RequestState(
            id=f"request-{self.seq}",
            seq=self.seq,
            slo=Slo(ttft_s=rng.choices(*TARGETS)[0], tpot_s=self.pace),
            arrival_s=self.now - rng.random() * 0.05,
            prompt_tokens=max(16, min(4000, int(rng.lognormvariate(PROMPT_MU, 0.9)))),
            max_output_tokens=rng.randint(20, 400),
        )
        self.ledger.arrive(request)
        return request

    def refill(self) -> None:
        """Accept new requests, with a promise, until as many wait as should."""
        while len(self.ledger.pending) < self.waiting:
            request = self.arrive()
            self.ledger.accept(request, request.due_s)

    def view(self) -> EngineView:
        """Return the view of this moment."""
        return EngineView(
            now_s=self.now,
            ledger=self.ledger,
            cost=self.cost,
            demand=self.demand,
            kv=self.kv,
            max_step_tokens=8192,
            max_running=8192,
            max_model_len=8192,
        )

    def advance(self, chunks: dict[str, int]) -> float:
        """Execute the planned step; return its modelled seconds."""
        ledger, q, X = self.ledger, 0, 0.0
        for request_id, tokens in chunks.items():
            request = ledger.requests[request_id]
            q += tokens
            X += tokens * (request.computed_tokens + tokens / 2)
        seconds = GPU.seconds(q, len(ledger.decoding), ledger.context_tokens, X)
        self.now += seconds
        emitting = list(ledger.decoding)
        for request_id, tokens in chunks.items():
            ledger.schedule(request_id, tokens)
            if not ledger.requests[request_id].remaining_tokens:
                emitting.append(request_id)
        for request_id in emitting:
            ledger.token(request_id, self.now)
            if not ledger.requests[request_id].remaining_output:
                ledger.finish(request_id)
        # Hold the number of streams: the oldest end early, or waiting prompts start as if they had been cached.
        while len(ledger.decoding) > self.running:
            ledger.finish(next(iter(ledger.decoding)))
        while len(ledger.decoding) < self.running:
            ledger.token(ledger.pending[0].id, self.now)
        # What is hopelessly late leaves, as its client would.
        while ledger.pending and ledger.pending[0].due_s < self.now:
            ledger.finish(ledger.pending[0].id)
        self.refill()
        return seconds


def measure(running: int, waiting: int, steps: int, seed: int, *, strict: bool = False) -> dict:
    """Return the distribution of decision times at one size."""
    engine = Engine(running, waiting, seed)
    policy, admission = create_policy("headway"), create_admission("response_time")
    if strict:
        policy = create_policy("headway", jump=False)
        admission = create_admission("response_time", strict=True, foresight=0.0)
    times, decides, cpus, plans, lengths, verdicts = [], [], [], [], [], Counter()
    gc.collect()
    gc.freeze()
    gc.disable()
    for step in range(WARM_UP + steps):
        candidate = engine.arrive()
        work = GPU.work_s(candidate.prompt_tokens, 0)
        engine.demand.add(engine.now, work_s=work, ttft_s=candidate.slo.ttft_s)
        cpu = time.thread_time_ns()
        started = time.perf_counter_ns()
        view = engine.view()
        verdict = admission.decide(view, candidate)
        between = time.perf_counter_ns()
        plan = policy.plan(view)
        ended = time.perf_counter_ns()
        cpu = time.thread_time_ns() - cpu
        if isinstance(verdict, Accept):
            engine.ledger.accept(candidate, verdict.bound_s)
        else:
            engine.ledger.finish(candidate.id)
        seconds = engine.advance(dict(plan.chunks))
        if step < WARM_UP:
            continue
        times.append((ended - started) / 1e3)
        cpus.append(cpu / 1e3)
        decides.append((between - started) / 1e3)
        plans.append((ended - between) / 1e3)
        lengths.append(seconds)
        verdicts[type(verdict).__name__ + (f" {verdict.reason}" if hasattr(verdict, "reason") else "")] += 1
    gc.enable()
    gc.unfreeze()
    return {
        "running": running,
        "waiting": waiting,
        "n": len(times),
        "p50_us": percentile(times, 0.50),
        "p99_us": percentile(times, 0.99),
        "cpu_p99_us": percentile(cpus, 0.99),
        "decide_p99_us": percentile(decides, 0.99),
        "plan_p50_us": percentile(plans, 0.50),
        "step_ms": 1e3 * sum(lengths) / len(lengths),
        "share_of_step": sum(times) / 1e6 / sum(lengths),
        "verdicts": dict(verdicts),
    }


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def slope(xs: list[float], ys: list[float]) -> float:
    """Return the least-squares slope of log y over log x."""
    lx, ly = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    return sum((x - mx) * (y - my) for x, y in zip(lx, ly, strict=True)) / sum((x - mx) ** 2 for x in lx)


def main() -> None:
    """Measure every size, print the table and the RESULT line."""
    options = arguments(__doc__ or "")
    options.add_argument("--seeds", type=int, default=3, help="runs of each size; medians over them")
    chosen = options.parse_args()
    steps, seeds = (500, range(1)) if chosen.quick else (2000, range(chosen.seeds))
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    print(
        f"Python time of view + decide + plan, {steps} steps a size and seed, pinned to one core, {len(seeds)} seed(s)"
    )
    heads = ("running", "waiting", "P50 us", "P99 us", "CPU P99", "dec. P99", "plan P50", "step ms", "share")
    print(" ".join(f"{head:>8}" for head in heads) + "  verdicts")
    rows = []
    for running, waiting, strict in [(*size, False) for size in SIZES] + [(*HEADLINE, True)]:
        for seed in seeds:
            row = {"seed": seed, "strict": strict, **measure(running, waiting, steps, seed, strict=strict)}
            rows.append(row)
            keys = ("p50_us", "p99_us", "cpu_p99_us", "decide_p99_us", "plan_p50_us")
            times = " ".join(f"{row[key]:8.0f}" for key in keys)
            step = f"{row['step_ms']:8.1f} {row['share_of_step']:8.2%}"
            print(f"{running:8} {waiting:8} {times} {step}  {'strict ' * strict}{row['verdicts']}", flush=True)

    def median(key: str, size: tuple[int, int], *, strict: bool = False) -> float:
        found = [r[key] for r in rows if (r["running"], r["waiting"]) == size and r["strict"] == strict]
        return statistics.median(found)

    sizes = [float(running + waiting) for running, waiting in SIZES]
    exponent = slope(sizes, [median("p50_us", size) for size in SIZES])
    allowed = slope(sizes, [n * math.log(n) for n in sizes])
    print(f"growth of P50 over the sizes: n^{exponent:.2f} (n log n over the same sizes: n^{allowed:.2f})")
    result = {
        "p99_us": round(median("p99_us", HEADLINE), 1),
        "share_of_step": round(median("share_of_step", HEADLINE), 5),
        "exponent": round(exponent, 3),
        "p50_us": round(median("p50_us", HEADLINE), 1),
        "cpu_p99_us": round(median("cpu_p99_us", HEADLINE), 1),
        "decide_p99_us": round(median("decide_p99_us", HEADLINE), 1),
        "strict_decide_p99_us": round(median("decide_p99_us", HEADLINE, strict=True), 1),
        "exponent_n_log_n": round(allowed, 3),
        "steps": steps,
        "seeds": len(seeds),
    }
    finish("decision", result, {"rows": rows}, quick=chosen.quick)


if __name__ == "__main__":
    main()
