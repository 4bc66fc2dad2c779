"""The same server and load, measured by `headway replay` and by the load tools that users would pick instead.

The scripted null server (first token 50 ms after a request, 10 ms a token; `headway.replay.nullserver`) in a process
of its own serves equal requests of 32 tokens:

- at 20 and at 100 requests/s, every request at once: definitions, errors, CPU;
- `capped`: 4 slots (11.1 requests/s), 22 requests/s offered, at most 4 open at the client, TTFT target 500 ms.
  The queue is then in the client, where only a clock that starts when a request was due sees it.

Truth is the server's own log: TTFT from the bytes of a request read to its first token written; pace from its first
to its last token; attainment and lateness from the moment it was due: i / rate after the start, which is taken as late
as the arrivals allow. Percentiles of the truth are nearest rank; the tools' own differ and are named.

    python bench/peers.py [--quick] [--peers-dir FOLDER] [--only NAME ...]

Peers are installed into virtual environments under --peers-dir (default: a temporary folder, gone afterwards; it needs
a package index, 3 GB and some minutes). One that can't be installed or run is reported with its reason.

CPU is user + system seconds of the whole process tree, start-up included; `without start-up` subtracts a run of two
requests (not with --quick). Each figure is the median over the repeats, the tools taking turns. RESULT keys:

    ttft_p50_spread_ms   largest difference between tools of the P50 of TTFT from the send, the worse of 20 and 100/s
    tpot_p50_spread_ms   the same of (last - first token) / (tokens - 1), whatever a tool calls it
    cpu_per_1k_tokens_s  headway's CPU seconds for 1,000 streamed tokens, at 100 requests/s
    cpu_vs_best_peer     that / the smallest among the peers
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _peers import SLO_TTFT_MS, Aiperf, Guidellm, Headway, Load, Servebench, Tool, UnavailableError, VllmBench
from _report import finish
from headway.errors import HeadwayError
from headway.replay.honesty import nearest_rank
from headway.replay.nullserver import Script
from headway.replay.selftest import null_server

TTFT_S, TPOT_S, SLOTS, CAPPED_RATE = 0.05, 0.01, 4, 22.0
_LIMIT_S = 240.0  # one run of one tool
_START = "start-up"
_TOO_SLOW = 4  # exit code of `headway replay` that found its client to be the bottleneck


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--quick", action="store_true", help="fewer requests, no repeats: under 5 minutes")
    parse.add_argument("--peers-dir", type=Path, help="keeps the peers' environments (default: a temporary folder)")
    parse.add_argument("--tokenizer", type=Path, help="folder of a tokenizer (default: that of the embedded model)")
    parse.add_argument("--only", nargs="+", metavar="NAME", help="only these tools, beside headway")
    parse.add_argument("--repeats", type=int, help="default 3, or 1 with --quick")
    told = parse.parse_args()
    repeats = told.repeats or (1 if told.quick else 3)
    loads = plan(told.quick)
    with tempfile.TemporaryDirectory() as scratch:
        home = (told.peers_dir or Path(scratch) / "peers").resolve()
        home.mkdir(parents=True, exist_ok=True)
        tokenizer = told.tokenizer or embedded_tokenizer()
        tools: list[Tool] = [
            Headway(), *(peer(home, tokenizer) for peer in (Servebench, Aiperf, Guidellm)), VllmBench(tokenizer)
        ]  # fmt: skip
        if told.only:
            tools = [tool for tool in tools if tool.name in ("headway", *told.only)]
        reasons = prepare(tools)
        tries: list[dict[str, Any]] = []
        for repeat in range(repeats):
            for load in loads:
                if repeat and (load.cap or load.name == _START):
                    continue  # arithmetic, and a figure to subtract: once is enough
                for tool in tools[repeat % len(tools) :] + tools[: repeat % len(tools)]:
                    if tool.name in reasons:
                        continue
                    folder = Path(scratch) / f"{len(tries)}-{tool.name.split()[0]}"
                    try:
                        one = measure(tool, load, folder)
                    except UnavailableError as error:
                        reasons[tool.name] = f"{load.name}: {error}"
                        print(f"{tool.name}: {reasons[tool.name]}", flush=True)
                        continue
                    tries.append({"tool": tool.name, "load": load.name, "repeat": repeat, **one})
                    print(
                        f"{load.name:>10}  {tool.name:<17} {one['wall_s']:6.1f} s wall {one['cpu_s']:6.2f} s CPU",
                        flush=True,
                    )
        versions = {tool.name: tool.version() for tool in tools}
    rows = [row for load in loads for tool in tools if (row := median_of(tries, tool.name, load.name))]
    report(tools, loads, rows, versions, reasons, repeats)
    detail = {
        "loads": [asdict(load) for load in loads], "repeats": repeats, "tools": versions, "not_run": reasons,
        "load_average_1min": round(os.getloadavg()[0], 2), "rows": rows, "tries": tries,
    }  # fmt: skip
    finish("peers", result(rows), detail, quick=told.quick or bool(told.only))


def plan(quick: bool) -> list[Load]:
    """Return the loads: of full length, or short ones."""
    start = [] if quick else [Load(name=_START, rate=100.0, n=2)]
    return [
        *start,
        Load(name="20 req/s", rate=20.0, n=100 if quick else 300),
        Load(name="100 req/s", rate=100.0, n=400 if quick else 800),
        Load(name="capped", rate=CAPPED_RATE, n=100 if quick else 170, slots=SLOTS, cap=SLOTS),
    ]


def embedded_tokenizer() -> Path | None:
    """Return the folder of the embedded model, which holds a tokenizer; None where it can't be prepared."""
    try:
        from headway.engine.vllm.model import embedded_model

        return embedded_model(progress=print).path
    except (HeadwayError, ImportError) as error:
        print(f"no embedded model, so no tokenizer: {error}")
        return None


