"""Claims about `headway.trace.select`: a window, a speed, lengths and classes, each written down."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from headway.trace import SCHEMA, ReadReport, Trace, select


def trace_of(
    arrivals: list[float],
    inputs: list[int] | None = None,
    outputs: list[int] | None = None,
    think: list[float | None] | None = None,
    hash_ids: list[list[int] | None] | None = None,
    block_size: int | None = None,
) -> Trace:
    """Return a trace of invented requests."""
    n = len(arrivals)
    frame = pl.DataFrame(
        {
            "arrival_s": arrivals,
            "input_tokens": inputs or [10] * n,
            "output_tokens": outputs or [5] * n,
            "slo_class": [None] * n,
            "session_id": [None] * n,
            "turn": [None] * n,
            "think_s": think or [None] * n,
            "hash_ids": hash_ids or [None] * n,
        },
        schema=SCHEMA,
    )
    report = ReadReport(read=n, kept=n)
    return Trace(frame=frame, format="made", source="made", sha256="0" * 64, report=report, block_size=block_size)


def test_window_takes_arrivals_from_start_up_to_but_not_at_its_end() -> None:
    """[1, 3) of arrivals 0..4 keeps those at 1 and 2, counted from the first of them."""
    cut = select(trace_of([0.0, 1.0, 2.0, 3.0, 4.0]), start_s=1.0, duration_s=2.0)
    assert cut.frame["arrival_s"].to_list() == [0.0, 1.0]
    assert cut.first_row == 1
    assert cut.history == ("rows 1 to 2 of the trace",)


def test_limit_counts_within_the_window() -> None:
    """The first two requests of the window stay."""
    cut = select(trace_of([0.0, 1.0, 2.0, 3.0]), start_s=0.5, limit=2)
    assert cut.frame["arrival_s"].to_list() == [0.0, 1.0]


def test_empty_window_names_what_the_trace_covers() -> None:
    """A window after the last arrival is an error that says where the arrivals are."""
    with pytest.raises(InputError, match="2 arrivals from 0 to 1 s"):
        select(trace_of([0.0, 1.0]), start_s=5.0)


def test_time_scale_two_is_twice_as_fast_and_scales_think_times_alike() -> None:
    """Every time quantity halves."""
    cut = select(trace_of([0.0, 4.0], think=[None, 3.0]), time_scale=2.0)
    assert cut.frame["arrival_s"].to_list() == [0.0, 2.0]
    assert cut.frame["think_s"].to_list() == [None, 1.5]


def test_rate_is_the_mean_over_the_window_that_was_cut() -> None:
    """Three arrivals over 10 s become 4 requests/s: 2 gaps over 0.5 s."""
    cut = select(trace_of([0.0, 2.0, 10.0, 500.0]), duration_s=100.0, rate=4.0)
    assert cut.frame["arrival_s"].to_list() == pytest.approx([0.0, 0.1, 0.5])


def test_rate_and_time_scale_together_are_refused() -> None:
    """Two speeds at once contradict each other."""
    with pytest.raises(InputError, match="only one of them"):
        select(trace_of([0.0, 1.0]), rate=1.0, time_scale=2.0)


def test_rate_of_one_request_is_refused() -> None:
    """A rate needs two different arrivals."""
    with pytest.raises(InputError, match="at least two different arrivals"):
        select(trace_of([0.0]), rate=1.0)


@pytest.mark.parametrize("name", ["duration_s", "limit", "time_scale", "rate", "max_input", "spread_s"])
def test_settings_of_zero_are_refused_by_name(name: str) -> None:
    """The error names the setting."""
    with pytest.raises(InputError, match=f"{name} = 0"):
        select(trace_of([0.0, 1.0]), **{name: 0})


def test_lengths_scale_first_and_are_then_clipped_and_counted() -> None:
    """100 and 30 halve to 50 and 15; the cap of 40 clips one of them; nothing falls under one token."""
    cut = select(
        trace_of([0.0, 1.0], inputs=[100, 30], outputs=[1, 8]),
        input_scale=0.5,
        max_input=40,
        output_scale=0.25,
    )
    assert cut.frame["input_tokens"].to_list() == [40, 15]
    assert cut.frame["output_tokens"].to_list() == [1, 2]
    assert "input_tokens clipped to 40: 1 of 2 requests" in cut.history


def test_a_clipped_prompt_keeps_only_the_blocks_that_are_still_whole() -> None:
    """40 tokens in blocks of 16 clipped to 20 keep one block; an unclipped prompt keeps its short last."""
    made = trace_of([0.0, 1.0], inputs=[40, 18], hash_ids=[[1, 2, 3], [1, 9]], block_size=16)
    cut = select(made, max_input=20)
    assert cut.frame["hash_ids"].to_list() == [[1], [1, 9]]
    assert cut.block_size == 16


def test_scaled_inputs_scale_the_block_size_alike() -> None:
    """Halving 64 tokens in 4 blocks of 16 gives 32 tokens in 4 blocks of 8: the shared share stays."""
    cut = select(trace_of([0.0], inputs=[64], hash_ids=[[1, 2, 3, 4]], block_size=16), input_scale=0.5)
    assert cut.frame["hash_ids"].to_list() == [[1, 2, 3, 4]]
    assert cut.block_size == 8


def test_the_first_rule_that_covers_a_prompt_names_its_class() -> None:
    """10 tokens are chat, 11 are a document."""
    cut = select(trace_of([0.0, 1.0], inputs=[10, 11]), classes=[("chat", 10), ("document", None)])
    assert cut.frame["slo_class"].to_list() == ["chat", "document"]


def test_a_prompt_that_no_rule_covers_is_an_error() -> None:
    """Nobody falls out of the classes silently."""
    with pytest.raises(InputError, match=r"no rule covers 1 of 2 prompts \(longest 11 tokens\)"):
        select(trace_of([0.0, 1.0], inputs=[10, 11]), classes=[("chat", 10)])


def test_spread_moves_tick_arrivals_apart_and_is_seeded() -> None:
    """Ten arrivals on a 3 s tick end up at different times within it, the same for the same seed."""
    made = trace_of([0.0] * 10 + [3.0] * 10)
    first, again, other = (select(made, spread_s=3.0, seed=seed).frame["arrival_s"].to_list() for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(set(first)) == 20
    assert sorted(first) == first
    assert first[-1] < 6.0


@given(
    gaps=st.lists(st.floats(0.001, 100.0), min_size=1, max_size=30),
    rate=st.floats(0.01, 1000.0),
)
def test_any_requested_rate_is_reached(gaps: list[float], rate: float) -> None:
    """(n - 1) / span of the result is the rate asked for, whatever the arrivals."""
    arrivals = [0.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    cut = select(trace_of(arrivals), rate=rate)
    assert (len(cut) - 1) / cut.span_s == pytest.approx(rate)
