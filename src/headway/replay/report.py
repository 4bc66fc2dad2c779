"""A comparison as one self-contained HTML page: verdicts, gates and charts, no script, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
import polars as pl
from numpy.typing import NDArray

from headway.replay import verdicts
from headway.replay.compare import BETTER, WORSE, Comparison, LevelResult
from headway.replay.gate import FAIL, PASS, GateResult
from headway.replay.stats import percentile
from headway.replay.svg import Axis, Series, chart, log_axis

Floats = NDArray[np.float64]

#: Points of a curve, of a scatter plot, bins of a timeline; more cannot be seen and only make the page heavy.
_CURVE, _DOTS, _BINS = 400, 1500, 150

_STYLE = """
:root { color-scheme: light dark; --page:#ffffff; --ink:#1c2127; --soft:#59636e; --line:#d5dae0; --grid:#e8ebee;
  --card:#f6f8fa; --good:#116329; --bad:#b42318; --arm0:#0b62a4; --arm1:#c2410c; --arm2:#15803d; --arm3:#7e22ce;
  --arm4:#a16207; --arm5:#0f766e; }
@media (prefers-color-scheme: dark) { :root { --page:#14181d; --ink:#e4e8ec; --soft:#9da7b3; --line:#3a424c;
  --grid:#262d35; --card:#1b2128; --good:#56d364; --bad:#ff7b72; --arm0:#6cb6ff; --arm1:#ffa057; --arm2:#57d98a;
  --arm3:#d2a8ff; --arm4:#e3b341; --arm5:#3fd1c2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p, li { color: var(--soft); margin: 4px 0; } ul { padding-left: 20px; }
.together { font-size: 16px; color: var(--ink); } .better { color: var(--good); font-weight: 600; }
.worse { color: var(--bad); font-weight: 600; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } td.words, th.words { text-align: left; }
td.verdict { white-space: normal; }
.charts { display: grid; gap: 16px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
figure { margin: 0; padding: 10px; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
figcaption { color: var(--soft); font-size: 13px; } svg { width: 100%; height: auto; display: block; }
.legend span { margin-right: 18px; color: var(--ink); } .legend i { display: inline-block; width: 22px; height: 0;
  border-top: 3px solid var(--c); vertical-align: middle; margin-right: 6px; }
svg text { fill: var(--soft); font: 11.5px system-ui, "DejaVu Sans", sans-serif; }
svg text.title { fill: var(--ink); font-size: 13.5px; font-weight: 600; } svg text.label { font-size: 12px; }
svg .grid { stroke: var(--grid); } svg .frame { fill: none; stroke: var(--line); }
svg .guide { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
svg .dashed { stroke-dasharray: 5 4; stroke-width: 1.4; }
svg .dots { fill: none; stroke: var(--c); stroke-width: 3.2; stroke-linecap: round; opacity: .5; }
@media print { figure { break-inside: avoid; } }
"""


def page(comparisons: Sequence[Comparison], gates: Sequence[GateResult] = ()) -> str:
    """Return the page for candidates that were compared with the same baseline."""
    base = comparisons[0].base.name
    names = ", ".join(comparison.other.name for comparison in comparisons)
    title = f"Headway: {names} against {base}"
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_runs(comparisons))}</p>"]
    if gates:
        body += ["<h2>Gates</h2>", "<ul>", *(_gate(result) for result in gates), "</ul>"]
    for number in range(len(comparisons[0].levels)):
        body += _level(comparisons, number)
    body += [
        "<h2>Method</h2>",
        *(f"<p>{escape(text)}</p>" for text in dict.fromkeys(map(verdicts.method, comparisons))),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _runs(comparisons: Sequence[Comparison]) -> str:
    arms = [comparisons[0].base, *(comparison.other for comparison in comparisons)]
    return "; ".join(f"{arm.name}: {', '.join(run.path.name for run in arm.runs)}" for arm in arms)


def _gate(result: GateResult) -> str:
    kind = {PASS: "better", FAIL: "worse"}.get(result.outcome, "")
    return f'<li class="{kind}">{escape(verdicts.gate_line(result))}</li>'


def _level(comparisons: Sequence[Comparison], number: int) -> list[str]:
    levels = [comparison.levels[number] for comparison in comparisons]
    parts = [f"<h2>{escape(levels[0].level.label)}</h2>"]
    arms = [(comparisons[0].base.name, levels[0].level.base)]
    arms += [(comparison.other.name, level.level.other) for comparison, level in zip(comparisons, levels, strict=True)]
    swatches = "".join(
        f'<span><i style="--c:var(--arm{colour % 6})"></i>{escape(name)}</span>'
        for colour, (name, _) in enumerate(arms)
    )
    for comparison, level in zip(comparisons, levels, strict=True):
        kind = {BETTER: "better", WORSE: "worse"}.get(level.together, "")
        parts.append(f'<p class="together {kind}">{escape(verdicts.headline(comparison, level))}</p>')
    parts += [f'<p class="legend">{swatches}</p>', '<div class="charts">']
    drawn = [
        _cdf(arms, "ttft", "TTFT", of_all=True), _cdf(arms, "tpot", "TPOT", of_all=False),
        _timeline(arms, waiting=False), _timeline(arms, waiting=True), _against_length(arms),
    ]  # fmt: skip
    parts += [f"<figure>{svg}<figcaption>{escape(words)}</figcaption></figure>" for svg, words in filter(None, drawn)]
    parts.append("</div>")
    for comparison, level in zip(comparisons, levels, strict=True):
        parts += [
            f"<h3>{escape(comparison.other.name)} against {escape(comparison.base.name)}</h3>",
            _table(level),
        ]
        notes = [*verdicts.level_notes(level), *verdicts.server_notes(comparison)]
        parts += ["<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
    return parts


def _table(level: LevelResult) -> str:
    words = {0, 1, 7}
    head = "".join(f"<th{' class=words' if i in words else ''}>{name}</th>" for i, name in enumerate(verdicts.HEADER))
    rows = []
    for change in level.changes:
        cells = verdicts.row(change)
        kind = {BETTER: "better", WORSE: "worse"}.get(change.verdict, "")
        rows.append(
            f'<tr title="{escape(change.metric.meaning, quote=True)}">'
            + "".join(
                f'<td class="words">{escape(c)}</td>' if i in (0, 1)
                else f'<td class="words verdict {kind}">{escape(c)}</td>' if i == 7
                else f"<td>{escape(c)}</td>"
                for i, c in enumerate(cells)
            )
            + "</tr>"
        )  # fmt: skip
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


_Arms = Sequence[tuple[str, Sequence[pl.DataFrame]]]


def _cdf(arms: _Arms, metric: str, name: str, *, of_all: bool) -> tuple[str, str] | None:
    column = f"{metric}_s"
    served = [
        pl.concat([frame.filter(pl.col("status") == "ok") for frame in frames])[column].drop_nulls().sort().to_numpy()
        for _, frames in arms
    ]
    x = log_axis(f"{name} (log scale)", np.concatenate(served))
    if x is None:
        return None
    series = []
    for colour, ((arm, frames), values) in enumerate(zip(arms, served, strict=True)):
        total = sum(frame.height for frame in frames) if of_all else len(values)
        if not len(values):
            continue
        # Even steps of the body, and every one of the slowest requests: the tail is what matters.
        n = len(values)
        keep = np.union1d(np.linspace(0, n - 1, _CURVE).astype(int), np.arange(max(0, n - _CURVE // 2), n))
        marks = ", ".join(f"P{q * 100:g} {verdicts.number(percentile(values, q), 's')}" for q in (0.5, 0.9, 0.99))
        series.append(
            Series(
                x=np.concatenate([values[keep], [x.high]]),
                y=np.concatenate([(keep + 1) / total, [n / total]]),
                colour=colour,
                kind="step",
                about=f"{arm}: n {n} of {total}; {marks}",
            )
        )
    share = "offered requests" if of_all else "requests"
    y = Axis(label=f"share of {share}", unit="share", low=0.0, high=1.0)
    words = f"Share of {share} with a {name} of at most x"
    words += "; a curve that ends below 100 % did not serve the rest." if of_all else ", of those that have one."
    return chart(f"{name}, cumulative", x, y, series, guides=_targets(arms, metric)), words


def _targets(arms: _Arms, metric: str) -> list[tuple[float, str]]:
    frames = [frame for _, all_frames in arms for frame in all_frames]
    rows = pl.concat([frame.select("slo_class", f"{metric}_target_s") for frame in frames]).drop_nulls(
        f"{metric}_target_s"
    )
    by_target: dict[float, list[str]] = {}
    for name, target in sorted(rows.unique().iter_rows(), key=str):
        by_target.setdefault(target, []).append(name or "default")
    classes = {name for names in by_target.values() for name in names}
    return [
        (target, "target" if len(classes) == 1 or len(by_target) == 1 else f"target {', '.join(names)}")
        for target, names in sorted(by_target.items())
    ]


def _occupancy(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """Return the mean number of open intervals [start, end) in every bin between `edges`."""

    def passed(moments: Floats) -> Floats:
        # Sum of max(0, edge - moment) over all moments, at every edge.
        ordered = np.sort(moments)
        before = np.searchsorted(ordered, edges)
        return before * edges - np.concatenate([[0.0], np.cumsum(ordered)])[before]

    return np.diff(passed(starts) - passed(ends)) / np.diff(edges)


def _timeline(arms: _Arms, *, waiting: bool) -> tuple[str, str] | None:
    told = all(frames[0]["queue_s"].null_count() < frames[0].height for _, frames in arms)
    series, most, last = [], 1.0, 0.0
    for colour, (arm, frames) in enumerate(arms):
        frame = frames[0].filter(pl.col("sent_s").is_not_null())
        if frame.is_empty():
            return None
        end = frame.select(pl.max_horizontal("end_s", "last_token_s", "sent_s")).to_series().to_numpy()
        sent = frame["sent_s"].to_numpy()
        until = end
        if waiting:
            first = sent + frame["queue_s"].to_numpy() if told else frame["first_token_s"].to_numpy()
            until = np.where(np.isnan(first), end, np.minimum(first, end))
        edges = np.linspace(min(0.0, float(sent.min())), max(float(end.max()), 1e-3), _BINS + 1)
        count = _occupancy(sent, until, edges)
        most, last = max(most, float(count.max())), max(last, edges[-1])
        series.append(
            Series(
                x=(edges[1:] + edges[:-1]) / 2,
                y=count,
                colour=colour,
                about=f"{arm}: at most {count.max():.1f}",
            )
        )
    x = Axis(label="time since the start of the run (s)", low=0.0, high=last)
    y = Axis(label="requests", low=0.0, high=most * 1.05)
    if waiting:
        title = "Queue" if told else "Waiting for the first token"
        what = "in the server's queue" if told else "sent and without a token (the server does not tell its queue)"
    else:
        title, what = "In flight", "sent and not ended"
    words = f"Requests {what}; first run of each arm, mean over {_BINS} bins."
    return chart(title, x, y, series), words


def _against_length(arms: _Arms) -> tuple[str, str] | None:
    series, tokens, times = [], [], []
    for colour, (arm, frames) in enumerate(arms):
        rows = pl.concat(frames).filter((pl.col("status") == "ok") & pl.col("ttft_s").is_not_null())
        if rows.is_empty():
            continue
        kept = rows.gather_every(math.ceil(rows.height / _DOTS))
        tokens.append(kept["input_tokens"].to_numpy().astype(float))
        times.append(kept["ttft_s"].to_numpy())
        series.append(
            Series(
                x=tokens[-1],
                y=times[-1],
                colour=colour,
                kind="dots",
                about=f"{arm}: {kept.height} of {rows.height} requests",
            )
        )
    if not series:
        return None
    x = log_axis("input length (tokens, log scale)", np.concatenate(tokens), unit="")
    y = log_axis("TTFT (log scale)", np.concatenate(times))
    if x is None or y is None:
        return None
    return chart(
        "TTFT against input length", x, y, series
    ), f"Served requests, at most {_DOTS} of each arm, evenly taken."
