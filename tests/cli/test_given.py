"""What commands do with files and names that the command line gives them and that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli.main import build
from headway.errors import InputError

SIMULATE = ["simulate", "demo", "--limit", "3", "--rate", "2"]


def run(*words: object) -> Result:
    """Return what a command line ends with."""
    return CliRunner().invoke(build([str(words[0])]), [str(word) for word in words])


def refused(*words: object) -> str:
    """Return the message of the `InputError` that a command ends with."""
    result = run(*words)
    assert isinstance(result.exception, InputError), result.output
    return str(result.exception)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file, where some expect a folder."""
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    return path


def test_an_output_that_cannot_be_written_is_named(file: Path) -> None:
    """A file where a folder is needed, a folder where a file is; before anything is simulated or served."""
    for words in (("--out", file), ("--out", file / "run"), ("--html", file / "page.html")):
        assert refused(*SIMULATE, *words).startswith(f"{words[1]}: cannot be written: ")
    assert refused(*SIMULATE, "--sweep", "policy=fcfs,edf", "--out", file / "runs").startswith(
        f"{file / 'runs'}: cannot"
    )
    assert refused(*SIMULATE, "--html", file.parent) == f"--html {file.parent}: is a folder: expected a file"
    out = file / "profile.toml"
    assert refused("calibrate", "--steps", file, "--out", out).startswith(f"{out}: cannot be written: ")


def test_a_profile_gets_no_engine_that_cannot_be(file: Path) -> None:
    """It could be written, and not be read again."""
    found = refused("calibrate", "--steps", file, "--out", file.parent / "out.toml", "--set", "kv_blocks=-1")
    assert found == "--set kv_blocks=-1: expected a whole number of at least 1"


def test_a_trace_is_not_written_over_its_own_source(tmp_path: Path) -> None:
    """Neither by `convert` nor by `synthesize`: its rows would be gone."""
    trace = tmp_path / "trace.jsonl"
    assert run("trace", "synthesize", trace, "--demo", "--rate", "2", "--n", "40").exit_code == 0
    before = trace.read_bytes()
    for words in (("convert", trace, trace), ("synthesize", trace, "--from", trace, "--n", "20")):
        assert refused("trace", *words) == f"{trace}: is the source itself: expected another file"
    assert trace.read_bytes() == before


def test_the_clairvoyant_test_is_not_served(tmp_path: Path) -> None:
    """It knows how long answers will be, which only the twin can tell it."""
    config = tmp_path / "headway.toml"
    config.write_text('admission = "clairvoyant"\n', encoding="utf-8")
    words = "knows what is still to come, so it is for the twin: expected another admission test"
    assert refused("serve", "--admission", "clairvoyant") == f"--admission clairvoyant: {words}"
    assert refused("serve", "--config", config) == f"{config}: admission = 'clairvoyant': {words}"
    assert "clairvoyant" not in refused("serve", "--admission", "foo")


def test_help_shows_what_is_in_brackets() -> None:
    """They are no markup."""
    for command in ("simulate", "check"):
        assert "MODEL[xN]" in run(command, "--help").output.replace("\n", "")
