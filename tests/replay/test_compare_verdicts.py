"""The verdicts: better, worse, no difference, cannot tell, and what is said beside them."""

import json
import math

import numpy as np
import pytest
from compare_runs import arm, frame, noisy, run

from headway.errors import InputError
from headway.replay import noise, verdicts
from headway.replay.compare import BETTER, CANNOT_TELL, NO_DIFFERENCE, WORSE, compare

FEW = {"draws": 400, "seed": 1}


def change(comparison, name, slo_class=None, level=0):
    """Return one change of a comparison."""
    return next(c for c in comparison.levels[level].changes if c.metric.name == name and c.slo_class == slo_class)


def test_a_run_against_itself_shows_no_difference():
    """Identical rows: every change is exactly 0 and nothing is called."""
    table = noisy(1)
    found = compare(arm("A", run(table)), arm("B", run(table)), **FEW)
    assert {NO_DIFFERENCE} == {c.verdict for c in found.levels[0].changes}
    assert {0.0} == {c.main.value for c in found.levels[0].changes}


def test_half_the_latency_is_better_on_both_and_the_change_is_exact():
    """Every latency of the same requests halved: -50 % on P99 TTFT and P99 TPOT, better together."""
    found = compare(arm("A", run(noisy(1))), arm("B", run(noisy(1, slower=0.5))), **FEW)
    assert found.levels[0].together == BETTER
    assert change(found, "p99_ttft").relative.value == pytest.approx(-0.5)
    assert change(found, "p99_tpot").relative.value == pytest.approx(-0.5)


def test_trading_tpot_for_ttft_is_not_better():
    """TTFT halved and TPOT doubled: the pair says what was traded."""
    first, second = noisy(1), noisy(1)
    second = second.with_columns(second["ttft_s"] * 0.5, second["tpot_s"] * 2)
    found = compare(arm("A", run(first)), arm("B", run(second)), **FEW)
    assert found.levels[0].together == "traded: p99_ttft better, p99_tpot worse"


def test_too_few_requests_for_a_p99_cannot_tell():
    """A P99 of 100 requests is their largest value: no interval, no verdict, and the n it would take."""
    found = compare(arm("A", run(noisy(1, 100))), arm("B", run(noisy(1, 100, slower=3.0))), **FEW)
    assert change(found, "p99_ttft").verdict == CANNOT_TELL
    assert change(found, "p99_ttft").too_small == "n = 100, at least 368 needed"
    assert change(found, "p50_ttft").verdict == WORSE


def test_shares_are_compared_by_difference_in_points():
    """Attainment 100 % against 75 %: -25 points, worse."""
    late = np.where(np.arange(400) % 4 == 0, 2.0, 0.1)
    found = compare(arm("A", run(frame(np.full(400, 0.1)))), arm("B", run(frame(late))), **FEW)
    attainment = change(found, "attainment")
    assert attainment.difference.value == -0.25
    assert attainment.verdict == WORSE


def test_everything_attained_is_not_certainty():
    """30 of 30 in both arms: the interval of the difference is not [0, 0]."""
    found = compare(arm("A", run(frame(np.full(30, 0.1)))), arm("B", run(frame(np.full(30, 0.1)))), **FEW)
    low, high = change(found, "attainment").difference.interval(0.95)
    assert low < -0.05
    assert high > 0.05


def test_fast_refusals_do_not_improve_the_adjusted_percentile():
    """The slow tenth refused at once: the survivors' P99 looks better, the adjusted one is infinite; a note says so."""
    rng = np.random.default_rng(4)
    ttft = rng.exponential(0.1, 500)
    refused = np.where(ttft > np.quantile(ttft, 0.9), "refused", "ok")
    base, other = arm("A", run(frame(ttft))), arm("B", run(frame(ttft, status=refused)))
    found = compare(base, other, names=["p99_ttft", "p99_ttft_adjusted", "refused"], **FEW)
    assert change(found, "p99_ttft").relative.value < -0.3
    adjusted = change(found, "p99_ttft_adjusted")
    assert adjusted.other.value == math.inf
    assert adjusted.verdict == WORSE
    assert any("compare different requests" in note for note in found.levels[0].notes)


