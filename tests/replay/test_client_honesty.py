"""When a run must not be believed, and the percentiles that decide it."""

from __future__ import annotations

import pytest

from headway.replay.honesty import CpuUse, lateness_limit_s, nearest_rank, spread, verdict
from headway.replay.targets import Targets


def test_nearest_rank():
    """The smallest value that at least q of all do not exceed; 100 values have P99 at rank 99."""
    values = [float(i) for i in range(1, 101)]
    assert nearest_rank(values, 0.50) == 50.0
    assert nearest_rank(values, 0.99) == 99.0
    assert nearest_rank([7.0], 0.99) == 7.0
    assert nearest_rank([], 0.5) is None


@pytest.mark.parametrize(
    ("targets", "limit"),
    [
        ([Targets(ttft_s=1.0), Targets(ttft_s=6.0)], 0.05),
        ([Targets(ttft_s=0.1)], 0.01),
        ([Targets(tpot_s=0.1)], 0.05),
        ([], 0.05),
    ],
)
def test_lateness_may_be_5_percent_of_the_tightest_ttft(targets, limit):
    """At least 10 ms; 50 ms when nothing has a TTFT target."""
    assert lateness_limit_s(targets) == pytest.approx(limit)


def test_a_late_or_overloaded_client_invalidates_the_run():
    """Each reason names the measured value and its limit."""
    fine = spread([0.001] * 100)
    assert verdict(lateness=fine, loop_lag=fine, limit_s=0.05) == []
    (late,) = verdict(lateness=spread([0.001] * 98 + [0.2] * 2), loop_lag=fine, limit_s=0.05)
    assert "200.0 ms over 50.0 ms" in late
    (lagging,) = verdict(lateness=fine, loop_lag=spread([0.051]), limit_s=0.05)
    assert "51.0 ms over 50 ms" in lagging


def test_nothing_sent_is_not_late():
    """A run without a request has no lateness to judge."""
    assert verdict(lateness=spread([]), loop_lag=spread([]), limit_s=0.05) == []


def test_what_the_machine_withheld_is_told_apart_from_what_was_used():
    """CPU 1 to 3 s, wait 0.5 to 0.75 s: 2 s used, 0.25 s waited; without a kernel that tells, the wait is unknown."""
    assert CpuUse(3.0, 0.75).since(CpuUse(1.0, 0.5)) == CpuUse(2.0, 0.25)
    assert CpuUse(3.0, 0.75).since(CpuUse(1.0, None)) == CpuUse(2.0, None)
    now = CpuUse.now()
    assert now.since(now) in (CpuUse(0.0, 0.0), CpuUse(0.0, None))
