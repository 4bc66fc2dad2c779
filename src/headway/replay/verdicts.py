"""A comparison as text: Rich tables, Markdown, JSON. Every number with its n, interval and method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headway.printable import plain as plain_text
from headway.replay.compare import Change, Comparison, LevelResult, Side
from headway.replay.contrast import POWER, Contrast
from headway.replay.gate import GateResult
from headway.replay.metrics import PRIMARY
from headway.replay.noise import NoiseFloor
from headway.replay.server_metrics import in_words
from headway.replay.stats import PERCENTILE_METHOD

FORMAT = 1
#: Lines that fit a screen; above that, classes show only these metrics.
_SCREEN = 24
_CLASS_METRICS = (*PRIMARY, "attainment", "goodput", "refused", "failed")
HEADER = ("metric", "class", "baseline", "candidate", "change", "interval", "detectable", "verdict")


def number(value: float | None, unit: str) -> str:
    """Return a value with its unit: `812 ms`, `1.23 s`, `95.2 %`, `9.55 req/s`; a dash for none."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if abs(value) < 0.9995 else f"{value:.3g} s"
    return f"{value * 100:.1f} %" if unit == "share" else f"{value:.3g} {unit}"


def signed(value: float | None, change: Change) -> str:
    """Return a change: percent of the baseline, or percentage points for shares."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    return f"{value * 100:+.1f} {'pp' if change.metric.kind == 'share' else '%'}"


def row(change: Change) -> list[str]:
    """Return the cells of one change, in the order of `HEADER`."""
    main = change.main
    bounds = main.interval(change.confidence) if main is not None and change.too_small is None else None
    detectable = main.detectable(change.confidence) if main is not None and bounds is not None else None
    verdict = change.verdict
    if change.too_small:
        verdict += f" ({change.too_small})"
    elif change.under_floor:
        verdict += " (under the noise floor)" if math.isfinite(change.floor or 0) else " (no noise floor known)"
    interval = "-"
    if bounds is not None:
        interval = f"{signed(bounds[0], change)} to {signed(bounds[1], change)}"
        interval += "" if change.confidence == 0.95 else f" ({change.confidence:.4g})"
    return [
        change.metric.name,
        change.slo_class or "all",
        _side(change.base, change),
        _side(change.other, change),
        signed(main.value, change) if main is not None else "-",
        interval,
        signed(detectable, change).replace("+", "") if detectable is not None else "-",
        verdict,
    ]


def _side(side: Side, change: Change) -> str:
    return f"{number(side.value, change.metric.unit)} (n {side.n})"


def method(comparison: Comparison) -> str:
    """Return the sentence that says how everything was computed."""
    return (
        f"Percentiles: {PERCENTILE_METHOD} over requests that ended well, latency from the scheduled arrival; "
        f"shares of all offered requests. Intervals: moving-block bootstrap, {comparison.draws} draws, seed "
        f"{comparison.seed}, 95 % unless given; {' and '.join(PRIMARY)} each at 97.5 %, so that both hold together "
        f"at 95 %; every other line stands alone (1 in 20 crosses by chance). detectable: the true change that this "
        f"n calls in {POWER:.0%} of cases."
    )


def headline(comparison: Comparison, level: LevelResult) -> str:
    """Return one line: candidate, level and the verdict on the primary pair."""
    return (
        f"{comparison.other.name} against {comparison.base.name}, {level.level.label}: "
        f"P99 TTFT and P99 TPOT together: {level.together}"
    )


def level_notes(level: LevelResult) -> list[str]:
    """Return what must be said about a level beside its table."""
    one, two = level.blocks
    blocks = f"{one}" if one == two else f"{one} and {two}"
    repeats = f"{len(level.level.base)} and {len(level.level.other)}"
    return [f"{level.level.pairing}; runs: {repeats}; blocks of {blocks} requests", *level.notes]


def server_notes(comparison: Comparison) -> list[str]:
    """Return what the servers of both arms counted themselves, one line a run that has it."""
    lines = []
    for arm in (comparison.base, comparison.other):
        for run in arm.runs:
            name = arm.name if arm.name == run.path.name else f"{arm.name} ({run.path.name})"
            if words := in_words((run.meta.get("server") or {}).get("metrics") or {}):
                lines.append(f"{name}, the server's own histograms: {words}")
    return lines


def _metrics(comparison: Comparison) -> dict[str, Any]:
    runs = (*comparison.base.runs, *comparison.other.runs)
    return {str(run.path): told for run in runs if (told := (run.meta.get("server") or {}).get("metrics"))}


def gate_line(result: GateResult) -> str:
    """Return one line for a gate outcome."""
    unit = "%" if result.gate.relative else result.gate.metric.unit

    def show(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value * 100:+.1f} %" if unit == "%" else number(value, unit)

    found = f"measured {show(result.value)}"
    if result.low is not None:
        found += f", interval {show(result.low)} to {show(result.high)}"
    reason = f" ({result.reason})" if result.reason else ""
    return f"gate {result.gate.text}: {result.outcome}: {found}{reason}; {result.level}"


def _shown(level: LevelResult) -> tuple[list[Change], list[str]]:
    """Return the changes that fit a screen, with a line on what was left out."""
    if len(level.changes) <= _SCREEN:
        return list(level.changes), []
    shown = [each for each in level.changes if each.slo_class is None or each.metric.name in _CLASS_METRICS]
    left = len(level.changes) - len(shown)
    return shown, [f"{left} more lines by class: see --json or --html"] if left else []


def tables(comparison: Comparison) -> list:
    """Return one Rich table a load level."""
    from rich.table import Table

    colours = {"better": "green", "worse": "red"}
    made = []
    for level in comparison.levels:
        shown, left = _shown(level)
        caption = "\n".join([*left, *level_notes(level), *server_notes(comparison), method(comparison)])
        title = plain_text(headline(comparison, level))
        table = Table(title=title, caption=plain_text(caption), caption_justify="left", title_justify="left")
        for position, name in enumerate(HEADER):
            table.add_column(name, justify="left" if position in (0, 1, 7) else "right", overflow="fold")
        for change in shown:
            table.add_row(*map(plain_text, row(change)), style=colours.get(change.verdict))
        made.append(table)
    return made


def markdown(comparisons: Sequence[Comparison], gates: Sequence[GateResult] = ()) -> str:
    """Return the whole comparison as Markdown."""
    lines: list[str] = []
    for comparison in comparisons:
        for level in comparison.levels:
            lines += [f"### {headline(comparison, level)}", "", "| " + " | ".join(HEADER) + " |"]
            lines.append("|---|---|" + "---:|" * 5 + "---|")
            lines += ["| " + " | ".join(row(change)) + " |" for change in level.changes]
            lines += ["", *(f"- {note}" for note in level_notes(level)), ""]
        lines += [*(f"- {note}" for note in server_notes(comparison)), "", method(comparison), ""]
    if gates:
        lines += ["### Gates", "", *(f"- {gate_line(result)}" for result in gates), ""]
    return "\n".join(lines)


def as_json(comparisons: Sequence[Comparison], gates: Sequence[GateResult] = ()) -> dict[str, Any]:
    """Return everything as a JSON-ready dictionary; infinite values are the string "inf"."""
    return {
        "headway_compare": FORMAT,
        "percentile_method": PERCENTILE_METHOD,
        "comparisons": [
            {
                "baseline": {"name": c.base.name, "runs": [str(run.path) for run in c.base.runs]},
                "candidate": {"name": c.other.name, "runs": [str(run.path) for run in c.other.runs]},
                "draws": c.draws,
                "seed": c.seed,
                "server_metrics": _metrics(c),
                "levels": [_level(level) for level in c.levels],
            }
            for c in comparisons
        ],
        "gates": [
            {
                "gate": r.gate.text,
                "level": r.level,
                "outcome": r.outcome,
                "limit": r.gate.limit,
                "relative": r.gate.relative,
                "value": plain(r.value),
                "low": plain(r.low),
                "high": plain(r.high),
                "minimal_detectable_effect": plain(r.detectable),
                "reason": r.reason,
            }
            for r in gates
        ],
    }


def _level(level: LevelResult) -> dict[str, Any]:
    return {
        "label": level.level.label,
        "paired": level.level.paired,
        "pairing": level.level.pairing,
        "repeats": [len(level.level.base), len(level.level.other)],
        "block_requests": list(level.blocks),
        "together": level.together,
        "notes": list(level.notes),
        "changes": [_change(change) for change in level.changes],
    }


def _change(change: Change) -> dict[str, Any]:
    usable = change.too_small is None
    return {
        "metric": change.metric.name,
        "meaning": change.metric.meaning,
        "unit": change.metric.unit,
        "class": change.slo_class,
        "baseline": _side_json(change.base, change.confidence, usable),
        "candidate": _side_json(change.other, change.confidence, usable),
        "relative_change": _contrast(change.relative, change.confidence, usable),
        "difference": _contrast(change.difference, change.confidence, usable),
        "confidence": change.confidence,
        "verdict": change.verdict,
        "too_small": change.too_small,
        "under_noise_floor": change.under_floor,
    }


def _side_json(side: Side, confidence: float, usable: bool) -> dict[str, Any]:
    bounds = side.contrast.interval(confidence) if side.contrast is not None and usable else None
    low, high = bounds or (None, None)
    return {
        "value": plain(side.value), "low": plain(low), "high": plain(high), "n": side.n, "offered": side.offered,
    }  # fmt: skip


def _contrast(contrast: Contrast | None, confidence: float, usable: bool) -> dict[str, Any] | None:
    if contrast is None:
        return None
    low, high = (contrast.interval(confidence) if usable else None) or (None, None)
    detectable = contrast.detectable(confidence) if usable else None
    return {
        "value": plain(contrast.value),
        "low": plain(low),
        "high": plain(high),
        "minimal_detectable_effect": plain(detectable),
    }


def plain(value: float | None) -> float | str | None:
    """Return `value` as JSON can hold it."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def noise_table(floor: NoiseFloor) -> Any:
    """Return the noise floor as a Rich table."""
    from rich.table import Table

    table = Table(
        title=f"Noise floor from {floor.repeats} repeats of one configuration",
        caption=(
            f"Floor of one run against one at {floor.confidence:.0%}: t({floor.repeats - 1}) x sd between repeats "
            "x sqrt(2). A change under it says nothing about the configuration."
        ),
        caption_justify="left",
    )
    for name in ("metric", "lowest", "highest", "sd between repeats", "floor"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for each in floor.floors:
        known = [value for value in each.values if value is not None]
        unit = "pp" if each.scale == "plain" else "%"
        table.add_row(
            each.metric,
            f"{min(known):.4g}" if known else "-",
            f"{max(known):.4g}" if known else "-",
            "-" if each.sd is None else f"{each.sd * 100:.2f} {unit}",
            "none" if each.one_against_one is None else f"{each.one_against_one * 100:.2f} {unit}",
        )
    return table