def test_classes_are_compared_apart():
    """Only `doc` got slower: its line says worse, chat's does not."""
    classes = np.where(np.arange(1200) % 2 == 0, "chat", "doc")
    base = noisy(1, 1200, classes=classes)
    slow = base.with_columns(base["ttft_s"] * np.where(classes == "doc", 1.5, 1.0))
    found = compare(arm("A", run(base)), arm("B", run(slow)), names=["p50_ttft"], **FEW)
    assert change(found, "p50_ttft", "doc").verdict == WORSE
    assert change(found, "p50_ttft", "chat").verdict == NO_DIFFERENCE


def test_goodput_of_a_class_is_its_share_of_the_run():
    """Goodputs of the classes add up to that of the run."""
    classes = np.where(np.arange(300) % 3 == 0, "chat", "doc")
    found = compare(
        arm("A", run(noisy(1, 300, classes=classes))),
        arm("B", run(noisy(2, 300, classes=classes))),
        names=["goodput"],
        **FEW,
    )
    parts = [change(found, "goodput", name).base.value for name in ("chat", "doc")]
    assert sum(parts) == pytest.approx(change(found, "goodput").base.value)


def test_queue_and_compute_only_where_the_server_tells():
    """Queue time told by one arm only is left out with a note; told by both, it is compared."""
    told = noisy(1, queue_s=np.full(600, 0.01))
    one = compare(arm("A", run(told)), arm("B", run(noisy(2))), **FEW)
    assert not [c for c in one.levels[0].changes if c.metric.column == "queue"]
    assert any("not told by the server of the candidate" in note for note in one.levels[0].notes)
    both = compare(arm("A", run(told)), arm("B", run(told)), **FEW)
    assert change(both, "p50_queue").base.value == 0.01
    expected = float(np.sort((told["ttft_s"] - 0.01).to_numpy())[299])
    assert change(both, "p50_compute").base.value == pytest.approx(expected)


def test_repeats_that_disagree_widen_the_interval():
    """Three repeats whose level differs by 30 % from run to run leave a 10 % change open that one would call."""

    def repeats(scales, seed):
        return [run(noisy(seed + i, slower=scale), seed=i) for i, scale in enumerate(scales)]

    steady = compare(arm("A", *repeats([1, 1, 1], 0)), arm("B", *repeats([1.1] * 3, 50)), names=["p50_tpot"], **FEW)
    shaky = compare(
        arm("A", *repeats([0.7, 1.0, 1.3], 0)),
        arm("B", *repeats([1.43, 1.1, 0.77], 50)),
        names=["p50_tpot"],
        **FEW,
    )
    assert change(steady, "p50_tpot").verdict == WORSE
    assert change(shaky, "p50_tpot").verdict == NO_DIFFERENCE


def test_same_input_gives_the_same_bytes():
    """Two comparisons with one seed print the same JSON."""
    arms = arm("A", run(noisy(1, 400))), arm("B", run(noisy(2, 400)))
    one, two = (json.dumps(verdicts.as_json([compare(*arms, **FEW)])) for _ in range(2))
    assert one == two


def test_nothing_under_the_noise_floor_is_called():
    """Repeats that differ by 10 % of themselves: a change of 10 % is real in the rows and yet under the floor."""
    floor = noise.measure(arm("A", *[run(noisy(1, slower=s)) for s in (1.0, 1.1, 1.2, 0.95)]))
    base, other = arm("A", run(noisy(1))), arm("B", run(noisy(1, slower=1.1)))
    assert change(compare(base, other, **FEW), "p50_tpot").verdict == WORSE
    judged = change(compare(base, other, floor=floor, **FEW), "p50_tpot")
    assert judged.verdict == NO_DIFFERENCE
    assert "under the noise floor" in verdicts.row(judged)[-1]
    far = compare(base, arm("B", run(noisy(1, slower=3.0))), floor=floor, **FEW)
    assert change(far, "p50_tpot").verdict == WORSE


