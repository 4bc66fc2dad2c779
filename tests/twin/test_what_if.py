"""Settings, sweeps, the report, and the commands `simulate` and `calibrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_parts import step_log
from twin_build import NOISY, SIMPLE, make_trace, run
from typer.testing import CliRunner

from headway.cli.main import build
from headway.core import Slo
from headway.errors import InputError
from headway.replay import store
from headway.replay.targets import Targets
from headway.trace.synthetic import demo_trace
from headway.twin import Scenario, report, sweep
from headway.twin.profile import Profile, TwinError
from headway.twin.scenario import parse_settings
from headway.twin.source import class_notes


def cli(*words: str) -> str:
    """Run a command of `headway` and return what it printed."""
    result = CliRunner().invoke(build(list(words)), list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"token_budgets": 3}, "token_budgets"),
        ({"token_budget": 0}, "token_budget"),
        ({"token_budget": 1.5}, "token_budget"),
        ({"policy": "best"}, "policy = 'best'"),
        ({"policy.jumps": True}, "jumps"),
        ({"admission.foresight": 3}, "foresight"),
        ({"admission.strict": "no"}, "response_time: strict = 'no': expected a valid boolean"),
        ({"policy.window": 10.5}, "headway: window = 10.5: expected a valid integer"),
        ({"kv_blocks": "none"}, "kv_blocks = 'none'"),
        ({"learn": "none"}, "learn = 'none'"),
        ({"router": "random"}, "router"),
        ({"noise": "loud"}, "noise"),
        ({"async_lag": 1}, "async_lag"),
        ({"grace_s": "soon"}, "grace_s"),
    ],
)
def test_bad_setting_names_key_and_value(settings: dict, named: str) -> None:
    """Nothing is silently ignored."""
    chosen = {"policy": "headway", "admission": "response_time"} | settings
    with pytest.raises(InputError, match=named):
        run([(0.0, 5, 1)], **chosen)


def test_settings_are_typed() -> None:
    """Numbers, truth values and names come out as such; the same key twice is an error."""
    assert parse_settings(["token_budget=64", "prefix_cache=true", "blocking_s=0.5", "policy=edf"]) == {
        "token_budget": 64,
        "prefix_cache": True,
        "blocking_s": 0.5,
        "policy": "edf",
    }
    for bad in (["token_budget"], ["a=1"], ["policy=edf", "policy=fcfs"]):
        with pytest.raises(InputError):
            parse_settings(bad)


def test_grid_is_the_product() -> None:
    """Values and ranges multiply, in the order given; nonsense is refused."""
    points = sweep.grid("token_budget=64..192/64;policy=fcfs,edf")
    assert len(points) == 6
    assert points[1] == {"token_budget": 64, "policy": "edf"}
    for bad in ("token_budget", "x=1", "policy=", "policy=fcfs,fcfs", "token_budget=9..1/2", "policy=a;policy=b"):
        with pytest.raises(InputError):
            sweep.grid(bad)


def test_sweep_in_processes_equals_sweep_in_one(tmp_path: Path) -> None:
    """Two worker processes give the very rows of one, in the same order, and keep every run."""
    trace = make_trace([(0.05 * i, 20, 6) for i in range(30)])
    scenario = Scenario(profile=NOISY, targets={"default": Targets(ttft_s=0.5)}, settings={"admission": "admit_all"})
    points = sweep.grid("policy=fcfs,headway")
    alone = list(sweep.run(trace, scenario, points))
    together = list(sweep.run(trace, scenario, points, jobs=2, out=tmp_path))
    assert [each.summary for each in alone] == [each.summary for each in together]
    runs = [store.load(tmp_path / name) for name in ("0000", "0001")]
    assert [each.meta["label"] for each in runs] == ["policy=fcfs", "policy=headway"]
    assert all(each.valid and each.meta["kind"] == "simulation" for each in runs)


def test_pareto_front_leaves_out_the_beaten() -> None:
    """A point that another beats in all three is not on the front; equal points both are."""

    def point(ttft: float, tpot: float, goodput: float) -> sweep.Prediction:
        total = {"ttft": {"p99_s": ttft}, "tpot": {"p99_s": tpot}, "goodput_req_s": goodput}
        return sweep.Prediction(settings={}, summary={"total": total}, facts={}, error=None, path=None, wall_s=0.0)

    assert sweep.pareto([point(1, 1, 5), point(2, 1, 5), point(2, 2, 6), point(1, 1, 5)]) == [True, False, True, True]


def test_page_is_self_contained_and_shows_the_error() -> None:
    """One file, no address in it, the twin's recorded error beside each prediction and `unknown` without one."""
    known = Profile(
        name="<k>",
        label="measured",
        cost=SIMPLE.cost,
        twin_error=(TwinError(load="all loads", busy_max=1.0, errors={"ttft_p99": 0.08}),),
    )
    trace = make_trace([(0.5 * i, 5, 3) for i in range(20)])
    for profile, text in ((known, "8.0 % (all loads)"), (SIMPLE, "unknown")):
        scenario = Scenario(profile=profile, settings={"admission": "admit_all"})
        page = report.page(list(sweep.run(trace, scenario, sweep.grid("policy=fcfs,headway"))), profile, "t")
        assert text in page
        assert "<svg" in page
        assert "http" not in page.replace("http://www.w3.org", "")
        assert "<k>" not in page


