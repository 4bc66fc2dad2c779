"""How exact and how light is the replay client?

Against the null server in a process of its own, on loopback, nothing else running on the machine:

- accuracy: 600 requests of 31 tokens (TTFT 500 ms, 50 ms a token) at 100 req/s, about 200 streams at a time;
- schedule: 10,000 requests of one token at 1,000 req/s;
- CPU: 800 requests of 32 tokens at 200 req/s, user + system seconds of the whole `headway replay` process, start-up
  included, against servebench 1.1.3: the figure recorded on another day (2.5 s), or with `--peers` measured now, in
  turns, on the same null server and the same regular arrivals (installed into a throwaway environment, which needs a
  package index, or kept under `--peers-dir`).

All three are repeated; each figure is the median over the repeats of that run's value, kept with every try in
bench/results. RESULT keys:

    max_error_ms            largest error of any TTFT, TPOT, TBT or E2E against what the server really wrote
    p99_error_ms            the same, P99 of the worst of the four: what the client adds but for moments without a CPU
    p99_error_script_ms     P99 of the worst of the four against the script (includes the server waking late)
    max_error_script_ms     the same, maximum
    lateness_p99_ms         sent - scheduled at 1,000 req/s
    cpu_vs_best_peer        client CPU / servebench's, for the same 25,600 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _peers import Load, Servebench
from _report import finish
from headway.replay.nullserver import Script
from headway.replay.selftest import errors, measure, most_open, null_server, regular_trace
from headway.replay.store import Run
from headway.trace import write

SERVEBENCH_RECORDED_S = 2.5
_ACCURACY = Script(ttft_s=0.5, tpot_s=0.05)
_SCHEDULE = Script(ttft_s=0.02, tpot_s=0.01)
_CPU = Script(ttft_s=0.05, tpot_s=0.01)
_RATE, _REQUESTS, _TOKENS = 200.0, 800, 32


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--repeats", type=int, default=3)
    parse.add_argument("--peers", action="store_true", help="measure servebench too, instead of its recorded figure")
    parse.add_argument("--peers-dir", type=Path, help="keeps servebench's environment (default: a temporary folder)")
    told = parse.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        own, own_p99, script_p99, script_max, lateness, without_cpu = [], [], [], [], [], []
        for i in range(told.repeats):
            trace = regular_trace(n=600, rate=100.0, output_tokens=31)
            run, log = measure(_ACCURACY, trace, folder / f"accuracy-{i}")
            to_script, to_writes = errors(run, log, _ACCURACY)
            own.append(max(e.max_s for e in to_writes.values()) * 1e3)
            own_p99.append(max(e.p99_s for e in to_writes.values()) * 1e3)
            without_cpu.append(run.meta["client"]["cpu_wait_s"])
            script_p99.append(max(e.p99_s for e in to_script.values()) * 1e3)
            script_max.append(max(e.max_s for e in to_script.values()) * 1e3)
            show = lambda part: ", ".join(  # noqa: E731
                f"{name} {e.p50_s * 1e3:.2f}/{e.p99_s * 1e3:.2f}/{e.max_s * 1e3:.2f}" for name, e in part.items()
            )
            print(f"accuracy {i}: {most_open(run.frame)} streams; {waited(run)}; error P50/P99/max ms")
            print(f"  to script: {show(to_script)}")
            print(f"  to writes: {show(to_writes)}")
            trace = regular_trace(n=10_000, rate=1000.0, output_tokens=1)
            run, _ = measure(_SCHEDULE, trace, folder / f"schedule-{i}")
            late = run.meta["client"]["lateness"]
            lateness.append(late["p99_ms"])
            print(
                f"schedule {i}: late P50/P99/max {late['p50_ms']}/{late['p99_ms']}/{late['max_ms']} ms at 1,000 req/s; "
                f"{waited(run)}"
            )
        peer = Servebench((told.peers_dir or folder / "peers").resolve(), None)
        if told.peers:
            peer.prepare()
        cpu, loop, peer_cpu = [], [], []
        for i in range(told.repeats):
            spent, replaying = headway_cpu(folder / f"cpu-{i}")
            cpu.append(spent)
            loop.append(replaying)
            print(f"CPU {i}: headway replay {spent:.2f} s whole process, {replaying:.2f} s of it replaying")
            peer_cpu.append(servebench_cpu(peer, folder / f"cpu-{i}") if told.peers else SERVEBENCH_RECORDED_S)
            how = "measured now" if told.peers else "recorded on another day, not measured now; see --peers"
            print(f"CPU {i}: servebench {peer.pin} {peer_cpu[-1]:.2f} s ({how})")
    median = lambda values: round(statistics.median(values), 3)  # noqa: E731
    result = {
        "max_error_ms": median(own),
        "p99_error_ms": median(own_p99),
        "p99_error_script_ms": median(script_p99),
        "max_error_script_ms": median(script_max),
        "lateness_p99_ms": median(lateness),
        "cpu_vs_best_peer": round(statistics.median(cpu) / statistics.median(peer_cpu), 3),
        "cpu_s": median(cpu),
        "cpu_replaying_s": median(loop),
        "peer_cpu_s": median(peer_cpu),
        "peer_measured": told.peers,
        "repeats": told.repeats,
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
    tries = {
        "max_error_ms": own,
        "p99_error_ms": own_p99,
        "client_without_cpu_s": without_cpu,
        "p99_error_script_ms": script_p99,
        "max_error_script_ms": script_max,
        "lateness_p99_ms": lateness,
        "cpu_s": cpu,
        "cpu_replaying_s": loop,
        "peer_cpu_s": peer_cpu,
    }
    n = {"accuracy": 600, "schedule": 10_000, "cpu": _REQUESTS}
    finish("replay_accuracy", result, {"n": n, "peer": f"servebench {peer.pin}", "tries": tries}, quick=False)


def waited(run: Run) -> str:
    """Say for how long the client was ready to run and the machine gave it no CPU."""
    seconds = run.meta["client"]["cpu_wait_s"]
    return "wait for a CPU unknown" if seconds is None else f"{seconds * 1e3:.0f} ms without a CPU"


def headway_cpu(folder: Path) -> tuple[float, float]:
    """Return CPU seconds of a whole `headway replay` process, and of its replay alone."""
    folder.mkdir()
    write(regular_trace(n=_REQUESTS, rate=_RATE, output_tokens=_TOKENS), folder / "cpu.jsonl")
    start = "import sys; from headway.cli.main import run; sys.argv[0] = 'headway'; run()"
    with null_server(_CPU) as url:
        words = ["replay", str(folder / "cpu.jsonl"), "--url", url, "--prompts", "tokens", "--json"]
        seconds = cpu_of([sys.executable, "-c", start, *words, "--out", str(folder / "run")])
    return seconds, json.loads((folder / "run" / "run.json").read_text())["client"]["cpu_s"]


def servebench_cpu(peer: Servebench, folder: Path) -> float:
    """Return CPU seconds of a whole servebench process under the same load."""
    load = Load(name="cpu", rate=_RATE, n=_REQUESTS, tokens=_TOKENS)
    with null_server(_CPU) as url:
        return cpu_of(peer.command(url, load, folder))


def cpu_of(command: list[str]) -> float:
    """Run a command to its end and return its user + system seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 4):  # 4: the client of `headway replay` found itself too slow
        raise SystemExit(f"{command[0]} left with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
