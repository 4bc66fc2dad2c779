"""`headway check`: certificates, counter-examples, and the courses of service times that it tries."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headway.cli.main import build
from headway.core import Line
from headway.errors import InputError
from headway.replay.targets import Targets
from headway.trace.synthetic import demo_trace
from headway.twin import Scenario, find_profile, simulate
from headway.twin.check import LOW, Certificate, check, patterns
from headway.twin.patterns import Course, Edited, Scripted, alternating, constant, spells, uniform
from headway.twin.price import Correction

BARE = Scenario(profile=find_profile("cpu-smollm2"))
TARGETS = {"chat": Targets(ttft_s=1.0, tpot_s=0.12), "document": Targets(ttft_s=6.0, tpot_s=0.12)}


def certificate(*, seeds: int = 1, searches: int = 2, **settings: object) -> Certificate:
    """Check 40 requests at twice what the profile can serve."""
    scenario = Scenario(profile=find_profile("cpu-smollm2"), targets=TARGETS, settings=settings)  # type: ignore[arg-type]
    return check(demo_trace(rate=6.0, seed=1, n=40), scenario, seeds=seeds, searches=searches)


@pytest.mark.parametrize(
    "course",
    [constant(1.2), alternating(0.5, 1.2, 3), uniform(0.3, 1.2, 5), spells(0.3, 1.2, 5), Edited(constant(1.0))],
)
def test_a_course_is_one_stream_however_it_is_read(course: Course) -> None:
    """One by one, many at once, from anywhere: the factor of a step is its own, and lies under the envelope."""
    whole = course(0, 10_000)
    assert whole.min() >= 0.3
    assert whole.max() <= 1.2
    assert np.array_equal(course(5_000, 300), whole[5_000:5_300])
    stream = Scripted(course)
    read: list[float] = []
    while len(read) < 9_000:
        read += [stream.next() for _ in range(7)]
        read += stream.peek(np.zeros(1_000))[:500].tolist()
        stream.skip(500)
    assert read == whole[: len(read)].tolist()


@pytest.mark.parametrize("course", [constant(1.5), alternating(0.3, 1.5, 20), spells(0.3, 1.5, 5)])
def test_steps_in_a_row_keep_their_envelopes_however_they_are_read(course: Course) -> None:
    """One by one or many at once they take the same; no stretch takes more than its rate and burst."""
    lines, prices = (Line(1.05, 0.2), Line(1.2, 0.05)), np.random.default_rng(1).uniform(0.01, 0.1, 600)
    one, many = Scripted(course, lines), Scripted(course, lines)
    read = [one.next(price) for price in prices.tolist()]
    at = 0
    while at < len(prices):
        taken = min(41, len(prices) - at)
        assert many.peek(prices[at : at + 60])[:taken].tolist() == read[at : at + taken]
        many.skip(taken)
        at += taken
    assert max(read) <= 1.5
    for line in lines:
        beyond = np.concatenate(([0.0], ((np.array(read) - line.rate) * prices).cumsum()))
        worst = (beyond - np.minimum.accumulate(beyond)).max()
        assert worst <= line.burst_s + 1e-9
        assert worst > line.burst_s / 2  # the courses do try it


def test_the_certificate_says_what_steps_in_a_row_are_counted_at() -> None:
    """A profile with envelopes of stretches has them in the assumptions, one without says so; not where none count."""
    with_lines = replace(BARE.profile, lines=(Line(1.1, 0.25),))
    for profile, settings, said in (
        (with_lines, {}, "at most 1.1 times their mean and 0.25 s"),
        (BARE.profile, {}, "no promise counts on steps in a row"),
        (with_lines, {"admission.stretches": False}, None),
    ):
        given = Scenario(profile=profile, targets=TARGETS, settings=settings)  # type: ignore[arg-type]
        found = check(demo_trace(rate=6.0, seed=1, n=12), given, seeds=1, searches=1)
        told = [text for text in found.assumptions if text.startswith("A1'")]
        assert len(told) == (said is not None)
        assert all(str(said) in text for text in told)


def test_edited_steps_differ_and_the_rest_does_not() -> None:
    """The search changes stretches; later changes win."""
    course = Edited(constant(1.0)).change(10, 5, 1.2).change(12, 1, 0.5)
    assert course(9, 8).tolist() == [1.0, 1.2, 1.2, 0.5, 1.2, 1.2, 1.0, 1.0]


def test_a_certificate_says_what_was_tried() -> None:
    """No promise is broken under the strict settings; every pattern has its row, and it all is JSON."""
    found = certificate()
    assert found.holds
    assert [each.pattern for each in found.attempts][:8] == [name for name, _ in patterns(1.15, 1, 0)]
    assert len(found.attempts) == 8 + 2
    for each in found.attempts:
        assert each.accepted + each.unpromised + each.refused == each.offered == 40
        assert each.missed == 0
    assert found.attempts[2].accepted > found.attempts[0].accepted  # steps at a quarter of their mean leave more room
    data = json.loads(json.dumps(found.as_dict()))
    assert data["counter_example"] is None
    assert data["accepted"] == sum(each.accepted for each in found.attempts)
    assert len(data["trace"]["sha256"]) == 64
    assert data["assumptions_dropped"] == []
    assert data["settings"]["admission.strict"] is True


def test_same_input_same_certificate() -> None:
    """Courses and search are drawn from the seed."""
    assert certificate().as_dict() == certificate().as_dict()


def test_a_counter_example_has_the_schedule_that_led_to_it() -> None:
    """Without an admission test requests are late: the check stops and shows the steps of the latest one's life."""
    found = certificate(admission="admit_all")
    assert not found.holds
    assert len(found.attempts) == 1
    assert found.counter is not None
    request, schedule = found.counter["request"], found.counter["schedule"]
    assert found.counter["late_s"] > 0
    assert schedule[0]["end_s"] > request["scheduled_s"]
    assert sum(step["chunks"].get(str(request["index"]), 0) for step in schedule) == request["prompt_tokens"]
    assert all(step["times_mean"] == pytest.approx(1.15) for step in schedule)
    assert [text[:2] for text in found.dropped] == ["A6"]


