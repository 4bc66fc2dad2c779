"""Charts of a trace: as blocks for a terminal, and as one HTML page that needs no network."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import HeadwayError
from headway.trace.record import Trace
from headway.trace.shape import MIN_SPAN_S, PERCENTILE_METHOD, TraceShape

if TYPE_CHECKING:
    import altair

_BLOCKS = " ▁▂▃▄▅▆▇█"
SCATTER_POINTS = 2000


class ChartsMissingError(HeadwayError):
    """The library that puts charts into a page is not installed."""

    exit_code = 3


def rate_bins(trace: Trace, bins: int) -> tuple[np.ndarray, float]:
    """Return (requests/s in each of `bins` equal parts of the trace, seconds of a part)."""
    span = trace.span_s
    if span < MIN_SPAN_S:
        return np.array([float(len(trace))]), 1.0
    counts, _ = np.histogram(trace.frame["arrival_s"].to_numpy(), bins=bins, range=(0.0, span))
    return counts * bins / span, span / bins


def length_bins(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (counts, lower edges) of lengths in bins that grow by the square root of 2."""
    top = max(2, int(np.ceil(2 * np.log2(max(2, int(values.max()) + 1)))))
    edges = np.unique(np.floor(2.0 ** (np.arange(top + 1) / 2))).astype(np.int64)
    counts, _ = np.histogram(values, bins=np.append(edges, edges[-1] * 2 + 1))
    return counts, edges


def bars(values: np.ndarray, height: int = 4) -> list[str]:
    """Return `height` lines of block characters, the first the highest, one column a value."""
    top = float(values.max()) if len(values) else 0.0
    eighths = np.rint(values / top * height * 8).astype(int) if top > 0 else np.zeros(len(values), dtype=int)
    # What is there at all stays visible.
    eighths = np.where((values > 0) & (eighths == 0), 1, eighths)
    return [
        "".join(_BLOCKS[min(8, max(0, value - 8 * level))] for value in eighths) for level in reversed(range(height))
    ]


def terminal_lines(trace: Trace, width: int = 72) -> list[str]:
    """Return the arrival rate over time and the spread of both lengths as lines of text."""
    rates, part_s = rate_bins(trace, width)
    lines = [f"requests/s over time, one column = {part_s:.3g} s, highest {rates.max():.3g}/s", *bars(rates)]
    lines.append(f"0 s{f'{trace.span_s:.6g} s':>{max(0, len(rates) - 3)}}")
    for name in ("input_tokens", "output_tokens"):
        counts, edges = length_bins(trace.frame[name].to_numpy())
        first = int(np.flatnonzero(counts)[0])
        counts, edges = counts[first:], edges[first:]
        lines += ["", f"{name}, bins grow by sqrt(2), highest {counts.max():,} requests"]
        lines += bars(np.repeat(counts, 2), 3)
        lines.append(f"{edges[0]:<{len(counts)}}{edges[-1]:>{len(counts)}}")
    return lines


def html_page(trace: Trace, shape: TraceShape) -> str:
    """Return one HTML page with table and charts; the chart library lies in the page, nothing is fetched.

    Raises `ChartsMissingError` when that library (extra `html`) is not installed.
    """
    try:
        import vl_convert  # noqa: F401
    except ImportError:
        raise ChartsMissingError("HTML charts need the extra `html`: pip install '.[html]' in a clone") from None
    page = _chart(trace).to_html(inline=True, embed_options={"actions": False})
    title = html.escape(f"Trace {trace.source}")
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
        for name, text in (*facts(trace, shape), *_lengths(shape))
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in (*shape.warnings, *trace.history))
    style = (
        "body{font:15px system-ui,sans-serif;margin:2rem;max-width:64rem}"
        "th{text-align:left;padding-right:2rem;font-weight:500}td{font-variant-numeric:tabular-nums}"
    )
    body = f"<style>{style}</style><h1>{title}</h1><table>{rows}</table>" + (f"<ul>{notes}</ul>" if notes else "")
    # The script in the head holds tags of its own; the last one is that of the page.
    start, mark, end = page.rpartition("\n<body>")
    return start.replace("<head>", f"<head><title>{title}</title>", 1) + mark + body + end


