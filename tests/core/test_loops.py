"""Compiled functions against the same source run by numpy, bit by bit."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import compiling, loops

pytest.importorskip("numba")


def fresh(name: str) -> ModuleType:
    """Return a second copy of a module of the core, put in the place of the first."""
    spec = importlib.util.find_spec(f"headway.core.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


with patch.dict(sys.modules, {"numba": None}):
    without_numba = fresh("compiling")
    plain = fresh("loops")


seconds = st.sampled_from([0.0, 1e-9, 0.003, 0.02, 0.021, 0.1, 0.4, 1 / 3])
increasing = st.lists(seconds, min_size=1, max_size=30).map(lambda each: np.cumsum(np.array(each)))
arrays = st.lists(st.sampled_from([0.0, 1.0, 16.0, 250.0, 1333.0]), max_size=30).map(lambda each: np.array(each, float))
counted = st.lists(st.integers(-3, 40), max_size=30).map(lambda each: np.array(each, np.int64))
flags = st.lists(st.booleans(), min_size=31, max_size=31).map(lambda each: np.array(each, np.bool_))
unit = st.sampled_from([0.0, 1e-4, 0.0301, 0.05, 1 / 3, 2.0])
sure = st.sampled_from([1e-3, 0.05, 1 / 3, 2.0])


def same(name: str, *arguments: object) -> None:
    """Fail unless a function gives the same bits compiled and not."""
    first, second = getattr(loops, name)(*arguments), getattr(plain, name)(*arguments)
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    for mine, other in pairs:
        assert np.asarray(mine).tobytes() == np.asarray(other).tobytes(), (name, mine, other)


def test_one_is_compiled_and_the_other_is_not() -> None:
    """Otherwise the rest of this file compares a thing with itself."""
    assert not compiling.failures
    assert {"glance", "up_to", "capacity"} <= without_numba.failures.keys()
    assert hasattr(loops.glance, "py_func")
    assert not hasattr(plain.glance, "py_func")


@given(increasing, increasing)
def test_look_ups(values: np.ndarray, keys: np.ndarray) -> None:
    """Equal keys and keys beyond all values among them."""
    same("up_to", values, keys)
    same("below", values, keys)
    same("largest_yet", keys[::-1].copy())
    same("between", keys, loops.up_to(values, keys[:-1]), len(values))


@given(increasing, increasing, increasing, increasing, st.integers(0, 29), unit)
def test_a_walk_is_read_alike(
    cumulative: np.ndarray, ends: np.ndarray, backlog: np.ndarray, dues: np.ndarray, at: int, start: float
) -> None:
    """Finishing times, work done by a time, who is in time."""
    steps = min(len(cumulative), len(ends))
    cumulative, ends = cumulative[:steps], ends[:steps]
    same("finish", cumulative, ends, backlog)
    same("done_by", cumulative, ends, dues)
    same("glance", cumulative, ends, backlog, min(at, len(backlog) - 1), start + dues[: len(backlog) - 1], start)


@given(arrays, st.integers(0, 30), unit, unit, unit)
def test_work_is_summed_alike(remaining: np.ndarray, at: int, a: float, x: float, own: float) -> None:
    """Also that of nobody."""
    works = loops.work(a, x, remaining, remaining[::-1].copy())
    same("work", a, x, remaining, remaining[::-1].copy())
    same("cumulate", works, min(at, len(works)), own)
    same("longest", remaining, works)


@given(counted, increasing, unit, unit, unit, sure, sure, st.sampled_from([-0.1, 0.01, 0.07, 3.0, math.inf]), sure)
def test_walks_are_the_same(
    left: np.ndarray,
    backlog: np.ndarray,
    base: float,
    b: float,
    chunk: float,
    pace: float,
    blocking: float,
    slack: float,
    factor: float,
) -> None:
    """Both of them, and the decodes that they count."""
    for steps in (1, 2, 90):
        same("decode_counts", left, steps)
        decodes = loops.decode_counts(left, steps)
        same("lengths", steps, pace, blocking, slack, chunk, factor * (base + b * decodes), chunk, factor)
        same("capacity", base, b, chunk, pace, blocking, slack, factor, decodes, backlog)
        for lines in (np.empty((0, 2)), np.array([[0.9, 0.1], [0.95, 0.02]])):
            same("guaranteed", pace, factor, base, b, blocking, lines, decodes, backlog)


@given(increasing, increasing, flags, unit, st.integers(0, 30))
def test_the_late_are_found_alike(
    ahead: np.ndarray, times: np.ndarray, promised: np.ndarray, fixed: float, behind: int
) -> None:
    """Those whose last step is short, the last one that is late, the first place in time."""
    size = min(len(ahead), len(times))
    ahead, times, promised = ahead[:size], times[:size], promised[:size]
    same("short_steps", ahead, times, promised, fixed)
    same("last_late", ahead, times, promised)
    same("first_in_time", ahead, times[: size - 1], min(behind, size - 1))


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_run_is_the_same_without_numba(strict: str) -> None:
    """300 requests that are more than the engine can serve, in the twin: refusals and latencies to the last digit."""
    command = "simulate demo --rate 8 --limit 300 --slo chat:ttft=2,tpot=0.2 --slo document:ttft=6,tpot=0.2 --json"
    settings = f"--set policy.jump=false --set admission.strict={strict}"
    runs = []
    for prepare in ("", "import sys; sys.modules['numba'] = None"):
        code = f"{prepare}\nfrom headway.cli.main import run\nrun()"
        arguments = [sys.executable, "-c", code, *command.split(), *settings.split()]
        (found,) = json.loads(subprocess.run(arguments, capture_output=True, check=True).stdout)
        runs.append(found["summary"])
    assert 0 < runs[0]["total"]["refused"] < 300
    assert runs[0] == runs[1]
