"""Line, step and dot charts as inline SVG, coloured by CSS variables so that a page can be light or dark.

No chart library: one page must work without a network at a few kilobytes a chart (docs/log.md has the sizes measured).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 34, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis: what is on it, its scale and how its ticks read."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    unit: Literal["", "s", "share"] = ""
    low: float
    high: float

    def place(self, values: Floats) -> Floats:
        """Return positions from 0 to 1; values outside are clipped to the frame."""
        low, high, values = self.low, self.high, np.asarray(values, dtype=float)
        if self.scale == "log":
            low, high, values = math.log(low), math.log(high), np.log(np.maximum(values, low))
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def ticks(self) -> list[float]:
        """Return round numbers inside the axis, at most about eight."""
        if self.scale == "log":
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            span = math.log10(self.high / self.low)
            steps = (1, 2, 5) if span < 2.2 else (1, 3) if span < 3.5 else (1,)
            found = [step * 10.0**decade for decade in decades for step in steps]
        else:
            raw = (self.high - self.low) / 6
            power = 10.0 ** math.floor(math.log10(raw))
            step = power * next(each for each in (1, 2, 5, 10) if each * power >= raw)
            found = [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]

    def name(self, tick: float) -> str:
        """Return the label of a tick."""
        if self.unit == "share":
            return f"{tick * 100:g} %"
        if self.unit == "s" and self.scale == "log":
            return f"{tick * 1e3:g} ms" if tick < 0.9999 else f"{tick:g} s"
        return f"{tick:,.10g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve: `colour` is the number of the arm, `about` the tooltip."""

    x: Floats
    y: Floats
    colour: int
    about: str
    kind: Literal["line", "step", "dots"] = "line"
    dashed: bool = False


def log_axis(label: str, values: Floats, unit: Literal["", "s"] = "s") -> Axis | None:
    """Return a log axis around the positive finite `values`; None when there are none."""
    known = values[np.isfinite(values) & (values > 0)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    if high < 2.0 * low:  # a nearly constant value still needs a readable axis
        low, high = low / 1.5, high * 1.5
    return Axis(label=label, scale="log", unit=unit, low=low / 1.05, high=high * 1.05)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], *, guides: Sequence[tuple[float, str]] = ()) -> str:
    """Return one SVG element. `guides` are named vertical lines, such as a target."""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
        *_frame(x, y),
        *(_guide(x, at, name) for at, name in guides if x.low <= at <= x.high),
        *(_curve(x, y, each) for each in series),
        "</svg>",
    ]
    return "\n".join(parts)


def _across(position: Floats | float) -> Floats | float:
    return _LEFT + position * (WIDTH - _LEFT - _RIGHT)


def _down(position: Floats | float) -> Floats | float:
    return HEIGHT - _BOTTOM - position * (HEIGHT - _TOP - _BOTTOM)


def _frame(x: Axis, y: Axis) -> list[str]:
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    parts = []
    for tick in y.ticks():
        at = float(_down(float(y.place(np.array([tick]))[0])))
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 6}" y="{at + 3.5:.1f}" text-anchor="end">{y.name(tick)}</text>')
    for tick in x.ticks():
        at = float(_across(float(x.place(np.array([tick]))[0])))
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{x.name(tick)}</text>')
    middle = (top + bottom) / 2
    parts += [
        f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>',
        f'<text class="label" x="{(left + right) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">'
        f"{escape(x.label)}</text>",
        f'<text class="label" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.label)}</text>",
    ]
    return parts


def _guide(x: Axis, value: float, name: str) -> str:
    at = float(_across(float(x.place(np.array([value]))[0])))
    # The name goes to the side that has room.
    side, anchor = (-4, "end") if at > WIDTH - 120 else (4, "start")
    return (
        f'<line class="guide" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        f'<text class="tick" x="{at + side:.1f}" y="{HEIGHT - _BOTTOM - 6}" text-anchor="{anchor}">'
        f"{escape(name)}</text>"
    )


def _curve(x: Axis, y: Axis, series: Series) -> str:
    across, down = _across(x.place(series.x)), _down(y.place(series.y))
    about = f"<title>{escape(series.about)}</title>"
    colour = f"--c:var(--arm{series.colour % 6})"
    if series.kind == "dots":
        # One path of zero-length round-capped strokes: far smaller than a circle element for each request.
        dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(across, down, strict=True))
        return f'<path class="dots" style="{colour}" d="{dots}">{about}</path>'
    points = [f"{a:.1f} {b:.1f}" for a, b in zip(across, down, strict=True)]
    if series.kind == "step":
        path = f"M{points[0]}" + "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(across[1:], down[1:], strict=True))
    else:
        path = "M" + "L".join(points)
    dashed = " dashed" if series.dashed else ""
    return f'<path class="line{dashed}" style="{colour}" d="{path}">{about}</path>'
