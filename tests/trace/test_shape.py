"""Claims about the numbers of `inspect`, on traces small enough to check by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from headway.trace import SCHEMA, ReadReport, Trace
from headway.trace.shape import dispersion, gap_cv, percentiles, prefixes, shape


def trace_of(arrivals: list[float], block_size: int | None = None, **columns: list[object]) -> Trace:
    """Return a trace; columns that are not given are 10 input and 5 output tokens, else null."""
    n = len(arrivals)
    data: dict[str, list[object]] = {name: [None] * n for name in SCHEMA}
    data |= {"arrival_s": list(arrivals), "input_tokens": [10] * n, "output_tokens": [5] * n, **columns}
    return Trace(
        frame=pl.DataFrame(data, schema=SCHEMA),
        format="made",
        source="made",
        sha256="0",
        report=ReadReport(read=n, kept=n),
        block_size=block_size,
    )


def test_percentiles_are_nearest_rank() -> None:
    """Of 1 to 10: p50 is the 5th value, p90 the 9th, p99 the 10th; nothing is interpolated."""
    found = percentiles(np.arange(1, 11))
    assert (found.n, found.mean, found.p50, found.p90, found.p99, found.max) == (10, 5.5, 5, 9, 10, 10)


def test_even_gaps_have_no_variation_and_no_dispersion() -> None:
    """A metronome: CV 0; one arrival in each second: dispersion 0."""
    arrivals = np.arange(0.0, 11.0)
    assert gap_cv(arrivals) == 0.0
    assert dispersion(arrivals) == 0.0


def test_dispersion_counts_the_empty_seconds() -> None:
    """Counts 4, 0, 0, 0 in four whole seconds: mean 1, variance (9 + 1 + 1 + 1) / 4 = 3."""
    assert dispersion(np.array([0.0, 0.1, 0.2, 0.3, 4.0])) == pytest.approx(3.0)


def test_a_poisson_process_has_dispersion_and_cv_near_one() -> None:
    """The yardstick of both figures."""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(0.2, 50_000))
    arrivals -= arrivals[0]
    assert gap_cv(arrivals) == pytest.approx(1.0, abs=0.03)
    assert dispersion(arrivals) == pytest.approx(1.0, abs=0.05)


def test_too_few_arrivals_leave_rate_and_burstiness_undefined() -> None:
    """No number is made up for one request."""
    found = shape(trace_of([0.0]))
    assert (found.rate, found.gap_cv, found.dispersion) == (None, None, None)
    assert found.peak_1s == 1


def test_rates_peaks_and_silence() -> None:
    """Five requests over 20 s: 4 gaps in 20 s; three of them in one second; 17.5 s of silence."""
    found = shape(trace_of([0.0, 0.5, 0.9, 2.5, 20.0]))
    assert found.rate == pytest.approx(0.2)
    assert (found.peak_1s, found.peak_10s) == (3, 4)
    assert found.longest_silence_s == 17.5
    assert found.input_tokens_per_s == pytest.approx(2.5)


def test_prefix_share_counts_blocks_that_an_earlier_request_had() -> None:
    """Second request: 2 of 3 blocks seen; third: nothing; 2 of 7 blocks, 32 of 108 tokens."""
    trace = trace_of(
        [0.0, 1.0, 2.0],
        block_size=16,
        input_tokens=[32, 44, 32],
        hash_ids=[[1, 2], [1, 2, 3], [7, 8]],
    )
    found = prefixes(trace)
    assert found is not None
    assert (found.blocks, found.hit_blocks, found.requests_with_hit) == (7, 2, 1)
    assert found.hit_token_share == pytest.approx(32 / 108)


def test_a_short_last_block_counts_for_the_tokens_it_has() -> None:
    """A repeat of a 20-token prompt hits 2 blocks but only 20 tokens."""
    trace = trace_of([0.0, 1.0], block_size=16, input_tokens=[20, 20], hash_ids=[[1, 2], [1, 2]])
    found = prefixes(trace)
    assert found is not None
    assert found.hit_token_share == pytest.approx(0.5)


def test_a_quiet_head_is_warned_of() -> None:
    """100 requests a second apart, then 900 ten times as fast: a slice from the start is not like the trace."""
    arrivals = [float(i) for i in range(100)] + [99 + 0.01 * i for i in range(1, 901)]
    assert "a slice from the start is not like the trace" in shape(trace_of(arrivals)).warnings[0]
    assert shape(trace_of([0.1 * i for i in range(1000)])).warnings == ()


def test_sessions_and_classes_are_counted() -> None:
    """Two requests of one session, one alone; think time known for one."""
    found = shape(
        trace_of(
            [0.0, 1.0, 2.0],
            session_id=["a", None, "a"],
            turn=[0, None, 1],
            think_s=[None, None, 1.5],
            slo_class=["chat", None, "chat"],
        )
    )
    assert found.classes == {"chat": 2}
    assert found.sessions is not None
    assert (found.sessions.sessions, found.sessions.requests, found.sessions.turns.max) == (1, 2, 2)
    assert found.sessions.think_s is not None
    assert found.sessions.think_s.p50 == 1.5
