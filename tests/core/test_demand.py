"""Recent demand by density, against a list that is summed each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import DemandWindow


class Naive:
    """The same question answered from a plain list."""

    def __init__(self, window: DemandWindow) -> None:
        self.window = window
        self.rows: list[tuple[float, float, float]] = []
        self.start: float | None = None

    def add(self, now: float, work: float, weight: float) -> None:
        """Keep the arrival and drop what is too old or too many."""
        self.start = now if self.start is None else self.start
        work = max(work, 1e-6)
        self.rows.append((now, weight / work, work))
        self.rows = [row for row in self.rows if row[0] >= now - self.window.window_s][-self.window.limit :]

    def denser(self, now: float, density: float) -> float:
        """Sum the denser work over the span."""
        if self.start is None or not self.rows:
            return 0.0
        span = min(self.window.window_s, max(now - self.start, self.window.min_span_s))
        if len(self.rows) >= self.window.limit:
            span = min(span, max(now - self.rows[0][0], 1e-3))
        return sum(row[2] for row in self.rows if row[1] > density) / span


arrivals = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.1, 1.0, 4.0, 30.0]),
        st.sampled_from([0.0, 0.001, 0.01, 0.01, 0.5]),
        st.sampled_from([1.0, 2.0]),
    ),
    max_size=60,
)


@given(arrivals, st.sampled_from([0.0, 1.0, 50.0, 100.0, 200.0, 1e7]), st.sampled_from([3, 1000]))
def test_the_window_agrees_with_a_plain_list(
    rows: list[tuple[float, float, float]], density: float, limit: int
) -> None:
    """Whatever arrives, also equal times, works and densities, the sum over the denser ones is that of the list."""
    window = DemandWindow(window_s=10.0, min_span_s=2.0, limit=limit)
    naive, now = Naive(window), 100.0
    for gap, work, weight in rows:
        now += gap
        window.add(now, work_s=work, weight=weight, ttft_s=1.0)
        naive.add(now, work, weight)
        assert len(naive.rows) == len(window)
        assert naive.denser(now, density) == pytest.approx(window.denser(now, density), abs=1e-9)


def test_an_empty_window_knows_nothing() -> None:
    """Unknown demand is no demand."""
    assert DemandWindow().denser(5.0, 0.0) == 0.0


def test_what_left_the_window_is_forgotten() -> None:
    """Of two arrivals 11 s apart only the later one counts in a window of 10 s."""
    window = DemandWindow(window_s=10.0, min_span_s=1.0)
    window.add(0.0, work_s=5.0, ttft_s=1.0)
    window.add(11.0, work_s=1.0, ttft_s=1.0)
    assert len(window) == 1
    assert pytest.approx(window.denser(11.0, 0.0)) == 1.0 / 10.0


def test_one_burst_is_not_extrapolated() -> None:
    """Right after the start the rate is taken over the shortest span, not over a moment."""
    window = DemandWindow(window_s=60.0, min_span_s=10.0)
    window.add(0.0, work_s=2.0, ttft_s=1.0)
    assert pytest.approx(window.denser(0.0, 0.0)) == 0.2


def test_density_is_weight_over_work() -> None:
    """One second at weight 10 is denser than one second at weight 1; the bound itself is not denser."""
    window = DemandWindow(min_span_s=1.0)
    window.add(0.0, work_s=1.0, weight=1.0, ttft_s=1.0)
    window.add(0.0, work_s=1.0, weight=10.0, ttft_s=1.0)
    assert pytest.approx(window.denser(0.0, 0.5)) == 2.0
    assert pytest.approx(window.denser(0.0, 1.0)) == 1.0
    assert pytest.approx(window.denser(0.0, 10.0)) == 0.0


@given(arrivals, st.sampled_from([0.0, 50.0, 200.0]), st.sampled_from([0.5, 2.0, 8.0]))
def test_work_ahead_agrees_with_a_plain_sum(
    rows: list[tuple[float, float, float]], density: float, horizon: float
) -> None:
    """Denser work of target t counts for the horizon less t; targets beyond it, and no target at all, never count."""
    window = DemandWindow(window_s=1e9, min_span_s=2.0)
    now, start, total = 100.0, None, 0.0
    for number, (gap, work, weight) in enumerate(rows):
        now += gap
        start = now if start is None else start
        ttft = (0.25, 1.0, 4.0, None)[number % 4]
        window.add(now, work_s=work, weight=weight, ttft_s=ttft)
        work = max(work, 1e-6)
        if ttft is not None and weight / work > density:
            total += work * max(horizon - ttft, 0.0)
    span = max(now - start, 2.0) if start is not None else 1.0
    assert window.ahead_s(now, density, horizon) == pytest.approx(total / span)


def test_the_part_of_shorter_targets() -> None:
    """Only those whose target is shorter count, over the same time; one without a target counts nowhere."""
    window = DemandWindow()
    for ttft, work in ((0.5, 1.0), (1.0, 2.0), (6.0, 4.0), (None, 8.0)):
        window.add(0.0, work_s=work, ttft_s=ttft)
    assert window.shorter(1.0).denser(10.0, 0.0) == pytest.approx(0.1)
    assert window.shorter(None).denser(10.0, 0.0) == pytest.approx(0.7)
    assert window.shorter(0.5).denser(10.0, 0.0) == 0.0
    assert window.denser(10.0, 0.0) == pytest.approx(0.7)
    window.add(100.0, work_s=1.0, ttft_s=None)  # what is old is forgotten all the same
    assert (len(window), window.denser(100.0, 0.0)) == (0, 0.0)