def prepare(tools: Sequence[Tool]) -> dict[str, str]:
    """Install what is missing; return the tools that can't be used, with the reason."""
    reasons = {}
    for tool in tools:
        try:
            tool.prepare()
        except UnavailableError as error:
            reasons[tool.name] = str(error)
            print(f"{tool.name}: {error}", flush=True)
    return reasons


def measure(tool: Tool, load: Load, folder: Path) -> dict[str, Any]:
    """Run a tool once against a null server of its own; return what it shows, the truth, CPU and wall seconds."""
    folder.mkdir()
    with null_server(Script(ttft_s=TTFT_S, tpot_s=TPOT_S, slots=load.slots)) as url:
        began = time.perf_counter()
        cpu_s, code = run(tool.command(url, load, folder), tool.environment(), folder)
        wall_s = time.perf_counter() - began
        with urllib.request.urlopen(url + "/log") as answer:
            log = [json.loads(line) for line in answer.read().splitlines()]
    try:
        shown = tool.read(load, folder)
    except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        raise UnavailableError(f"its results can't be read: {type(error).__name__}: {error}") from error
    return {
        "shown": asdict(shown), "truth": truth(log, load), "cpu_s": round(cpu_s, 3), "wall_s": round(wall_s, 2),
        "streamed_tokens": sum(len(line["written"]) for line in log), "client_too_slow": code == _TOO_SLOW,
    }  # fmt: skip


def run(command: list[str], extra: dict[str, str], folder: Path) -> tuple[float, int]:
    """Run a command to its end; return user + system seconds of it and its children, and the exit code."""
    with open(folder / "out.txt", "wb") as out, open(folder / "err.txt", "wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder, env=os.environ | extra,
            start_new_session=True,
        )  # fmt: skip
        ends = time.monotonic() + _LIMIT_S
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > ends:
                os.killpg(process.pid, signal.SIGKILL)
                os.wait4(process.pid, 0)
                process.returncode = -signal.SIGKILL
                raise UnavailableError(f"did not end within {_LIMIT_S:g} s")
            time.sleep(0.05)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, _TOO_SLOW):
        said = (folder / "err.txt").read_text(errors="replace") + (folder / "out.txt").read_text(errors="replace")
        raise UnavailableError(f"exit code {process.returncode}: {' / '.join(said.split(chr(10))[-4:]).strip()[:400]}")
    return usage.ru_utime + usage.ru_stime, process.returncode


