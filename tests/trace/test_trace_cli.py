"""Claims about `headway trace` as a command: output, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headway.cli import trace as command
from headway.errors import InputError
from headway.trace import read, write
from headway.trace.charts import bars, html_page, length_bins, terminal_lines
from headway.trace.shape import shape
from headway.trace.synthetic import demo_trace

runner = CliRunner()


@pytest.fixture
def app() -> typer.Typer:
    """The application with only this command."""
    made = typer.Typer()
    made.callback()(lambda: None)
    command.register(made)
    return made


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A written demo trace."""
    path = tmp_path / "demo.jsonl"
    write(demo_trace(n=400, rate=2.0, seed=1), path)
    return path


def test_inspect_prints_shape_chart_and_method(app: typer.Typer, demo: Path) -> None:
    """n, unit and percentile method stand beside the numbers."""
    result = runner.invoke(app, ["trace", "inspect", str(demo)])
    assert result.exit_code == 0, result.output
    for text in (
        "requests/s over time",
        "nearest rank",
        "n = 400",
        "CV of gaps",
        "chat 3",
        "400 / 400 / none",
    ):
        assert text in result.output
    assert "█" in result.output


def test_inspect_json_is_for_programs(app: typer.Typer, demo: Path) -> None:
    """Everything that the table shows, and the report of the rows."""
    result = runner.invoke(app, ["trace", "inspect", str(demo), "--json", "--limit", "100"])
    found = json.loads(result.output)
    assert found["n"] == 100
    assert found["report"] == {"read": 400, "kept": 400, "dropped": {}}
    assert found["input_tokens"]["n"] == 100
    assert found["percentiles"] == "nearest rank"
    assert found["sha256"] == read(demo).sha256


def test_the_html_page_holds_its_library_and_asks_no_network(demo: Path) -> None:
    """No script, style, image or frame comes from elsewhere, and names are escaped."""
    pytest.importorskip("vl_convert")
    trace = read(demo)
    page = html_page(trace, shape(trace))
    body = page.rpartition("</style><h1>Trace demo.jsonl</h1>")[2]
    assert "mean rate" in body
    assert len(page) > 400_000
    assert page.index("<title>Trace demo.jsonl</title>") < 200
    for marker in ('src="http', "src='http", 'href="http', "<link", "@import", "importScripts"):
        assert marker not in page


def test_convert_cuts_scales_classifies_and_writes_what_it_did(app: typer.Typer, demo: Path, tmp_path: Path) -> None:
    """The written file carries its history."""
    target = tmp_path / "out.jsonl"
    result = runner.invoke(
        app,
        [
            "trace",
            "convert",
            str(demo),
            str(target),
            "--limit",
            "50",
            "--rate",
            "4",
            "--max-input",
            "300",
            "--classes",
            "short<=100,long=any",  # as replay's --class-rule, or short=100
        ],
    )
    assert result.exit_code == 0, result.output
    made = read(target)
    assert len(made) == 50
    assert shape(made).rate == pytest.approx(4.0)
    assert made.frame["input_tokens"].max() == 300
    assert set(made.frame["slo_class"]) == {"short", "long"}
    assert any("clipped to 300" in note for note in made.history)


@pytest.mark.parametrize("rules", ["chat", "chat=", "chat=x", "=5", "a=5,,b=any"])
def test_bad_class_rules_are_refused(app: typer.Typer, demo: Path, tmp_path: Path, rules: str) -> None:
    """The rule that is wrong is named."""
    result = runner.invoke(app, ["trace", "convert", str(demo), str(tmp_path / "o"), "--classes", rules])
    assert isinstance(result.exception, InputError)
    assert "expected NAME=TOKENS" in str(result.exception)


def test_synthesize_fits_a_trace_or_writes_the_demo(app: typer.Typer, demo: Path, tmp_path: Path) -> None:
    """The table compares source and result; the demo needs a rate."""
    target = tmp_path / "out.jsonl"
    result = runner.invoke(app, ["trace", "synthesize", str(target), "--from", str(demo), "--n", "300"])
    assert result.exit_code == 0, result.output
    assert "input_tokens p50" in result.output
    assert len(read(target)) == 300
    result = runner.invoke(app, ["trace", "synthesize", str(target), "--demo", "--n", "5", "--rate", "1"])
    assert result.exit_code == 0, result.output
    assert read(target).frame.equals(demo_trace(n=5, rate=1.0, seed=0).frame)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--demo"], "--demo: expected --rate"),
        ([], "exactly one of --from FILE and --demo"),
        (["--demo", "--from", "x"], "exactly one of --from FILE and --demo"),
        (["--from", "x", "--kind", "single"], "--kind single: only for --demo"),
        (["--demo", "--rate", "1", "--n", "5", "--format", "azure2023"], "--format azure2023: only for --from"),
        (["--demo", "--rate", "1", "--n", "5", "--zero-output", "one"], "--zero-output one: only for --from"),
    ],
)
def test_synthesize_refuses_what_contradicts(
    app: typer.Typer, tmp_path: Path, options: list[str], message: str
) -> None:
    """Nothing is silently ignored."""
    result = runner.invoke(app, ["trace", "synthesize", str(tmp_path / "o"), *options])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_bars_show_the_least_value_and_fill_the_highest() -> None:
    """Eight eighths for the top, one for what is there at all, none for nothing."""
    import numpy as np

    assert bars(np.array([0.0, 0.001, 8.0]), height=1) == [" ▁█"]
    assert bars(np.array([8.0, 4.0]), height=2) == ["█ ", "██"]
    assert bars(np.zeros(2), height=1) == ["  "]


def test_length_bins_hold_every_request() -> None:
    """No length falls outside, from 1 to the largest prompt."""
    import numpy as np

    for values in (np.array([1]), np.array([1, 2, 3, 2**31 - 1]), np.arange(1, 3000)):
        counts, edges = length_bins(values)
        assert counts.sum() == len(values)
        assert len(counts) == len(edges)


def test_the_chart_of_one_request_is_still_a_chart() -> None:
    """No division by a span of nothing."""
    assert terminal_lines(demo_trace(n=1, rate=1.0, seed=0))


def test_a_target_that_cannot_be_written_is_the_callers_fault(app: typer.Typer, demo: Path, tmp_path: Path) -> None:
    """Exit code 2 and the path, not a traceback."""
    nowhere = str(tmp_path / "no" / "folder" / "x")
    for words in (["convert", str(demo), nowhere], ["synthesize", nowhere, "--demo", "--n", "5", "--rate", "1"]):
        result = runner.invoke(app, ["trace", *words])
        assert isinstance(result.exception, InputError)
        assert f"{nowhere}: cannot be written" in str(result.exception)
