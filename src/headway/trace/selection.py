"""Cut a slice out of a trace and fit it to a machine: window, speed, lengths, classes; all written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from headway.errors import InputError
from headway.trace.assemble import MAX_SPAN_S, MAX_TOKENS
from headway.trace.record import Trace


def select(
    trace: Trace,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
    limit: int | None = None,
    time_scale: float = 1.0,
    rate: float | None = None,
    max_input: int | None = None,
    max_output: int | None = None,
    input_scale: float = 1.0,
    output_scale: float = 1.0,
    seed: int = 0,
    classes: Sequence[tuple[str, int | None]] | None = None,
    spread_s: float | None = None,
) -> Trace:
    """Return the requests of a window of `trace`, changed as asked; what was done is appended to `history`.

    In this order:

    - `spread_s`: spread arrivals that were rounded to ticks `spread_s` apart: each moves later by a uniform
      draw from [0, spread_s) with `seed`, then all are sorted again (Mooncake's real trace has ticks of 3 s);
    - window: arrivals in [start_s, start_s + duration_s), in seconds of the trace, then the first `limit` of
      them;
    - speed: `time_scale` 2 is twice as fast; `rate` asks for a mean of that many requests/s instead, where
      the mean of n requests is (n - 1) / (last - first arrival). Both at once is an error. Think times scale
      alike;
    - lengths: times `input_scale` / `output_scale`, rounded, at least 1; then cut to `max_input` /
      `max_output`. The block size of hash ids scales with the inputs (rounded); ids that no longer stand for
      whole tokens are cut off;
    - `classes`: rules (class name, largest prompt in tokens or None for any); the first that covers a prompt
      names its `slo_class`. A prompt that no rule covers is an error. None keeps the classes of the trace.

    Arrivals of the result count from its first one. Raises `InputError` on settings that make no sense, and
    when the window is empty.
    """
    _check(
        start_s,
        duration_s,
        limit,
        time_scale,
        rate,
        max_input,
        max_output,
        input_scale,
        output_scale,
        spread_s,
        seed,
    )
    frame, history, first_row = trace.frame, list(trace.history), trace.first_row
    if spread_s is not None:
        frame, first_row = _spread(frame, spread_s, seed), 0
        history.append(f"arrivals spread uniformly over ticks of {spread_s:g} s, seed {seed}")
    frame, skipped = _window(trace, frame, start_s, duration_s, limit)
    first_row += skipped
    if frame.height < len(trace):
        history.append(f"rows {first_row} to {first_row + frame.height - 1} of the trace")
    frame, scale = _speed(trace, frame, time_scale, rate)
    if scale != 1.0:
        history.append(f"time x{scale:.6g} as fast")
    frame, block_size, notes = _lengths(trace, frame, max_input, max_output, input_scale, output_scale)
    history += notes
    if classes is not None:
        frame = _classify(frame, classes)
        history.append("classes by prompt: " + ", ".join(f"{name} <= {cap or 'any'}" for name, cap in classes))
    return replace(trace, frame=frame, block_size=block_size, first_row=first_row, history=tuple(history))


def _check(
    start_s: float,
    duration_s: float | None,
    limit: int | None,
    time_scale: float,
    rate: float | None,
    max_input: int | None,
    max_output: int | None,
    input_scale: float,
    output_scale: float,
    spread_s: float | None,
    seed: int,
) -> None:
    if not (math.isfinite(start_s) and start_s >= 0):
        raise InputError(f"start_s = {start_s!r}: expected 0 or more seconds")
    positive = {
        "duration_s": duration_s,
        "limit": limit,
        "time_scale": time_scale,
        "rate": rate,
        "max_input": max_input,
        "max_output": max_output,
        "input_scale": input_scale,
        "output_scale": output_scale,
        "spread_s": spread_s,
    }
    for name, value in positive.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} = {value!r}: expected a number above 0")
    check_seed(seed)
    if rate is not None and time_scale != 1.0:
        raise InputError(f"rate = {rate!r} and time_scale = {time_scale!r}: expected only one of them")


def check_seed(seed: int) -> None:
    """Raise `InputError` for a seed that the generators do not take."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed = {seed!r}: expected a whole number from 0 to 2^63-1")


def _spread(frame: pl.DataFrame, spread_s: float, seed: int) -> pl.DataFrame:
    shift = np.random.default_rng(seed).uniform(0.0, spread_s, frame.height)
    return frame.with_columns(pl.col("arrival_s") + pl.Series(shift)).sort("arrival_s", maintain_order=True)