def facts(trace: Trace, shape: TraceShape) -> list[tuple[str, str]]:
    """Return what `inspect` prints beside the percentiles, as (name, text)."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in trace.report.dropped.items()) or "none"
    rows = [
        ("format", trace.format),
        ("SHA-256 of the source", trace.sha256),
        ("rows read / kept / dropped", f"{trace.report.read:,} / {trace.report.kept:,} / {dropped}"),
        ("requests shown", f"{shape.n:,}"),
        ("span", f"{shape.span_s:,.6g} s"),
        ("mean rate, (n - 1) / span", _maybe(shape.rate, "requests/s")),
        ("most in 1 s / in 10 s", f"{shape.peak_1s:,} / {shape.peak_10s:,} requests"),
        ("longest silence", f"{shape.longest_silence_s:.4g} s"),
        ("CV of gaps (Poisson: 1)", _maybe(shape.gap_cv, "")),
        ("index of dispersion, 1 s bins (Poisson: 1)", _maybe(shape.dispersion, "")),
        (
            "tokens in / out",
            f"{_maybe(shape.input_tokens_per_s, '')} / {_maybe(shape.output_tokens_per_s, 'per s')}",
        ),
    ]
    if shape.classes:
        rows.append(("SLO classes", ", ".join(f"{name} {count:,}" for name, count in shape.classes.items())))
    if shape.prefixes is not None:
        p = shape.prefixes
        text = f"{p.hit_block_share:.1%} of {p.blocks:,} blocks of {p.block_size} tokens, "
        text += f"{p.hit_token_share:.1%} of input tokens, {p.requests_with_hit:,} requests with a hit"
        rows.append(("seen before (endless prefix cache)", text))
    if shape.sessions is not None:
        s = shape.sessions
        text = f"{s.sessions:,} with {s.requests:,} requests, turns p50 {s.turns.p50:g}, max {s.turns.max:g}"
        if s.think_s is not None:
            text += f", think time p50 {s.think_s.p50:.3g} s, p90 {s.think_s.p90:.3g} s (n = {s.think_s.n:,})"
        rows.append(("sessions", text))
    return rows


def _lengths(shape: TraceShape) -> list[tuple[str, str]]:
    rows = []
    for name in ("input_tokens", "output_tokens", "context_tokens"):
        found = getattr(shape, name)
        points = " / ".join(f"{getattr(found, point):,.0f}" for point in ("p50", "p90", "p99", "max"))
        label = f"{name.removesuffix('_tokens')} tokens, mean; p50 / p90 / p99 / max"
        rows.append((label, f"{found.mean:,.1f}; {points} (n = {found.n:,}, {PERCENTILE_METHOD})"))
    return rows


def _maybe(value: float | None, unit: str) -> str:
    return "not defined (too few arrivals)" if value is None else f"{value:,.4g} {unit}".rstrip()


def _chart(trace: Trace) -> altair.VConcatChart:
    import altair as alt

    rates, part_s = rate_bins(trace, 400)
    points: list[dict[str, Any]] = [
        {"second": index * part_s, "requests/s": float(rate)} for index, rate in enumerate(rates)
    ]
    over_time = (
        alt.Chart(alt.Data(values=points), title=f"Arrivals, parts of {part_s:.3g} s")
        .mark_area(interpolate="step-after")
        .encode(x=alt.X("second:Q", title="seconds from the first arrival"), y="requests/s:Q")
        .properties(width=760, height=160)
    )
    lengths = []
    for name in ("input_tokens", "output_tokens"):
        counts, edges = length_bins(trace.frame[name].to_numpy())
        values = [
            {"from": int(low), "to": int(high), "requests": int(count)}
            for low, high, count in zip(edges, np.append(edges[1:], edges[-1] * 2), counts, strict=True)
        ]
        lengths.append(
            alt.Chart(alt.Data(values=values), title=name)
            .mark_bar()
            .encode(
                x=alt.X("from:Q", bin="binned", scale=alt.Scale(type="log", base=2), title="tokens"),
                x2="to:Q",
                y="requests:Q",
                tooltip=["from:Q", "to:Q", "requests:Q"],
            )
            .properties(width=355, height=160)
        )
    sample = trace.frame
    if sample.height > SCATTER_POINTS:
        sample = sample.sample(SCATTER_POINTS, seed=0)
    dots = sample.select("input_tokens", "output_tokens", "slo_class").to_dicts()
    colour = {"color": "slo_class:N"} if sample["slo_class"].null_count() < sample.height else {}
    joint = (
        alt.Chart(alt.Data(values=dots), title=f"Input and output, {len(dots):,} of {len(trace):,} requests")
        .mark_circle(size=14, opacity=0.4)
        .encode(
            x=alt.X("input_tokens:Q", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("output_tokens:Q", scale=alt.Scale(type="log", base=2)),
            **colour,
        )
        .properties(width=760, height=260)
    )
    return alt.vconcat(over_time, alt.hconcat(*lengths), joint)
