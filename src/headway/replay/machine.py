"""Facts about the client's machine and clock for run.json, and the one setting of it that a replay changes."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import sys
import time
from importlib import metadata


def machine() -> dict:
    """Return what the client runs on (no host name, no user name)."""
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of what takes part in measuring."""
    found = {"python": platform.python_version()}
    for name in ("headway", "aiohttp", "numpy", "polars", "tokenizers", "uvloop"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def clock() -> dict:
    """Return what is known of the clock behind every measured time."""
    info = time.get_clock_info("perf_counter")
    return {
        "name": "time.perf_counter",
        "implementation": info.implementation,
        "resolution_s": info.resolution,
        "monotonic": info.monotonic,
        "started_unix_s": round(time.time(), 6),
    }


def command() -> list[str]:
    """Return the command line without folders or values of secret options."""
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    hidden = []
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            word = "--api-key=***"
        elif i and words[i - 1] == "--api-key":
            word = "***"
        hidden.append(word)
    return hidden


def allow_many_sockets() -> None:
    """Raise the soft limit of open files to the hard one: an open loop holds a socket for every open request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), None)
    except OSError:
        return platform.processor() or None