@pytest.mark.parametrize(
    ("settings", "dropped"),
    [
        ({"policy.jump": True}, ["po"]),
        ({"admission.strict": False}, ["A6"]),
        ({"learn": True}, ["A2"]),
        ({"policy": "edf"}, ["po"]),
        ({"admission.min_chunk": 8}, ["po"]),
        ({"admission.foresight": 1.0, "kv_blocks": 100}, []),
    ],
)
def test_settings_that_drop_an_assumption_are_named(settings: dict[str, object], dropped: list[str]) -> None:
    """What the proof rests on and the settings give up is part of the certificate."""
    found = certificate(seeds=0, searches=0, **settings)
    assert [text[:2] for text in found.dropped] == dropped
    assert not {text[:2] for text in found.assumptions} & set(dropped)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: certificate(noise=False), "noise"),
        (lambda: certificate(grace_s=3), "grace_s"),
        (lambda: check(demo_trace(rate=1, seed=0, n=3), BARE), "no class has a TTFT"),
    ],
)
def test_what_makes_no_sense_is_an_error(run: Callable[[], object], message: str) -> None:
    """The service times are the check's own, runs go to the end, and something must be promised."""
    with pytest.raises(InputError, match=message):
        run()


@pytest.mark.parametrize(("settings", "code"), [([], 0), (["--set", "admission=admit_all"], 1)])
def test_the_command_prints_and_fails(settings: list[str], code: int) -> None:
    """Exit 0 with a certificate, exit 1 with a counter-example; --json holds the same."""
    words = ["check", "demo", "--rate", "6", "--limit", "30", "--slo", "chat:ttft=1,tpot=0.12", "--seeds", "0"]
    words += ["--slo", "document:ttft=6,tpot=0.12", "--searches", "1", *settings]
    plain = CliRunner().invoke(build(words), words)
    assert plain.exit_code == code, plain.output
    assert ("COUNTER-EXAMPLE" in plain.output) is bool(code)
    assert ("no promise was broken" in plain.output) is not bool(code)
    assert "every step at its envelope" in plain.output
    words.append("--json")
    told = CliRunner().invoke(build(words), words)
    assert told.exit_code == code
    assert json.loads(told.stdout)["holds"] is not bool(code)
    assert f"{LOW:g}" in plain.output or code


def test_the_envelope_is_that_of_the_line_that_promises_are_made_with() -> None:
    """What kinds of steps differ by in a calibrated profile neither breaks the envelope nor stays below it."""
    correction = Correction(q_up_to=(0,), n_up_to=(), factors=((1.4,), (0.8,)))
    plain = find_profile("cpu-smollm2")
    trace = demo_trace(rate=6.0, seed=1, n=30)
    found = [
        check(trace, Scenario(profile=each, targets=TARGETS), seeds=1, searches=1)
        for each in (plain, replace(plain, correction=correction))
    ]
    assert found[0].holds
    assert found[0].as_dict() == found[1].as_dict()
    bounded = {"noise": "bounded", "learn": False}
    frames = [
        simulate(trace, Scenario(profile=each, targets=TARGETS, settings=bounded)).frame  # type: ignore[arg-type]
        for each in (plain, replace(plain, correction=correction))
    ]
    assert frames[0].equals(frames[1])


def test_a_check_in_which_nothing_is_promised_is_no_certificate() -> None:
    """Targets that nobody can meet, milliseconds for seconds: every request is refused, and that is told."""
    scenario = Scenario(profile=find_profile("cpu-smollm2"), targets={"chat": Targets(ttft_s=0.001)})
    trace = demo_trace(rate=6.0, seed=1, n=5)
    with pytest.raises(InputError, match="none of 5 requests was promised anything"):
        check(trace, scenario, seeds=0, searches=0)


PROVED = "[policy_parameters]\njump = false\n[admission_parameters]\nstrict = true\n"


@pytest.mark.parametrize(
    ("text", "words", "dropped"),
    [
        ("", [], ["po", "A6"]),
        (PROVED, [], []),
        ("", ["--set", "policy.jump=false", "--set", "admission.strict=true"], []),
        (PROVED, ["--set", "policy.jump=true"], ["po"]),
        ('policy = "edf"\nadmission = "queue_depth"\n', [], ["po", "A6"]),
    ],
)
def test_a_servers_file_is_checked_as_it_is_served(
    tmp_path: Path, text: str, words: list[str], dropped: list[str]
) -> None:
    """What the file leaves out has the server's defaults, not the strict ones; the certificate has these settings."""
    classes = "[class.chat]\nttft_ms = 1000\ntpot_ms = 120\n[class.document]\nttft_ms = 6000\n"
    file = tmp_path / "headway.toml"
    file.write_text(f'default_class = "chat"\n{text}{classes}', encoding="utf-8")
    words = ["check", "demo", "--rate", "2", "--limit", "5", "--seeds", "0", "--searches", "0", "--json", *words]
    told = json.loads(CliRunner().invoke(build(words), [*words, "--config", str(file)]).stdout)
    assert [each[:2] for each in told["assumptions_dropped"]] == dropped
    if told["settings"]["admission"] == "response_time":
        assert told["settings"]["admission.strict"] is ("A6" not in dropped)
        assert told["settings"]["admission.foresight"] == 1.0