def test_noise_floor_is_t_times_the_spread(tmp_path):
    """Three repeats with P50 TTFT 0.1, 0.1 e^0.1 and 0.1 e^-0.1: sd 0.1, floor exp(4.303 x 0.1 x sqrt 2) - 1."""
    runs = [run(frame(np.full(10, 0.1 * math.exp(x)))) for x in (0.0, 0.1, -0.1)]
    floor = noise.measure(arm("A", *runs), names=["p50_ttft", "refused"])
    first = floor.floors[0]
    assert first.sd == pytest.approx(0.1)
    assert first.one_against_one == pytest.approx(math.expm1(4.30265 * 0.1 * math.sqrt(2)), rel=1e-4)
    assert floor.working(4, 4)["p50_ttft"] == pytest.approx(4.30265 * 0.1 * math.sqrt(0.5), rel=1e-4)
    noise.write(floor, tmp_path / "floor.json")
    assert noise.read(tmp_path / "floor.json") == floor


def test_a_noise_floor_wants_three_equal_repeats(tmp_path):
    """Two runs, runs of different traces, and a file that is none are refused."""
    with pytest.raises(InputError, match="at least 3 repeats"):
        noise.measure(arm("A", run(noisy(1)), run(noisy(2))))
    with pytest.raises(InputError, match="trace 'bbbb"):
        noise.measure(arm("A", run(noisy(1)), run(noisy(2)), run(noisy(3), sha="b" * 64)))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match="headway_noise_floor = None"):
        noise.read(tmp_path / "x.json")


def test_markdown_holds_every_metric_and_the_method():
    """The Markdown has one table row a metric and says how it was computed."""
    found = compare(arm("A", run(noisy(1))), arm("B", run(noisy(2))), **FEW)
    text = verdicts.markdown([found])
    assert text.count("\n| p") == 8
    assert "nearest rank" in text
    assert "400 draws, seed 1" in text


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_run_that_ends_a_little_later_is_not_worse(repeats):
    """All attained in both, or the same nine tenths: goodput then differs by the end of the last answer alone."""
    for slow in (0, 60):
        ttft = np.full(600, 0.1)
        ttft[:slow] = 5.0
        later = ttft.copy()
        later[-1] += 0.01
        base = [run(frame(ttft), f"a{i}", seed=i) for i in range(repeats)]
        other = [run(frame(later), f"b{i}", seed=i) for i in range(repeats)]
        found = compare(arm("A", *base), arm("B", *other), draws=300)
        assert change(found, "goodput").base.value > change(found, "goodput").other.value
        assert change(found, "goodput").verdict == NO_DIFFERENCE


def test_certainty_is_not_claimed_of_pooled_repeats():
    """Three runs of 60 that all attained in two classes: 180 of 180, Wilson 97.9 % to 100 %, not 100 % to 100 %."""
    classes = ["chat", "document", "chat"] * 20
    table = frame([0.1] * 60, classes=classes)
    arms = [arm(name, *(run(table, f"{name}{i}", seed=i) for i in range(3))) for name in "AB"]
    side = change(compare(*arms, names=["attainment"], draws=300), "attainment").other
    low, high = side.contrast.interval(0.95)
    assert (side.value, high) == (1.0, 1.0)
    assert 0.96 < low < 0.985


def test_real_losses_of_goodput_are_still_called():
    """One fifth of the requests no longer attains: worse, whatever the floors."""
    rng = np.random.default_rng(5)
    lost = np.where(rng.uniform(size=600) < 0.2, 5.0, 0.1)
    found = compare(arm("A", run(frame(np.full(600, 0.1)))), arm("B", run(frame(lost))), draws=300)
    assert change(found, "goodput").verdict == WORSE
