"""How long `headway trace inspect` takes for a million requests, and how much memory.

Writes a million invented requests as an Azure-2023-like CSV (CRLF, 7 decimals) and as Headway JSONL with hash
ids, runs the command on each in a process of its own, and takes wall time and peak resident memory from the
operating system. Targets: under 10 s and under 1.5 GiB.

Last line: RESULT {json} with rows, seconds, peak_gib, jsonl_seconds, jsonl_peak_gib.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

from _report import finish

BLOCK_SIZE = 512
BLOCKS = 20  # hash ids a request
ENTRY = "from headway.cli.main import run; run()"


def write_csv(path: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    ticks = np.cumsum(random.gamma(0.6, 1e6 / 0.6, rows)).astype(np.int64)  # 100 ns
    stamps = pl.from_epoch(pl.Series(ticks * 100 + 1_700_158_506_680_590_000), time_unit="ns")
    frame = pl.DataFrame(
        {
            "TIMESTAMP": stamps.dt.strftime("%Y-%m-%d %H:%M:%S%.9f").str.head(27),
            "ContextTokens": np.clip(random.lognormal(6.9, 1.0, rows), 1, 14_000).astype(np.int32),
            "GeneratedTokens": np.clip(random.lognormal(4.8, 1.0, rows), 1, 1_000).astype(np.int32),
        }
    )
    frame.write_csv(path, line_terminator="\r\n")


def write_jsonl(path: Path, rows: int) -> None:
    random = np.random.default_rng(1)
    arrivals = np.round(np.cumsum(random.exponential(0.1, rows)), 3)
    arrivals -= arrivals[0]
    tails = np.arange(rows)[:, None] * BLOCKS + np.arange(BLOCKS)
    shared = random.integers(0, BLOCKS, rows)
    family = random.integers(0, 1000, rows)
    prefix = rows * BLOCKS + family[:, None] * BLOCKS + np.arange(BLOCKS)
    ids = np.where(np.arange(BLOCKS) < shared[:, None], prefix, tails)
    frame = pl.DataFrame(
        {
            "arrival_s": arrivals,
            "input_tokens": np.full(rows, BLOCKS * BLOCK_SIZE, dtype=np.int32),
            "output_tokens": random.integers(1, 500, rows).astype(np.int32),
            "hash_ids": pl.Series(ids.astype(np.uint64)).arr.to_list(),
        }
    )
    with path.open("wb") as file:
        file.write(json.dumps({"headway_trace": 1, "block_size": BLOCK_SIZE}).encode() + b"\n")
        frame.write_ndjson(file)


def measure(path: Path) -> tuple[float, float]:
    """Return (wall seconds, peak resident GiB) of one inspect."""
    command = [sys.executable, "-c", ENTRY, "trace", "inspect", str(path)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"inspect left with {process.returncode}")
    return seconds, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    result: dict[str, float] = {"rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        for name, write in (("csv", write_csv), ("jsonl", write_jsonl)):
            path = Path(folder) / f"trace.{name}"
            write(path, rows)
            seconds, peak_gib = measure(path)
            print(
                f"{name}: {path.stat().st_size / 2**20:.0f} MiB, {seconds:.2f} s, {peak_gib:.2f} GiB",
                flush=True,
            )
            prefix = "" if name == "csv" else f"{name}_"
            result |= {f"{prefix}seconds": round(seconds, 2), f"{prefix}peak_gib": round(peak_gib, 3)}
            path.unlink()
    result["load_average_1min"] = round(os.getloadavg()[0], 2)
    finish("trace_inspect", result, {}, quick=rows != 1_000_000)


if __name__ == "__main__":
    main()
