"""Claims about generated traces: the demo trace, and a trace drawn from a fitted shape."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from headway.errors import InputError
from headway.trace import SCHEMA, ReadReport, Trace
from headway.trace.fit import Quantiles, fit
from headway.trace.shape import gap_cv, shape
from headway.trace.synthesis import synthesize
from headway.trace.synthetic import KINDS, Lengths, Shape, TrafficClass, demo_trace


def bursty(n: int = 4000, seed: int = 0) -> Trace:
    """Return an invented trace: two states of traffic, long prompts with short outputs."""
    random = np.random.default_rng(seed)
    busy = np.repeat(random.random(n // 50) < 0.5, 50)
    gaps = random.exponential(np.where(busy, 0.05, 1.0))
    inputs = np.clip(random.lognormal(6, 1, n), 1, 9000).astype(int)
    noise = random.lognormal(0, 0.3, n)
    outputs = np.clip(20_000 / inputs * noise, 1, 500).astype(int)
    return made(np.cumsum(gaps) - gaps[0], inputs, outputs)


def made(arrivals: np.ndarray, inputs: np.ndarray, outputs: np.ndarray, **columns: object) -> Trace:
    """Return a trace of these columns."""
    n = len(arrivals)
    data: dict[str, object] = {name: [None] * n for name in SCHEMA}
    data |= {"arrival_s": arrivals, "input_tokens": inputs, "output_tokens": outputs}
    block_size = columns.pop("block_size", None)
    frame = pl.DataFrame({**data, **columns}, schema=SCHEMA, strict=False)
    report = ReadReport(read=n, kept=n)
    return Trace(frame=frame, format="made", source="made", sha256="0", report=report, block_size=block_size)  # type: ignore[arg-type]


def test_the_demo_trace_has_the_stated_shape() -> None:
    """Rate, bursts, class shares, medians and clips as its parameters say."""
    trace = demo_trace(n=20_000, rate=4.0, seed=1)
    found = shape(trace)
    assert found.rate == pytest.approx(4.0, rel=0.05)
    assert found.gap_cv == pytest.approx(1.3, rel=0.05)
    assert found.classes["chat"] / found.n == pytest.approx(0.85, abs=0.01)
    chat = trace.frame.filter(pl.col("slo_class") == "chat")
    document = trace.frame.filter(pl.col("slo_class") == "document")
    assert chat["input_tokens"].median() == pytest.approx(60, rel=0.05)
    assert document["input_tokens"].median() == pytest.approx(950, rel=0.05)
    assert (chat["input_tokens"].min(), chat["input_tokens"].max()) == (8, 400)
    assert (document["output_tokens"].min(), document["output_tokens"].max()) == (4, 32)


def test_the_single_kind_has_one_heavy_tailed_class() -> None:
    """Median about 110 tokens, the longest far above."""
    found = shape(demo_trace(n=20_000, rate=4.0, seed=1, kind="single"))
    assert found.classes == {"default": 20_000}
    assert found.input_tokens.p50 == pytest.approx(110, rel=0.05)
    assert found.input_tokens.p99 > 10 * found.input_tokens.p50
    assert found.output_tokens.max == 96


def test_a_longer_demo_trace_begins_with_the_shorter_one() -> None:
    """A run can be extended without changing what was measured."""
    short, long = (demo_trace(n=n, rate=2.0, seed=5).frame for n in (100, 300))
    assert long.head(100)["arrival_s"].equals(short["arrival_s"])
    by_time = demo_trace(duration_s=40.0, rate=2.0, seed=5).frame
    assert by_time["arrival_s"].equals(long.head(by_time.height)["arrival_s"])


def test_seed_and_kind_of_the_demo_trace_decide_and_bad_ones_are_refused() -> None:
    """Same seed same table; unknown kinds list the known."""
    assert demo_trace(n=50, rate=1.0, seed=1).frame.equals(demo_trace(n=50, rate=1.0, seed=1).frame)
    assert not demo_trace(n=50, rate=1.0, seed=1).frame.equals(demo_trace(n=50, rate=1.0, seed=2).frame)
    with pytest.raises(InputError, match=rf"expected one of {', '.join(KINDS)}"):
        demo_trace(n=5, rate=1.0, seed=1, kind="video")
    with pytest.raises(InputError, match="exactly one of n and duration_s"):
        demo_trace(n=5, duration_s=5.0, rate=1.0, seed=1)
    with pytest.raises(InputError, match="rate = 0"):
        demo_trace(n=5, rate=0, seed=1)


def test_shares_of_a_shape_must_add_up() -> None:
    """A forgotten class would otherwise shift the others."""
    lengths = Lengths(median=10, sigma=1, low=1, high=100)
    half = TrafficClass(slo_class="a", share=0.5, inputs=lengths, outputs=lengths)
    with pytest.raises(InputError, match=r"add up to 0.5: expected 1"):
        Shape(classes=(half,))


def test_a_fitted_trace_keeps_rate_bursts_lengths_and_their_correlation() -> None:
    """Within the spread of a sample of this size."""
    source = bursty()
    drawn = synthesize(source, seed=3)
    before, after = shape(source), shape(drawn)
    assert after.n == before.n
    assert after.rate == pytest.approx(before.rate)
    assert after.gap_cv == pytest.approx(before.gap_cv, rel=0.15)
    assert after.dispersion == pytest.approx(before.dispersion, rel=0.35)
    for name in ("input_tokens", "output_tokens"):
        assert getattr(after, name).p50 == pytest.approx(getattr(before, name).p50, rel=0.1)
        assert getattr(after, name).p90 == pytest.approx(getattr(before, name).p90, rel=0.1)
    ranks = [
        frame.select(pl.corr("input_tokens", "output_tokens", method="spearman")).item()
        for frame in (source.frame, drawn.frame)
    ]
    assert ranks[0] < -0.8
    assert ranks[1] == pytest.approx(ranks[0], abs=0.05)


def test_a_fitted_trace_holds_no_row_of_its_source() -> None:
    """Rows with the same gap to the row above and the same lengths would give the source away."""
    source = bursty()
    drawn = synthesize(source, seed=3)
    rows = [
        set(
            trace.frame.select(pl.col("arrival_s").diff().round(6), "input_tokens", "output_tokens")
            .drop_nulls()
            .iter_rows()
        )
        for trace in (source, drawn)
    ]
    assert not rows[0] & rows[1]


def test_number_rate_and_seed_of_a_fitted_trace_are_those_asked_for() -> None:
    """Exact rate; the same seed gives the same table."""
    source = bursty()
    drawn = synthesize(source, n=200, rate=7.0, seed=1)
    assert len(drawn) == 200
    assert shape(drawn).rate == pytest.approx(7.0)
    assert drawn.frame.equals(synthesize(source, n=200, rate=7.0, seed=1).frame)
    assert not drawn.frame.equals(synthesize(source, n=200, rate=7.0, seed=2).frame)


def test_shared_prefixes_keep_their_share_and_stay_chained() -> None:
    """Half of the prompts begin with one of a few long prefixes."""
    random = np.random.default_rng(0)
    n = 1500
    inputs = random.integers(64, 640, n)
    ids, fresh = [], 10_000
    for tokens in inputs:
        blocks = -(-int(tokens) // 16)
        family = int(random.integers(0, 5)) * 100
        shared = min(blocks, 10) if random.random() < 0.5 else 0
        ids.append([*range(family, family + shared), *range(fresh, fresh + blocks - shared)])
        fresh += blocks
    arrivals = np.cumsum(random.exponential(1.0, n))
    source = made(arrivals - arrivals[0], inputs, np.full(n, 5), hash_ids=ids, block_size=16)
    drawn = synthesize(source, seed=2)
    before, after = shape(source).prefixes, shape(drawn).prefixes
    assert before is not None
    assert after is not None
    assert after.hit_block_share == pytest.approx(before.hit_block_share, abs=0.05)
    parents: dict[int, int | None] = {}
    for row in drawn.frame["hash_ids"].to_list():
        for block, parent in zip(row, [None, *row], strict=False):
            assert parents.setdefault(block, parent) == parent


def test_sessions_are_drawn_with_turns_growth_and_think_times() -> None:
    """Three turns each, 100 tokens more a turn, 2 s of thinking."""
    sessions, turns = 60, 3
    starts = np.cumsum(np.random.default_rng(1).exponential(5.0, sessions))
    rows = sorted(
        (start + 10.0 * turn, f"c{index}", turn) for index, start in enumerate(starts) for turn in range(turns)
    )
    arrivals = np.array([row[0] for row in rows])
    source = made(
        arrivals - arrivals[0],
        np.array([200 + 100 * row[2] for row in rows]),
        np.full(len(rows), 20),
        session_id=[row[1] for row in rows],
        turn=[row[2] for row in rows],
        think_s=[2.0 if row[2] else None for row in rows],
    )
    drawn = synthesize(source, seed=4)
    found = shape(drawn).sessions
    assert found is not None
    assert found.turns.p50 == 3
    assert found.think_s is not None
    growth = drawn.frame.sort("session_id", "turn").select(
        pl.col("input_tokens").diff().over("session_id").drop_nulls()
    )
    assert growth.to_series().unique().to_list() == [100]
    assert drawn.frame.filter(pl.col("turn") > 0)["think_s"].null_count() == 0


def test_a_trace_too_short_to_show_a_shape_is_refused() -> None:
    """Ten requests have no distribution."""
    with pytest.raises(InputError, match="10 requests over 9 s: expected at least 20"):
        fit(made(np.arange(10.0), np.full(10, 5), np.full(10, 5)))


def test_quantiles_keep_the_ends() -> None:
    """Smallest and largest value survive, and what lies between is between."""
    quantiles = Quantiles.of(np.array([3.0, 1.0, 2.0, 100.0]))
    assert quantiles.at(np.array([0.0, 1.0])).tolist() == [1.0, 100.0]
    drawn = quantiles.at(np.random.default_rng(0).random(100))
    assert ((drawn >= 1) & (drawn <= 100)).all()


def test_a_gamma_process_of_the_demo_has_the_variation_asked_for() -> None:
    """CV 3 is a much burstier process than the default."""
    shape_ = Shape(classes=KINDS["single"].classes, gap_cv=3.0)
    arrivals = demo_trace(n=50_000, rate=1.0, seed=0, shape=shape_).frame["arrival_s"].to_numpy()
    assert gap_cv(arrivals) == pytest.approx(3.0, rel=0.1)