def test_simulate_and_compare(tmp_path: Path) -> None:
    """The command keeps a run that `headway compare` takes."""
    flags = ["--rate", "3", "--limit", "60", "--slo", "chat:ttft=1,tpot=0.12", "--slo", "document:ttft=6,tpot=0.12"]
    for policy in ("fcfs", "headway"):
        out = cli("simulate", "demo", *flags, "--set", f"policy={policy}", "--out", str(tmp_path / policy))
        assert "cpu-smollm2 (measured)" in out
    out = cli("compare", str(tmp_path / "fcfs"), str(tmp_path / "headway"), "--json", "--draws", "200")
    assert "attainment" in out


def test_simulate_as_json(tmp_path: Path) -> None:
    """Every point of a sweep with its settings, summary and engine facts; the chart on request."""
    page = tmp_path / "p.html"
    out = cli(
        *("simulate", "demo", "--limit", "20", "--sweep", "token_budget=64,128", "--json", "--html", str(page)),
    )
    points = json.loads(out)
    assert [each["settings"]["token_budget"] for each in points] == [64, 128]
    assert [each["twin_error"]["load"] for each in points] == ["2x", "2x"]  # this load keeps the engine busy
    assert page.read_text().startswith("<!doctype html>")


def test_simulate_takes_the_file_of_a_server(tmp_path: Path) -> None:
    """Classes, policy and parameters come from headway.toml; --set goes over them; best_effort refuses nobody."""
    config = tmp_path / "headway.toml"
    config.write_text(
        'policy = "edf"\ndefault_class = "chat"\n[class.chat]\nttft_ms = 900\non_miss = "best_effort"\n'
        "[class.document]\nttft_ms = 2500\n"
    )
    flags = ["simulate", "demo", "--rate", "6", "--limit", "80", "--json", "--config", str(config)]
    (mine,) = json.loads(cli(*flags))
    assert mine["engine"]["policy"] == "edf"
    assert mine["summary"]["classes"]["chat"]["refused"] == 0
    assert mine["summary"]["classes"]["document"]["refused"] > 0
    assert mine["summary"]["classes"]["chat"]["targets_s"]["ttft"] == [0.9]
    (other,) = json.loads(cli(*flags, "--set", "policy=fcfs"))
    assert other["engine"]["policy"] == "fcfs"


@pytest.mark.parametrize(
    ("words", "points"),
    [
        (["--sweep", "admission=admit_all,response_time"], 2),
        (["--sweep", "policy=fcfs,headway"], 2),
        (["--set", "policy=fcfs", "--set", "admission=admit_all"], 1),
    ],
)
def test_a_policy_that_is_replaced_takes_the_files_parameters_along(
    tmp_path: Path, words: list[str], points: int
) -> None:
    """The file's stay where its own policy or test stays; one given by --set belongs to whatever there is."""
    config = tmp_path / "headway.toml"
    config.write_text(
        'default_class = "chat"\n[policy_parameters]\njump = false\n[admission_parameters]\nstrict = true\n'
        "[class.chat]\nttft_ms = 900\n[class.document]\nttft_ms = 2500\n"
    )
    flags = ["simulate", "demo", "--rate", "6", "--limit", "20", "--json", "--config", str(config)]
    found = json.loads(cli(*flags, *words))
    assert len(found) == points
    (plain,) = json.loads(cli(*flags))
    if points == 2:
        assert found[1]["summary"] == plain["summary"]
    line = [*flags, *words, "--set", "policy.jump=true", "--set", "admission.strict=false"]
    assert "has no parameters" in str(CliRunner().invoke(build(line), line).exception)


