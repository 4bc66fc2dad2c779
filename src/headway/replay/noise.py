"""The noise floor of a machine: how far repeats of one and the same configuration lie apart (A/A)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import InputError
from headway.replay import arms, metrics
from headway.replay.arms import Arm
from headway.replay.metrics import Metric
from headway.replay.stats import CONFIDENCE, percentile, span_s, student_t

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The spread of one metric between repeats. `sd` is that of the log (shares: plain), None where it has none."""

    metric: str  # `metric` or `class:metric`
    scale: str  # "log" or "plain"
    values: tuple[float | None, ...]
    sd: float | None
    one_against_one: float | None  # floor for one run against one, as a fraction (shares: plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """Noise floors by metric, with what they were measured on."""

    repeats: int
    confidence: float
    trace_sha256: str | None
    selection: str
    machine: Any
    runs: tuple[str, ...]
    floors: tuple[Floor, ...]

    def working(self, base: int, other: int) -> dict[str, float]:
        """Return the floor on the working scale of every metric for `base` against `other` repeats.

        t(repeats - 1) * sd * sqrt(1 / base + 1 / other): the change that the machine alone exceeds in 5 % of cases.
        A metric without a spread (a value that was 0, infinite or absent) is left out.
        """
        return {
            floor.metric: _factor(self.repeats, self.confidence, base, other) * floor.sd
            for floor in self.floors
            if floor.sd is not None
        }


def _factor(repeats: int, confidence: float, base: int, other: int) -> float:
    return student_t(0.5 + confidence / 2.0, repeats - 1) * math.sqrt(1.0 / base + 1.0 / other)


def measure(arm: Arm, *, names: Sequence[str] = metrics.DEFAULT, confidence: float = CONFIDENCE) -> NoiseFloor:
    """Return the noise floor from at least three repeats of one configuration.

    Raises `InputError` for fewer, and for runs of different traces, selections, server settings or classes.
    """
    if len(arm.runs) < 3:
        raise InputError(f"--aa: {len(arm.runs)} run(s): expected at least 3 repeats of the same configuration")
    first = arm.runs[0]
    for run in arm.runs[1:]:
        for what, read in (
            ("trace", arms.trace_sha256),
            ("selection", arms.selection),
            ("configuration", arms.configuration),
            ("classes", lambda r: arms.classes([r.frame])),
        ):
            if read(run) != read(first):
                raise InputError(
                    f"--aa: {run.path}: {what} {read(run)!r} differs from {read(first)!r} of {first.path}: "
                    "expected repeats of the same configuration"
                )
    wanted = [metrics.parse(name) for name in dict.fromkeys(names)]
    sections = [None, *(arms.classes([first.frame]) if len(arms.classes([first.frame])) > 1 else [])]
    floors = []
    for section in sections:
        for metric in wanted:
            values = tuple(_value(metric, run, section) for run in arm.runs)
            name = metric.name if section is None else f"{section}:{metric.name}"
            floors.append(_floor(name, metric, values, confidence))
    return NoiseFloor(
        repeats=len(arm.runs),
        confidence=confidence,
        trace_sha256=arms.trace_sha256(first),
        selection=arms.selection(first),
        machine=arms.machine(first),
        runs=tuple(str(run.path) for run in arm.runs),
        floors=tuple(floors),
    )


def _value(metric: Metric, run: arms.Run, section: str | None) -> float | None:
    each = metrics.values(metric, run.frame)
    if section is not None:
        each = each[(run.frame["slo_class"].fill_null("default") == section).to_numpy()]
    each = each[~np.isnan(each)]
    if not len(each):
        return None
    if metric.quantile is not None:
        return percentile(each, metric.quantile)
    return float(each.mean()) if metric.kind == "share" else float(each.sum()) / span_s(run.frame)


def _floor(name: str, metric: Metric, values: tuple[float | None, ...], confidence: float) -> Floor:
    scale = "plain" if metric.kind == "share" else "log"
    usable = all(v is not None and math.isfinite(v) and (scale == "plain" or v > 0) for v in values)
    sd = one = None
    if usable:
        working = np.array(values, dtype=float) if scale == "plain" else np.log(np.array(values, dtype=float))
        sd = float(working.std(ddof=1))
        half = _factor(len(values), confidence, 1, 1) * sd
        one = half if scale == "plain" else math.expm1(half)
    return Floor(metric=name, scale=scale, values=values, sd=sd, one_against_one=one)


def write(floor: NoiseFloor, path: Path) -> None:
    """Write `floor` as JSON; raises `InputError` where that can't be done."""
    body = {"headway_noise_floor": FORMAT, **asdict(floor)}
    try:
        Path(path).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def read(path: Path) -> NoiseFloor:
    """Return the noise floor in the file `path`; `InputError` when it is not one."""
    try:
        body = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: expected a file written by headway compare --aa") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    found = body.pop("headway_noise_floor", None) if isinstance(body, dict) else None
    if found != FORMAT:
        raise InputError.at(path, None, "headway_noise_floor", found, f"{FORMAT} (written by headway compare --aa)")
    try:
        floors = tuple(Floor(**{**each, "values": tuple(each["values"])}) for each in body.pop("floors"))
        return NoiseFloor(**{**body, "runs": tuple(body["runs"])}, floors=floors)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: {error}: expected the keys written by headway compare --aa") from None


def applies(floor: NoiseFloor, arm: Arm) -> list[str]:
    """Return notes on how the runs of `arm` differ from those that the floor was measured on."""
    notes = []
    run = arm.runs[0]
    for what, mine, theirs in (
        ("trace", arms.trace_sha256(run), floor.trace_sha256),
        ("selection", arms.selection(run), floor.selection),
        ("machine", arms.machine(run), floor.machine),
    ):
        if mine != theirs:
            notes.append(f"noise floor measured with another {what} than arm {arm.name}: treat it as a guess")
    return notes
