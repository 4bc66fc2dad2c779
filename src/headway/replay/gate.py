"""Gates: one requirement on one metric, judged with the uncertainty of the measurement.

    [class:]metric OP limit      OP is <= where lower is better, >= where higher is
    p99_ttft<=+5%                signed percent: change relative to the baseline, which must not be 0
    attainment>=0.9, >=90%       share of the candidate; unsigned percent for shares only
    p99_tpot<=0.12s, <=120ms     seconds or milliseconds of the candidate
    goodput>=3.5                 requests (or tokens) a second of the candidate

A gate fails only when the whole interval lies beyond the limit, passes only when the whole interval lies within, and
otherwise cannot tell at this n. So a false alarm is as rare as one side of the interval: 2.5 % at 95 %.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.errors import InputError
from headway.replay import metrics
from headway.replay.compare import Change, Comparison
from headway.replay.metrics import Metric

PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell at this n"

_TOKEN = re.compile(r"\s*(?:(?P<class>[^\s:<>=]+)\s*:\s*)?(?P<metric>[A-Za-z0-9_.]+)\s*")
_LIMIT = re.compile(r"(?P<sign>[+-]?)(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>%|ms|s|)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A parsed gate. `limit` is a fraction (relative), seconds, a share or a rate, by `scale`."""

    text: str
    metric: Metric
    slo_class: str | None
    operator: Literal["<=", ">="]
    limit: float
    relative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What a gate said at one level: measured number with its interval, on the scale of the limit."""

    gate: Gate
    level: str  # candidate and load level
    outcome: str  # PASS, FAIL or CANNOT_TELL
    value: float | None
    low: float | None
    high: float | None
    detectable: float | None  # minimal detectable effect; relative gates only
    reason: str


def parse(text: str) -> Gate:
    """Return the gate that `text` states; `InputError` names the position (from 1) and the known metrics."""
    head = _TOKEN.match(text)
    if not head:
        raise _error(text, 0, "a metric")
    try:
        metric = metrics.parse(head["metric"])
    except InputError:
        raise _error(text, head.start("metric"), "a metric") from None
    rest = head.end()
    wanted = "<=" if metric.lower_is_better else ">="
    operator = text[rest : rest + 2]
    if operator != wanted:
        better = "lower" if metric.lower_is_better else "higher"
        raise _error(text, rest, f"{wanted} ({metric.name} is better {better})")
    start = rest + 2 + len(text[rest + 2 :]) - len(text[rest + 2 :].lstrip())
    tail = _LIMIT.match(text, start)
    if not tail:
        raise _error(text, start, "a number and a unit at the end, such as +5%, 120ms, 0.9")
    number = float(tail["sign"] + tail["number"])
    relative = _relative(text, metric, tail)
    factor = {"%": 0.01, "ms": 0.001}.get(tail["unit"], 1.0)
    return Gate(
        text=text.strip(),
        metric=metric,
        slo_class=head["class"],
        operator="<=" if metric.lower_is_better else ">=",
        limit=number * factor,
        relative=relative,
    )


def _relative(text: str, metric: Metric, tail: re.Match[str]) -> bool:
    at = tail.start("number")
    if tail["unit"] == "%":
        if tail["sign"]:
            return True
        if metric.kind == "share":
            return False
        raise _error(text, at, f"a sign before a change in percent (+{tail['number']}% or -{tail['number']}%)")
    if tail["sign"]:
        raise _error(text, tail.start("sign"), "no sign before an absolute limit (a change ends in %)")
    if metric.unit == "s" and tail["unit"] not in ("s", "ms"):
        raise _error(text, tail.end("number"), "a unit, s or ms")
    if metric.unit != "s" and tail["unit"]:
        raise _error(text, tail.start("unit"), f"no unit ({metric.name} is in {metric.unit})")
    if metric.kind == "share" and float(tail["number"]) > 1:
        raise _error(text, at, "a share from 0 to 1, or a percentage")
    return False


def _error(text: str, position: int, expected: str) -> InputError:
    found = repr(text[position:]) if text[position:].strip() else "the end"
    return InputError(
        f"gate {text!r}: position {position + 1}: found {found}: expected {expected} "
        f"(metrics: {metrics.known()}; form: [class:]metric<=+5%)"
    )


def judge(gate: Gate, comparison: Comparison, *, confidence: float) -> list[GateResult]:
    """Return the outcome of `gate` at every load level of `comparison`, which must hold its metric.

    `confidence` is that of the two-sided interval. Raises `InputError` for a class that the runs do not have, and for
    a relative limit on a baseline of 0.
    """
    results = []
    for level in comparison.levels:
        label = f"{comparison.other.name}, {level.level.label}"
        found = [c for c in level.changes if c.metric.name == gate.metric.name and c.slo_class == gate.slo_class]
        if not found:
            results.append(_absent(gate, label, level.changes))
        else:
            results.append(_judge(gate, label, found[0], confidence))
    return results


def _absent(gate: Gate, label: str, changes: Sequence[Change]) -> GateResult:
    known = sorted({change.slo_class for change in changes if change.slo_class})
    if gate.slo_class is not None and gate.slo_class not in known:
        listed = ", ".join(known) or "only one class, so leave it out"
        raise InputError(f"gate {gate.text!r}: class {gate.slo_class!r}: expected one of the runs' classes: {listed}")
    return GateResult(
        gate=gate, level=label, outcome=CANNOT_TELL, value=None, low=None, high=None, detectable=None,
        reason="the servers of both arms do not tell it",
    )  # fmt: skip


def _judge(gate: Gate, label: str, change: Change, confidence: float) -> GateResult:
    if gate.relative and change.base.value == 0.0 and change.too_small is None:
        where = f"class {change.slo_class}, " if change.slo_class else ""
        example = {"percentile": "50ms", "share": f"{abs(gate.limit) * 100:g}%"}.get(gate.metric.kind, "3.5")
        raise InputError(
            f"gate {gate.text!r}: the baseline's {gate.metric.name} is 0 ({where}{label}): a relative limit on 0 is "
            f"undefined: expected an absolute limit, such as {gate.metric.name}{gate.operator}{example}"
        )
    side = change.relative if gate.relative else change.other.contrast
    bounds = side.interval(confidence) if side is not None and change.too_small is None else None
    if side is None or bounds is None:
        why = change.too_small or (
            "no baseline to compare with" if gate.relative and change.base.value is None else "no value"
        )
        return GateResult(
            gate=gate, level=label, outcome=CANNOT_TELL, value=side.value if side else None, low=None, high=None,
            detectable=None, reason=why,
        )  # fmt: skip
    low, high = bounds
    detectable = side.detectable(confidence) if gate.relative else None
    below = gate.operator == "<="
    beyond = low > gate.limit if below else high < gate.limit
    within = high <= gate.limit if below else low >= gate.limit
    outcome, reason = (FAIL, "") if beyond else (PASS, "") if within else (CANNOT_TELL, "the interval holds the limit")
    if outcome == FAIL and gate.relative and change.under_floor:
        outcome, reason = CANNOT_TELL, "the change is under the noise floor of the machine"
    if outcome == CANNOT_TELL and detectable is not None:
        reason += f"; minimal detectable effect {detectable:.1%}"
    return GateResult(
        gate=gate, level=label, outcome=outcome, value=side.value, low=low, high=high, detectable=detectable,
        reason=reason,
    )  # fmt: skip


def gate_confidence(gates: int, confidence: float) -> float:
    """Return the confidence for each of several gates, so that any false alarm stays within 1 - `confidence`.

    Each gate errs on one side only, so one or two gates need no change; more are split (Bonferroni).
    """
    return 1.0 - (1.0 - confidence) * min(1.0, 2.0 / max(1, gates))