def truth(log: list[dict[str, Any]], load: Load) -> dict[str, float | int]:
    """Return what the server saw of the last n requests (those before warm the server up), milliseconds."""
    lines = sorted(log, key=lambda line: line["received"])[-load.n :]
    zero = min(line["received"] - i / load.rate for i, line in enumerate(lines))
    firsts = [line["written"][0] - line["received"] for line in lines]
    paces = [
        (line["written"][-1] - line["written"][0]) / (len(line["written"]) - 1)
        for line in lines
        if len(line["written"]) > 1
    ]
    late = [line["received"] - zero - i / load.rate for i, line in enumerate(lines)]
    good = sum(line["written"][0] - zero - i / load.rate <= SLO_TTFT_MS / 1e3 for i, line in enumerate(lines))
    ms = lambda values, q: round(nearest_rank(sorted(values), q) * 1e3, 3)  # noqa: E731
    return {
        "n": len(lines), "ttft_p50": ms(firsts, 0.5), "ttft_p99": ms(firsts, 0.99), "pace_p50": ms(paces, 0.5),
        "pace_p99": ms(paces, 0.99), "late_p50": ms(late, 0.5), "late_p99": ms(late, 0.99), "attainment": good / load.n,
    }  # fmt: skip


def median_of(tries: list[dict[str, Any]], tool: str, load: str) -> dict[str, Any] | None:
    """Return the medians over the repeats of one tool at one load; None when it never ran."""
    mine = [one for one in tries if one["tool"] == tool and one["load"] == load]
    if not mine:
        return None
    row: dict[str, Any] = {"tool": tool, "load": load, "repeats": len(mine)}
    row["client_too_slow"] = sum(one["client_too_slow"] for one in mine)
    for part in ("shown", "truth"):
        row[part] = {key: _median([one[part][key] for one in mine]) for key in mine[0][part]}
    for key in ("cpu_s", "wall_s", "streamed_tokens"):
        row[key] = _median([one[key] for one in mine])
    row["cpu_per_1k_tokens_s"] = row["cpu_s"] / row["streamed_tokens"] * 1e3
    starts = [one for one in tries if one["tool"] == tool and one["load"] == _START]
    row["cpu_per_1k_tokens_without_start_s"] = None
    if starts and load != _START:
        cpu = row["cpu_s"] - _median([one["cpu_s"] for one in starts])
        tokens = row["streamed_tokens"] - _median([one["streamed_tokens"] for one in starts])
        row["cpu_per_1k_tokens_without_start_s"] = round(cpu / tokens * 1e3, 4)
    return row


def report(
    tools: Sequence[Tool],
    loads: Sequence[Load],
    rows: list[dict[str, Any]],
    versions: dict[str, str],
    reasons: dict[str, str],
    repeats: int,
) -> None:
    """Print the tables and what differs, in Markdown."""
    print("\nMilliseconds; each cell P50 / P99 as the tool itself reports it, `truth` beside it from the server's log.")
    for load in loads:
        mine = [row for row in rows if row["load"] == load.name]
        if load.name == _START or not mine:
            continue
        if load.cap:
            heads, cells = _CAPPED_HEADS, _capped_cells
            title = f"{load.slots} slots, {load.rate:g} req/s offered, client cap {load.cap}, 1 run"
        else:
            heads, cells = _HEADS, _cells
            title = f"{load.rate:g} req/s, median of {repeats} runs"
        print(f"\n{title}, n = {load.n} requests of {load.tokens} tokens a run\n")
        print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        for row in mine:
            tool = next(tool for tool in tools if tool.name == row["tool"])
            print("| " + " | ".join(cells(row, tool, versions)) + " |")
    print("\nWhere definitions differ:")
    for tool in tools:
        print(f"- {tool.name} {versions[tool.name]}: ITL is {tool.itl_is}. {tool.in_words}")
    for name, reason in reasons.items():
        print(f"- {name}: did not run: {reason}")
    print()


