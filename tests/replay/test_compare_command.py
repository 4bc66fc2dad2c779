"""`headway compare` from the command line: exit codes and the four outputs."""

import json
import sys

import pytest
from compare_runs import noisy

from headway.cli import main
from headway.replay.store import save


@pytest.fixture
def headway(tmp_path, monkeypatch, capsys):
    """Return a function that runs `headway WORDS` beside three A/A runs and a slow one: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name, seed, slower in (("a1", 1, 1.0), ("a2", 2, 1.0), ("a3", 3, 1.0), ("slow", 1, 2.0)):
        meta = {
            "state": "finished",
            "valid": True,
            "seed": 0,
            "trace": {"sha256": "c" * 64, "selection": None},
        }
        save(tmp_path / name, meta, noisy(seed, 400, slower=slower))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["headway", *words])
        with pytest.raises(SystemExit) as left:
            main.run()
        told = capsys.readouterr()
        return left.value.code, told.out, told.err

    return call


def test_a_failing_gate_exits_1_and_a_passing_one_0(headway):
    """TPOT doubled: +5 % fails, +500 % passes; without a gate nothing fails."""
    assert headway("compare", "a1", "slow", "--gate", "p50_tpot<=+5%")[0] == 1
    assert headway("compare", "a1", "slow", "--gate", "p50_tpot<=+500%")[0] == 0
    assert headway("compare", "a1", "slow")[0] == 0


def test_a_gate_that_cannot_tell_fails_only_when_strict(headway):
    """+100 % is the true change: it cannot be told, which only --strict makes a failure."""
    words = ("compare", "a1", "slow", "--gate", "p99_ttft<=+100%")
    code, out, _ = headway(*words)
    assert code == 0
    assert "cannot tell at this n" in out
    assert headway(*words, "--strict")[0] == 1


def test_bad_input_exits_2_with_one_line(headway):
    """A bad gate, a lonely arm, a missing folder and options that exclude each other."""
    for words in (
        ("a1", "a2", "--gate", "p99_ttft=<5%"),
        ("a1",),
        ("a1", "nowhere"),
        ("a1", "a2", "--json", "--markdown"),
        ("a1", "a2", "a3", "--aa", "--gate", "p99_ttft<=+5%"),
        ("a1", "a2", "--out", "x.json"),
        ("a1", "a2", "--strict"),
    ):
        code, _, err = headway("compare", *words)
        assert code == 2
        assert err.startswith("headway: ")
        assert err.count("\n") == 1


def test_json_markdown_and_html_say_the_same_verdict(headway, tmp_path):
    """Every output carries `worse` for the doubled TPOT."""
    code, out, _ = headway("compare", "a1", "slow", "--json", "--html", "page.html", "--metric", "p50_tpot")
    assert code == 0
    (level,) = json.loads(out)["comparisons"][0]["levels"]
    assert [(c["metric"], c["verdict"]) for c in level["changes"]] == [("p50_tpot", "worse")]
    assert 'verdict worse">worse' in (tmp_path / "page.html").read_text()
    _, out, _ = headway("compare", "a1", "slow", "--markdown", "--metric", "p50_tpot")
    assert "| p50_tpot | all |" in out
    assert "| worse |" in out


def test_aa_writes_a_floor_that_compare_takes(headway, tmp_path):
    """The floor of three repeats is written, and a doubled TPOT still stands out from it."""
    code, _, _ = headway("compare", "--aa", "a1,a2,a3", "--out", "floor.json")
    assert code == 0
    assert json.loads((tmp_path / "floor.json").read_text())["repeats"] == 3
    _, out, _ = headway("compare", "a1", "slow", "--noise-floor", "floor.json", "--json")
    changes = json.loads(out)["comparisons"][0]["levels"][0]["changes"]
    assert next(c for c in changes if c["metric"] == "p50_tpot")["verdict"] == "worse"


def test_several_candidates_are_each_compared_with_the_first(headway):
    """Two candidates give two comparisons with one baseline, and a gate is judged for each."""
    _, out, _ = headway("compare", "a1", "a2", "slow", "--gate", "p50_tpot<=+20%", "--json")
    found = json.loads(out)
    assert [c["candidate"]["name"] for c in found["comparisons"]] == ["a2", "slow"]
    assert [g["outcome"] for g in found["gates"]] == ["pass", "fail"]