CHAT_ONLY = ["--slo", "chat:ttft=1"]


@pytest.mark.parametrize("command", ["simulate", "check"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "0"], "limit = 0"),
        (["--rate", "0"], "rate = 0.0"),
        (["--format", "azure2023"], "--format 'azure2023' with demo"),
        (CHAT_ONLY, "requests of class 'document': expected one of the classes given: chat"),
        (
            ["--config", "FILE"],
            "requests of class 'document': expected one of the classes given: chat, slow",
        ),
    ],
)
def test_what_does_not_fit_the_trace_is_named(tmp_path: Path, command: str, words: list[str], message: str) -> None:
    """Zero is not the default, and a class that nobody defined attains nothing; a server would refuse it."""
    config = tmp_path / "headway.toml"
    config.write_text('default_class = "slow"\n[class.chat]\nttft_ms = 900\n[class.slow]\nttft_ms = 2500\n')
    line = [command, "demo", *(str(config) if word == "FILE" else word for word in words)]
    result = CliRunner().invoke(build(line), line)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", ""], "--sweep ''"),  # no sweep of one point
        (["--sweep", "token_budget=1..2000000000/1"], "2000000000 values: expected at most 10000"),
        (["--sweep", "token_budget=1..5000/1;kv_blocks=1..5000/1"], "25000000 points: expected at most 10000"),
        (["--jobs", "2"], "--jobs 2 without --sweep"),
        (["--label", "mine", "--sweep", "token_budget=64,128"], "--label mine with --sweep"),
        (["--out", "TAKEN"], "holds a run already"),
        (["--out", "RUNS", "--sweep", "token_budget=64,128"], "0001: holds a run already"),
    ],
)
def test_what_a_simulation_cannot_do_is_told_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Options that cannot take effect, grids that are too large, folders that are taken."""
    for folder in ("taken", "runs/0001"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / store.META).write_text("{}")
    monkeypatch.setattr(sweep, "simulate", lambda *_: pytest.fail("it started"))
    places = {"TAKEN": str(tmp_path / "taken"), "RUNS": str(tmp_path / "runs")}
    line = ["simulate", "demo", *(places.get(word, word) for word in words)]
    result = CliRunner().invoke(build(line), line)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


@pytest.mark.parametrize("command", ["simulate", "check"])
def test_a_seed_below_zero_is_a_usage_error(command: str) -> None:
    """Exit 2, as for any bad flag: 1 means a broken promise."""
    line = [command, "trace.csv", "--seed", "-1"]
    assert CliRunner().invoke(build(line), line).exit_code == 2


def test_classes_and_trace_that_differ_are_noted() -> None:
    """Targets that nobody has, and requests without targets; those of `default` are for everybody, as in a replay."""
    trace = make_trace([(0.0, 5, 3)])
    chat, default = (Slo(name=name, ttft_s=1.0) for name in ("chat", "default"))
    assert class_notes(trace, {}, closed=False) == []
    assert class_notes(trace, {"default": default}, closed=False) == []
    assert class_notes(trace, {"chat": chat, "default": default}, closed=False) == [
        "no request of class chat in the trace"
    ]
    assert class_notes(trace, {"chat": chat}, closed=False)[1].startswith("no targets for class default")
    assert class_notes(trace, {"chat": chat, "default": chat}, closed=True) == []
    assert class_notes(demo_trace(rate=1.0, n=20, seed=0), {"default": default}, closed=False) == []
    line = ["simulate", "demo", "--limit", "5", "--slo", "ttft=1", "--slo", "zzz:ttft=1"]
    result = CliRunner().invoke(build(line), line)
    assert "note: no request of class zzz in the trace\n" in result.stderr
    assert result.exit_code == 0


def test_calibrate_writes_a_profile_that_simulates(tmp_path: Path) -> None:
    """From step log to prediction."""
    log, profile = step_log(tmp_path / "steps.jsonl", scatter=0.03), tmp_path / "mine.toml"
    out = cli("calibrate", "--steps", str(log), "--out", str(profile), "--set", "kv_blocks=500")
    assert "mixed" in out
    assert "mine (measured)" in cli("simulate", "demo", "--limit", "10", "--profile", str(profile))