_HEADS = (
    "tool", "n", "TTFT", "truth", "TPOT", "truth", "its ITL", "goodput req/s (attainment)", "late at the server",
    "CPU-s per 1,000 tokens (without start-up)", "wall s",
)  # fmt: skip
_CAPPED_HEADS = (
    "tool",
    "n",
    "TTFT",
    "attainment it reports",
    "true attainment",
    "goodput req/s",
    "where the wait shows",
)


def _cells(row: dict[str, Any], tool: Tool, versions: dict[str, str]) -> list[str]:
    shown, real = row["shown"], row["truth"]
    pair = lambda part, name: f"{_number(part[name + '_p50'])} / {_number(part[name + '_p99'])}"  # noqa: E731
    first = pair(shown, "ttft")
    if shown["attainment_from_send"] is not None:
        first += f" (from the send: P50 {_number(shown['send_ttft_p50'])})"
    return [
        f"{tool.name} {versions[tool.name]}", f"{shown['n']:.0f}", first, pair(real, "ttft"), pair(shown, "tpot"),
        pair(real, "pace"), pair(shown, "itl"), f"{shown['goodput']:.2f} ({shown['attainment']:.1%})",
        pair(real, "late"),
        f"{row['cpu_per_1k_tokens_s']:.3f} ({_number(row['cpu_per_1k_tokens_without_start_s'], 3)})",
        f"{row['wall_s']:.1f}",
    ]  # fmt: skip


def _capped_cells(row: dict[str, Any], tool: Tool, versions: dict[str, str]) -> list[str]:
    shown, real = row["shown"], row["truth"]
    told = f"{shown['attainment']:.1%}"
    if shown["attainment_from_send"] is not None:
        told += f" (from the send it would be {shown['attainment_from_send']:.1%})"
    slip = tool.slip_is
    if shown["slip_p99"] is not None:
        slip += f": P99 {_number(shown['slip_p99'])}"
    return [
        f"{tool.name} {versions[tool.name]}", f"{shown['n']:.0f}",
        f"{_number(shown['ttft_p50'])} / {_number(shown['ttft_p99'])}", told, f"{real['attainment']:.1%}",
        f"{shown['goodput']:.2f}", slip,
    ]  # fmt: skip


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the RESULT keys."""
    plain = [row for row in rows if row["load"] in ("20 req/s", "100 req/s")]
    fast = {row["tool"]: row for row in plain if row["load"] == "100 req/s"}
    capped = {row["tool"]: row for row in rows if row["load"] == "capped"}

    def spread(of: Callable[[dict[str, Any]], float]) -> float | None:
        by_load: dict[str, list[float]] = {}
        for row in plain:
            by_load.setdefault(row["load"], []).append(of(row))
        if all(len(values) < 2 for values in by_load.values()):
            return None
        return round(max(max(values) - min(values) for values in by_load.values()), 3)

    peers = {name: row["cpu_per_1k_tokens_s"] for name, row in fast.items() if name != "headway"}
    best = min(peers, key=peers.__getitem__, default=None)
    own = fast["headway"]
    return {
        "ttft_p50_spread_ms": spread(lambda row: row["shown"]["send_ttft_p50"]),
        "tpot_p50_spread_ms": spread(lambda row: row["shown"]["pace_p50"]),
        "cpu_per_1k_tokens_s": round(own["cpu_per_1k_tokens_s"], 4),
        "cpu_vs_best_peer": round(own["cpu_per_1k_tokens_s"] / peers[best], 3) if best else None,
        "best_peer": best,
        "cpu_per_1k_tokens_without_start_s": own["cpu_per_1k_tokens_without_start_s"],
        "capped_attainment": {name: round(row["shown"]["attainment"], 4) for name, row in capped.items()},
        "capped_attainment_true": {name: round(row["truth"]["attainment"], 4) for name, row in capped.items()},
        "tools": sorted(fast),
    }


def _median(values: list[Any]) -> float | None:
    return None if any(value is None for value in values) else statistics.median(values)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.1f}" if value >= 1000 else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
