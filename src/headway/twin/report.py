"""Predictions as a table for people and as one self-contained page with the Pareto chart."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from rich.table import Table

from headway.replay import svg
from headway.replay.summary import METHOD
from headway.twin.profile import Profile
from headway.twin.sweep import Prediction, name_of, pareto

#: Column -> how it reads for one prediction.
_COLUMNS = ("attained", "goodput req/s", "refused", "missed", "TTFT P50/P99 s", "TPOT P50/P99 ms", "busy", "twin error")


def table(predictions: Sequence[Prediction], profile: Profile) -> Table:
    """Return one row a prediction, with the twin's own recorded error beside it."""
    best = pareto(predictions)
    view = Table(title=f"twin of {profile.name} ({profile.label})", caption=caption(profile), caption_justify="left")
    keys = list(predictions[0].settings)
    for key in keys:
        view.add_column(key)
    for name in _COLUMNS:
        view.add_column(name, justify="right")
    if len(predictions) > 1:
        view.add_column("")
    for each, good in zip(predictions, best, strict=True):
        mark = ["*" if good else ""] if len(predictions) > 1 else []
        view.add_row(*(str(each.settings[key]) for key in keys), *cells(each), *mark)
    return view


def cells(prediction: Prediction) -> list[str]:
    """Return the cells of `_COLUMNS` for one prediction."""
    total, facts = prediction.summary["total"], prediction.facts
    return [
        _percent(total["attainment"]),
        _number(total["goodput_req_s"], 1.0, 2),
        f"{total['refused']} of {total['n']}",
        f"{total['missed']} of {total['accepted']}",
        _pair(total["ttft"], 1.0, 3),
        _pair(total["tpot"], 1e3, 1),
        _percent(facts["busy_share"]),
        error_text(prediction),
    ]


def error_text(prediction: Prediction) -> str:
    """Return the recorded error of the twin at this utilisation, or that there is none."""
    error = prediction.error
    if error is None:
        return "unknown"
    worst = max(error.errors.values(), default=0.0)
    return f"{worst * 100:.1f} % ({error.load})"


def caption(profile: Profile) -> str:
    """Return the lines under the table."""
    lines = [
        f"Percentiles by {METHOD} over served requests; attained = share of all offered; * = on the Pareto front of "
        "P99 TTFT, P99 TPOT and goodput."
    ]
    if profile.label == "estimated":
        lines.append("ESTIMATED profile: roofline from datasheets. Compare settings with it, do not promise numbers.")
    elif not profile.twin_error:
        lines.append("This profile has no recorded error of the twin against a real run (docs/twin.md).")
    else:
        lines.append("twin error: the largest recorded error of any metric against a real run at that utilisation.")
    return "\n".join(lines)


_STYLE = """
:root { color-scheme: light dark; --page:#fff; --ink:#1c2127; --soft:#59636e; --line:#d5dae0; --grid:#e8ebee;
  --arm0:#0b62a4; --arm1:#c2410c; --arm2:#15803d; --arm3:#7e22ce; --arm4:#a16207; --arm5:#0f766e; }
@media (prefers-color-scheme: dark) { :root { --page:#14181d; --ink:#e4e8ec; --soft:#9da7b3; --line:#3a424c;
  --grid:#262d35; --arm0:#6cb6ff; --arm1:#ffa057; --arm2:#57d98a; --arm3:#d2a8ff; --arm4:#e3b341; --arm5:#3fd1c2; } }
body { margin: 0 auto; padding: 24px; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; } p { color: var(--soft); }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; } tr.front td { font-weight: 600; }
.legend span { margin-right: 18px; } .legend i { display: inline-block; width: 12px; height: 12px;
  border-radius: 6px; background: var(--c); margin-right: 6px; }
svg text { fill: var(--soft); font: 11.5px system-ui, "DejaVu Sans", sans-serif; } svg .title { fill: var(--ink); }
svg .grid { stroke: var(--grid); } svg .frame { fill: none; stroke: var(--line); }
svg .dots { fill: none; stroke: var(--c); stroke-width: 10; stroke-linecap: round; opacity: .75; }
svg .line { fill: none; stroke: var(--c); stroke-width: 1.4; } svg .dashed { stroke-dasharray: 5 4; }
"""


def page(predictions: Sequence[Prediction], profile: Profile, trace: str) -> str:
    """Return one HTML page without any reference outside itself: charts, the front, every point."""
    best = pareto(predictions)
    groups = sorted({_group(each) for each in predictions})
    title = f"Headway twin: {len(predictions)} what-ifs on {trace}"
    pairs = (("ttft", "tpot"), ("ttft", None), ("tpot", None))
    charts = [chart for x, y in pairs if (chart := _chart(predictions, best, groups, x, y))]
    legend = "".join(
        f'<span><i style="--c:var(--arm{number % 6})"></i>{escape(name)}</span>' for number, name in enumerate(groups)
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in ("settings", *_COLUMNS))
    rows = "".join(
        f"<tr{' class=front' if good else ''}><td>{escape(name_of(each.settings) or '-')}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(each))
        + "</tr>\n"
        for each, good in zip(predictions, best, strict=True)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"<p>Profile {escape(profile.name)} ({profile.label}). Bold rows and the dashed line: no other point is better "
        f'in P99 TTFT, P99 TPOT and goodput at once.</p>\n<p class="legend">{legend}</p>\n<div class="charts">\n'
        + "\n".join(charts)
        + f'\n</div>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n'
        f"<p>{escape(caption(profile))}</p>\n</body>\n</html>\n"
    )


def _group(prediction: Prediction) -> str:
    return f"{prediction.facts['policy']} + {prediction.facts['admission']}"


def _chart(
    predictions: Sequence[Prediction], best: Sequence[bool], groups: Sequence[str], x: str, y: str | None
) -> str | None:
    """Return P99 of `x` against P99 of `y`, or against goodput when `y` is None."""
    total = [each.summary["total"] for each in predictions]
    xs = np.array([_or_nan(each[x]["p99_s"]) for each in total])
    x_axis = svg.log_axis(f"P99 {x.upper()}", xs)
    if y is None:
        ys = np.array([each["goodput_req_s"] or 0.0 for each in total])
        y_axis: svg.Axis | None = svg.Axis(
            label="goodput, requests/s", low=0.0, high=max(float(ys.max(initial=0.0)) * 1.1, 1e-6)
        )
    else:
        ys = np.array([_or_nan(each[y]["p99_s"]) for each in total])
        y_axis = svg.log_axis(f"P99 {y.upper()}", ys)
    if x_axis is None or y_axis is None:
        return None
    known = np.isfinite(xs) & np.isfinite(ys)
    series = []
    for number, name in enumerate(groups):
        for i, each in enumerate(predictions):
            if _group(each) == name and known[i]:
                about = f"{name_of(each.settings)}: {', '.join(cells(each)[:4])}"
                series.append(svg.Series(x=xs[i : i + 1], y=ys[i : i + 1], colour=number, about=about, kind="dots"))
    front = [i for i in np.argsort(xs, kind="stable") if best[i] and known[i]]
    if len(front) > 1:
        series.append(svg.Series(x=xs[front], y=ys[front], colour=5, about="Pareto front", dashed=True))
    against = "goodput" if y is None else f"P99 {y.upper()}"
    return svg.chart(f"P99 {x.upper()} against {against}", x_axis, y_axis, series)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _number(value: Any, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _pair(points: Any, scale: float, digits: int) -> str:
    return f"{_number(points['p50_s'], scale, digits)} / {_number(points['p99_s'], scale, digits)}"
