"""Gates: what they may say, where a bad one is wrong, and the three outcomes."""

import numpy as np
import pytest
from compare_runs import arm, frame, noisy, run

from headway.errors import InputError
from headway.replay import gate, noise
from headway.replay.compare import compare


@pytest.mark.parametrize(
    ("text", "metric", "slo_class", "limit", "relative"),
    [
        ("p99_ttft<=+5%", "p99_ttft", None, 0.05, True),
        (" chat : p99_tpot <= 120ms ", "p99_tpot", "chat", 0.12, False),
        ("p99.9_e2e<=1.5 s", "p99.9_e2e", None, 1.5, False),
        ("attainment>=0.9", "attainment", None, 0.9, False),
        ("attainment>=90%", "attainment", None, 0.9, False),
        ("attainment>=-2%", "attainment", None, -0.02, True),
        ("goodput>=-2%", "goodput", None, -0.02, True),
        ("goodput>=3.5", "goodput", None, 3.5, False),
        ("p99_ttft_adjusted<=2s", "p99_ttft_adjusted", None, 2.0, False),
    ],
)
def test_a_gate_reads_as_written(text, metric, slo_class, limit, relative):
    """Signed percent is a change, the rest is absolute; units turn into seconds and shares."""
    found = gate.parse(text)
    assert (metric, slo_class, relative) == (found.metric.name, found.slo_class, found.relative)
    assert found.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 1, "expected a metric"),
        ("p98_foo<=+3%", 1, "expected a metric"),
        ("chat:speed>=1", 6, "expected a metric"),
        ("p99_ttft=<5%", 9, "expected <="),
        ("p99_ttft>=+5%", 9, "p99_ttft is better lower"),
        ("attainment<=0.9", 11, "attainment is better higher"),
        ("p99_ttft<=5%", 11, "expected a sign"),
        ("p99_ttft<=5", 12, "expected a unit, s or ms"),
        ("p99_ttft<=+5s", 11, "no sign before an absolute limit"),
        ("attainment>=90", 13, "a share from 0 to 1"),
        ("goodput>=3s", 11, "no unit"),
        ("p99_ttft<=+5%!", 11, "a number and a unit at the end"),
    ],
)
def test_a_bad_gate_names_the_position_and_the_known_metrics(text, position, expected):
    """The error says where, what was found, what was expected, and which metrics exist."""
    with pytest.raises(InputError) as error:
        gate.parse(text)
    assert f"position {position}:" in str(error.value)
    assert expected in str(error.value)
    assert "attainment, refused, failed, goodput" in str(error.value)


def outcomes(base, other, *texts, **options):
    """Return the outcome of each gate."""
    gates = [gate.parse(text) for text in texts]
    found = compare(base, other, names=[g.metric.name for g in gates], draws=400, **options)
    return [result.outcome for g in gates for result in gate.judge(g, found, confidence=0.95)]


def test_a_gate_fails_only_when_the_whole_interval_is_beyond():
    """TPOT 50 % longer: +5 % fails, +200 % passes, +50 % cannot be told from the limit."""
    base, other = arm("A", run(noisy(1, 1500))), arm("B", run(noisy(2, 1500, slower=1.5)))
    said = outcomes(base, other, "p99_tpot<=+5%", "p99_tpot<=+200%", "p99_tpot<=+50%")
    assert said == [gate.FAIL, gate.PASS, gate.CANNOT_TELL]


def test_cannot_tell_names_the_smallest_effect_that_could_be_seen():
    """A P99 TTFT of 400 requests cannot resolve 1 %: the outcome says so and gives the detectable effect."""
    found = compare(arm("A", run(noisy(1, 400))), arm("B", run(noisy(2, 400))), names=["p99_ttft"], draws=400)
    (result,) = gate.judge(gate.parse("p99_ttft<=+1%"), found, confidence=0.95)
    assert result.outcome == gate.CANNOT_TELL
    assert "minimal detectable effect" in result.reason


def test_an_absolute_gate_looks_at_the_candidate_alone():
    """Attainment 75 % of 400: at least 0.9 fails, at least 0.6 passes, at least 0.75 cannot be told."""
    late = frame(np.where(np.arange(400) % 4 == 0, 2.0, 0.1))
    base, other = arm("A", run(frame(np.full(400, 0.1)))), arm("B", run(late))
    said = outcomes(base, other, "attainment>=0.9", "attainment>=60%", "attainment>=0.75")
    assert said == [gate.FAIL, gate.PASS, gate.CANNOT_TELL]


def test_ten_of_ten_do_not_prove_99_percent():
    """All ten attained: the interval of the share reaches far below 0.99."""
    few = arm("A", run(frame(np.full(10, 0.1))))
    assert outcomes(few, few, "attainment>=0.99") == [gate.CANNOT_TELL]


def test_a_gate_on_one_class_ignores_the_others():
    """Only `doc` is slower: its gate fails, chat's passes; an unknown class is an error that lists the known."""
    classes = np.where(np.arange(3000) % 2 == 0, "chat", "doc")
    base = noisy(1, 3000, classes=classes)
    slow = base.with_columns(base["tpot_s"] * np.where(classes == "doc", 1.5, 1.0))
    arms = arm("A", run(base)), arm("B", run(slow))
    assert outcomes(*arms, "doc:p50_tpot<=+5%", "chat:p50_tpot<=+5%") == [gate.FAIL, gate.PASS]
    with pytest.raises(InputError, match="class 'code': expected one of the runs' classes: chat, doc"):
        outcomes(*arms, "code:p50_tpot<=+5%")


def test_a_failure_under_the_noise_floor_cannot_be_told():
    """The change is certain in these rows, but the machine moves by more from run to run."""
    floor = noise.measure(arm("A", *[run(noisy(1, slower=s)) for s in (1.0, 1.1, 1.2, 0.95)]))
    base, other = arm("A", run(noisy(1))), arm("B", run(noisy(1, slower=1.1)))
    assert outcomes(base, other, "p50_tpot<=+5%") == [gate.FAIL]
    assert outcomes(base, other, "p50_tpot<=+5%", floor=floor) == [gate.CANNOT_TELL]


def test_many_gates_share_the_error():
    """Up to two gates keep 95 %; ten are held to 99 % each, so that any false alarm stays within 5 %."""
    assert [round(gate.gate_confidence(n, 0.95), 6) for n in (1, 2, 10)] == [0.95, 0.95, 0.99]


def test_a_relative_limit_on_a_share_of_zero_is_an_error():
    """Nothing was refused: +2 % of 0 is undefined, which is no lack of a baseline; the absolute form works."""
    served, half = frame(np.full(400, 0.1)), noisy(1, 400)
    refused = half.with_columns(status=np.where(np.arange(400) % 2 == 0, "refused", "ok"))
    base, other = arm("A", run(served)), arm("B", run(refused))
    with pytest.raises(InputError, match=r"baseline's refused is 0 .*undefined: .* such as refused<=2%"):
        outcomes(base, other, "refused<=+2%")
    assert outcomes(base, other, "refused<=2%") == [gate.FAIL]