def _window(
    trace: Trace, frame: pl.DataFrame, start_s: float, duration_s: float | None, limit: int | None
) -> tuple[pl.DataFrame, int]:
    arrivals = frame["arrival_s"].to_numpy()
    first = int(np.searchsorted(arrivals, start_s, side="left"))
    last = len(arrivals)
    if duration_s is not None:
        last = int(np.searchsorted(arrivals, start_s + duration_s, side="left"))
    if limit is not None:
        last = min(last, first + limit)
    if first >= last:
        end = "its end" if duration_s is None else f"{start_s + duration_s:g} s"
        raise InputError(
            f"{trace.source}: no request arrives from {start_s:g} s to {end}: expected a window that overlaps "
            f"its {len(arrivals)} arrivals from 0 to {trace.span_s:.6g} s"
        )
    cut = frame.slice(first, last - first)
    return cut.with_columns(pl.col("arrival_s") - pl.col("arrival_s").first()), first


def _speed(trace: Trace, frame: pl.DataFrame, time_scale: float, rate: float | None) -> tuple[pl.DataFrame, float]:
    scale = time_scale
    if rate is not None:
        span = float(frame["arrival_s"][-1])
        if span <= 0:
            raise InputError(
                f"rate = {rate:g}: {trace.source}: the window has {frame.height} request(s) over 0 s: "
                "expected at least two different arrivals"
            )
        scale = rate * span / (frame.height - 1)
    if scale != 1.0:
        if float(frame["arrival_s"][-1]) / scale > MAX_SPAN_S:
            raise InputError(f"time x{scale:.6g} as fast: expected a trace of at most {MAX_SPAN_S:g} s")
        frame = frame.with_columns(pl.col("arrival_s") / scale, (pl.col("think_s") / scale).clip(0, MAX_SPAN_S))
    return frame, scale


def _lengths(
    trace: Trace,
    frame: pl.DataFrame,
    max_input: int | None,
    max_output: int | None,
    input_scale: float,
    output_scale: float,
) -> tuple[pl.DataFrame, int | None, list[str]]:
    notes: list[str] = []
    full = frame["input_tokens"]
    for name, scale, cap in (
        ("input_tokens", input_scale, max_input),
        ("output_tokens", output_scale, max_output),
    ):
        if scale != 1.0:
            longest = float(frame[name].max()) * scale  # type: ignore[arg-type]
            if longest > MAX_TOKENS:
                raise InputError(f"{name} x{scale:g}: the longest becomes {longest:g}: expected at most {MAX_TOKENS}")
            scaled = (pl.col(name).cast(pl.Float64) * scale).round().clip(lower_bound=1).cast(pl.Int32)
            frame = frame.with_columns(scaled)
            notes.append(f"{name} x{scale:g}")
        if name == "input_tokens":
            full = frame[name]
        if cap is not None:
            over = int((frame[name] > cap).sum())
            frame = frame.with_columns(pl.col(name).clip(upper_bound=cap))
            notes.append(f"{name} clipped to {cap}: {over} of {frame.height} requests")
    if trace.block_size is None:
        return frame, None, notes
    block_size = max(1, round(trace.block_size * input_scale))
    if block_size != trace.block_size:
        notes.append(f"block size {trace.block_size} to {block_size}")
    # A clipped prompt keeps only whole blocks; any other keeps the short last block that it had.
    clipped = pl.lit(False) if max_input is None else pl.Series(full > max_input)
    whole = pl.col("input_tokens") // block_size
    most = pl.when(clipped).then(whole).otherwise(-(-pl.col("input_tokens") // block_size))
    frame = frame.with_columns(pl.col("hash_ids").list.head(most))
    if frame["hash_ids"].null_count() == frame.height:
        return frame, None, notes
    return frame, block_size, notes


def _classify(frame: pl.DataFrame, classes: Sequence[tuple[str, int | None]]) -> pl.DataFrame:
    if not classes:
        raise InputError("classes: no rule: expected at least one (class name, largest prompt in tokens)")
    rule = pl.lit(None, dtype=pl.String)
    if any(cap is None for _, cap in classes[:-1]):
        raise InputError("classes: a rule after one without a limit covers no prompt: expected that one last")
    for name, cap in reversed(classes):
        if cap is not None and cap < 1:
            raise InputError(f"classes: {name} = {cap!r}: expected a number of tokens above 0, or none")
        covers = pl.lit(True) if cap is None else pl.col("input_tokens") <= cap
        rule = pl.when(covers).then(pl.lit(name)).otherwise(rule)
    frame = frame.with_columns(rule.alias("slo_class"))
    if missed := frame["slo_class"].null_count():
        longest = frame.filter(pl.col("slo_class").is_null())["input_tokens"].max()
        raise InputError(
            f"classes: no rule covers {missed} of {frame.height} prompts (longest {longest} tokens): "
            "expected a last rule without a limit"
        )
    return frame
