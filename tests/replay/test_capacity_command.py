"""`headway replay --find-capacity`: one run a rate, the capacity in words and in JSON."""

import json
import sys

import numpy as np
import pytest
from compare_runs import frame, run

from headway.cli import main


@pytest.fixture
def headway(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command against a scripted client that attains up to 11 requests/s."""
    played = []

    def replay(trace, *, run_dir, seed, **_):
        rate = (len(trace) - 1) / trace.span_s
        played.append((run_dir.name, seed))
        late = np.full(len(trace), 0.1 if rate <= 11.0 else 2.0)
        invalid = {"valid": False, "invalid_reasons": ["client late"]} if rate > 30 else {}
        return run(frame(late), run_dir, **invalid)

    monkeypatch.setattr("headway.replay.client.replay", replay)

    def call(*words):
        command = ["headway", "replay", "demo", "--url", "http://x", "--out", str(tmp_path / "runs"), *words]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as left:
            main.run()
        told = capsys.readouterr()
        return left.value.code, told.out, told.err, played

    return call


def test_the_capacity_is_found_and_every_run_kept_apart(headway):
    """Up to 11 req/s everything attains: the answer lies within 5 % and each run has its own folder and seed."""
    code, out, _, played = headway("--find-capacity", "0.9", "--slo", "ttft=1", "--rate", "4", "--json")
    assert code == 0
    found = json.loads(out)
    # The mean rate of a drawn trace differs a little from the one asked for.
    assert 9.5 < found["rate"] < 12.5
    assert found["resolved"]
    assert [seed for _, seed in played] == list(range(len(played)))
    assert len({name for name, _ in played}) == len(played)


def test_a_search_that_outruns_the_client_stops(headway):
    """At 40 req/s the scripted client is the bottleneck: exit 4, naming the run."""
    code, _, err, played = headway("--find-capacity", "0.9", "--slo", "ttft=1", "--rate", "40")
    assert code == 4
    assert "invalid: client late" in err
    assert len(played) == 1


def test_a_search_without_targets_is_refused(headway):
    """Without targets every answer attains, so there is nothing to search."""
    code, _, err, _ = headway("--find-capacity", "0.9")
    assert code == 2
    assert "no --slo" in err
