"""ServeGen client profiles (github.com/alibaba/ServeGen, Apache-2.0; arXiv 2505.09999): a folder, not requests.

For client i, `chunk-i-trace.csv` (no header) has one row a window: start in seconds, rate in requests/s,
coefficient of variation, `Gamma` or `Weibull` (empty: no traffic), shape, scale in seconds;
`chunk-i-dataset.json` maps window starts to histograms {length: probability} of `input_tokens` and
`output_tokens`, each a Python literal in a string (empty: no request). Reading draws requests from them: gaps
of the fitted shape, rescaled so that their mean is 1 / rate (the Weibull fits do not keep the mean), input
and output lengths independently, because the profile tells no more.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from headway.errors import InputError
from headway.trace.assemble import MAX_SPAN_S, MAX_TOKENS, Rows
from headway.trace.selection import check_seed
from headway.trace.source import Source

MAX_REQUESTS = 20_000_000
#: Below it a fit says that nearly all gaps are 0, and its mean can't be computed.
LEAST_SHAPE = 0.01
_TRACE = re.compile(r"chunk-(\d+)-trace\.csv")


class Window(NamedTuple):
    """Arrivals of one client within [start_s, end_s)."""

    start_s: float
    end_s: float
    rate: float
    pattern: str
    shape: float


class Histogram(NamedTuple):
    """Lengths in tokens and their cumulative probabilities."""

    lengths: np.ndarray
    cumulative: np.ndarray

    def draw(self, random: np.random.Generator, n: int) -> np.ndarray:
        """Return `n` lengths."""
        return self.lengths[np.searchsorted(self.cumulative, random.random(n), side="right")]


def fits(source: Source) -> bool:
    """Tell whether the folder has profiles of clients."""
    return source.is_folder and any(_TRACE.fullmatch(file.name) for file in source.files())


def read(source: Source, *, seed: int = 0, start_s: float = 0.0, duration_s: float | None = None) -> Rows:
    """Draw the requests of [start_s, start_s + duration_s) of the profile; the whole of it without a duration.

    The same seed gives the same requests in a window, whichever part is drawn.
    """
    check_seed(seed)
    for name, value, least in (("start_s", start_s, 0.0), ("duration_s", duration_s, 1e-9)):
        if value is not None and not (math.isfinite(value) and value >= least):
            raise InputError(f"{name} = {value!r}: expected {'0 or more' if not least else 'more than 0'} seconds")
    end_s = float("inf") if duration_s is None else start_s + duration_s
    clients = sorted((int(match[1]), file) for file in source.files() if (match := _TRACE.fullmatch(file.name)))
    plans = [(client, file, _windows(file, start_s, end_s)) for client, file in clients]
    expected = sum(window.rate * (window.end_s - window.start_s) for *_, plan in plans for window in plan)
    if expected > MAX_REQUESTS:
        raise InputError(
            f"{source.path}: about {expected:.3g} requests: expected at most {MAX_REQUESTS:,}: "
            "ask for a part with a start and a duration"
        )
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    without = 0
    for client, file, plan in plans:
        if not plan:
            continue
        lengths = _lengths(file.with_name(f"chunk-{client}-dataset.json"))
        for window in plan:
            random = np.random.default_rng([seed, client, int(window.start_s)])
            arrivals = _arrivals(window, random)
            arrivals = arrivals[(arrivals >= start_s) & (arrivals < end_s)]
            pair = _pair_at(lengths, window.start_s)
            if pair is None:
                without += len(arrivals)
                continue
            parts.append((arrivals, pair[0].draw(random, len(arrivals)), pair[1].draw(random, len(arrivals))))
    arrivals, inputs, outputs = (
        (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else (np.zeros(0),) * 3
    )
    frame = pl.DataFrame({"arrival_s": arrivals, "input_tokens": inputs, "output_tokens": outputs}).with_columns(
        pl.lit(0, dtype=pl.Int64).alias("line"), pl.col("input_tokens", "output_tokens").cast(pl.Int64)
    )
    return Rows(
        frame=frame,
        dropped={"no lengths in the profile": without} if without else {},
        unsorted=True,
        notes=(f"drawn from the profiles of {len(clients)} clients, seed {seed}",),
    )


def _windows(file: Path, start_s: float, end_s: float) -> list[Window]:
    """Return the windows with traffic that touch [start_s, end_s)."""
    rows: list[tuple[float, float, str, float]] = []
    with file.open(newline="", encoding="utf-8", errors="replace") as stream:
        for line, row in enumerate(csv.reader(stream), start=1):
            if len(row) != 6:
                raise InputError.at(file, line, None, ",".join(row), "6 fields")
            numbers = []
            for key, text in zip(("start", "rate", "cv", "shape"), (*row[:3], row[4]), strict=True):
                try:
                    numbers.append(float(text))
                except ValueError:
                    numbers.append(math.nan)
                if not abs(numbers[-1]) <= MAX_SPAN_S:  # not a number, infinite, or beyond reason
                    raise InputError.at(file, line, key, text, f"a number up to {MAX_SPAN_S:g}")
            time, rate, _, shape = numbers
            pattern = row[3].strip()
            if pattern not in ("", "Gamma", "Weibull"):
                raise InputError.at(file, line, "pattern", pattern, "Gamma, Weibull or empty")
            if pattern and not (rate > 0 and shape >= LEAST_SHAPE):
                raise InputError.at(file, line, "rate, shape", (rate, shape), f"above 0, and at least {LEAST_SHAPE:g}")
            if rows and time <= rows[-1][0]:
                raise InputError.at(file, line, "start", time, "a window after the one above")
            rows.append((time, rate, pattern, shape))
    if len(rows) < 2:
        raise InputError(f"{file}: {len(rows)} windows: expected at least two, to know how long one is")
    ends = [row[0] for row in rows[1:]] + [2 * rows[-1][0] - rows[-2][0]]
    return [
        Window(time, end, rate, pattern, shape)
        for (time, rate, pattern, shape), end in zip(rows, ends, strict=True)
        if pattern and time < end_s and end > start_s
    ]


def _arrivals(window: Window, random: np.random.Generator) -> np.ndarray:
    """Return arrivals of a renewal process with mean gap 1 / rate within the window."""
    times = np.zeros(0)
    last = window.start_s
    batch = int(window.rate * (window.end_s - window.start_s) * 1.2) + 16
    while last < window.end_s:
        if window.pattern == "Gamma":
            gaps = random.gamma(window.shape, 1.0, batch) / window.shape
        else:
            gaps = random.weibull(window.shape, batch) / _weibull_mean(window.shape)
        new = last + np.cumsum(gaps / window.rate)
        times = np.concatenate([times, new])
        last = float(new[-1])
    return times[times < window.end_s]


def _weibull_mean(shape: float) -> float:
    return math.gamma(1.0 + 1.0 / shape)


def _lengths(file: Path) -> list[tuple[float, tuple[Histogram, Histogram]]]:
    """Return (window start, (inputs, outputs)) of the windows that have both, in the order of time."""
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{file}: missing: expected the lengths that belong to the arrivals beside it") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError.at(file, None, None, document, "an object of windows")
    found = []
    for start, fields in document.items():
        try:
            time = float(start)
        except ValueError:
            raise InputError.at(file, None, start, start, "a window start in seconds") from None
        pair = tuple(_histogram(file, start, name, fields) for name in ("input_tokens", "output_tokens"))
        if pair[0] is not None and pair[1] is not None:
            found.append((time, (pair[0], pair[1])))
    return sorted(found, key=lambda item: item[0])


def _histogram(file: Path, start: str, name: str, fields: dict[str, Any]) -> Histogram | None:
    if not isinstance(fields, dict):
        raise InputError.at(file, None, start, fields, "an object with input_tokens and output_tokens")
    text = fields.get(name, "{}")
    try:
        # Literals only: the data is text from elsewhere and is never run.
        table = ast.literal_eval(text)
        pairs = sorted((int(length), float(share)) for length, share in table.items())
        if not all(0 <= length <= MAX_TOKENS and 0 <= share < math.inf for length, share in pairs):
            raise ValueError
    except (ValueError, SyntaxError, AttributeError, TypeError, OverflowError, RecursionError, MemoryError):
        raise InputError.at(file, None, f"{start}.{name}", str(text)[:60], "a dict {tokens: share}") from None
    shares = np.array([share for _, share in pairs])
    if not pairs or shares.sum() <= 0:
        return None
    cumulative = np.cumsum(shares) / shares.sum()
    cumulative[-1] = 1.0
    return Histogram(np.array([length for length, _ in pairs], dtype=np.int64), cumulative)


def _pair_at(
    lengths: list[tuple[float, tuple[Histogram, Histogram]]], time: float
) -> tuple[Histogram, Histogram] | None:
    """Return the latest lengths that began at or before `time`."""
    earlier = [pair for start, pair in lengths if start <= time]
    return earlier[-1] if earlier else None
