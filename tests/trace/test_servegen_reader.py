"""Claims about ServeGen profiles: requests are drawn, seeded, at the stated rate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headway.errors import InputError
from headway.trace import read

FLAT = {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"}


def profile(folder: Path, rows: str, lengths: object = None, client: int = 0) -> Path:
    """Write one client's profile."""
    (folder / f"chunk-{client}-trace.csv").write_text(rows)
    data = {"0": FLAT} if lengths is None else lengths
    (folder / f"chunk-{client}-dataset.json").write_text(json.dumps(data))
    return folder


def test_gamma_windows_have_the_stated_rate_and_empty_ones_no_request(tmp_path: Path) -> None:
    """About 6,000 requests in the first window (10/s for 600 s), none in the second."""
    trace = read(profile(tmp_path, "0,10,1.0,Gamma,1.0,0.1\n600,0,0,,0,0\n1200,1,1.0,Gamma,1,1\n"))
    assert trace.format == "servegen"
    arrivals = trace.frame["arrival_s"].to_numpy()
    assert 5700 < (arrivals < 599).sum() < 6300
    assert ((arrivals > 601) & (arrivals < 1199)).sum() == 0
    assert set(trace.frame["input_tokens"]) == {10, 20}
    assert set(trace.frame["output_tokens"]) == {3}
    assert "seed 0" in trace.history[0]


def test_weibull_gaps_are_rescaled_to_the_stated_rate(tmp_path: Path) -> None:
    """The fitted scale alone would give a tenth of the rate; the rate wins."""
    trace = read(profile(tmp_path, "0,10,2.0,Weibull,0.6,1.0\n600,0,0,,0,0\n"))
    assert len(trace) == pytest.approx(6000, rel=0.1)
    gaps = np.diff(trace.frame["arrival_s"].to_numpy())
    assert gaps.std() / gaps.mean() > 1.5


def test_a_part_of_a_profile_holds_the_same_requests_as_the_whole(tmp_path: Path) -> None:
    """Each window has random numbers of its own, so the second half is the end of the whole."""
    folder = profile(tmp_path, "0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n")
    whole = read(folder, seed=3).frame
    part = read(folder, seed=3, start_s=600, duration_s=600).frame
    assert 400 < part.height < whole.height
    assert part["input_tokens"].to_list() == whole["input_tokens"].tail(part.height).to_list()


def test_the_seed_decides(tmp_path: Path) -> None:
    """Same seed same requests; another seed others."""
    folder = profile(tmp_path, "0,1,1,Gamma,1,1\n600,0,0,,0,0\n")
    first, again, other = (read(folder, seed=seed).frame for seed in (1, 1, 2))
    assert first.equals(again)
    assert not first.equals(other)


def test_lengths_are_literals_and_never_run(tmp_path: Path) -> None:
    """Text that is code is refused, not run."""
    bad = {"0": {"input_tokens": "__import__('os').getpid()", "output_tokens": "{1: 1.0}"}}
    folder = profile(tmp_path, "0,1,1,Gamma,1,1\n600,0,0,,0,0\n", bad)
    with pytest.raises(InputError, match=r"chunk-0-dataset.json: 0.input_tokens = .*expected a dict"):
        read(folder)


def test_a_window_before_any_lengths_is_dropped_and_counted(tmp_path: Path) -> None:
    """Traffic in the first window, lengths only from 600 s on."""
    lengths = {"0": {"input_tokens": "{}", "output_tokens": "{}"}, "600": FLAT}
    folder = profile(tmp_path, "0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n", lengths)
    report = read(folder).report
    assert report.dropped["no lengths in the profile"] > 400
    assert report.read == report.kept + report.dropped["no lengths in the profile"]


def test_bad_pattern_and_missing_lengths_are_named(tmp_path: Path) -> None:
    """File, line and value; or the file that is missing."""
    with pytest.raises(InputError, match=r"chunk-0-trace.csv:1: pattern = 'Pareto'"):
        read(profile(tmp_path, "0,1,1,Pareto,1,1\n600,0,0,,0,0\n"))
    folder = profile(tmp_path, "0,1,1,Gamma,1,1\n600,0,0,,0,0\n")
    (folder / "chunk-0-dataset.json").unlink()
    with pytest.raises(InputError, match=r"chunk-0-dataset.json: missing"):
        read(folder)


def test_too_many_requests_ask_for_a_part(tmp_path: Path) -> None:
    """Two weeks of a busy service do not fit by accident."""
    with pytest.raises(InputError, match="expected at most 20,000,000: ask for a part"):
        read(profile(tmp_path, "0,100000,1,Gamma,1,1\n600,0,0,,0,0\n"))


def test_a_recorded_trace_has_no_part_to_draw(tmp_path: Path) -> None:
    """`start_s` of read is for profiles; of a recorded trace `select` takes a part."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1}\n')
    with pytest.raises(InputError, match="expected a part to be taken with select"):
        read(path, start_s=5.0)


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        ("0,nan,1,Gamma,1,1\n600,0,0,,0,0\n", None, r"trace.csv:1: rate = 'nan': expected a number up to"),
        ("0,inf,1,Gamma,1,1\n600,0,0,,0,0\n", None, r"trace.csv:1: rate = 'inf'"),
        ("0,1,1,Weibull,1e-300,1\n600,0,0,,0,0\n", None, r"rate, shape = \(1.0, 1e-300\)"),
        ("0,1,1\n", None, r"trace.csv:1: '0,1,1': expected 6 fields"),
        ("0,1,1,Gamma,1,1\n600,0,0,,0,0\n", [3], r"dataset.json: \[3\]: expected an object of windows"),
        ("0,1,1,Gamma,1,1\n600,0,0,,0,0\n", {"0": 3}, r"dataset.json: 0 = 3: expected an object"),
        ("0,1,1,Gamma,1,1\n600,0,0,,0,0\n", {"0": {**FLAT, "input_tokens": "{5: -1}"}}, "expected a dict"),
        ("0,1,1,Gamma,1,1\n600,0,0,,0,0\n", {"0": {**FLAT, "input_tokens": "{5: 1e999}"}}, "expected a dict"),
        ("0,1,1,Gamma,1,1\n600,0,0,,0,0\n", {"0": {**FLAT, "input_tokens": "{9999999999: 1}"}}, "expected a dict"),
        ("0,1,1,Gamma,1,1\n600,0,0,,0,0\n", {"0": {**FLAT, "input_tokens": "[" * 5000}}, "expected a dict"),
        ("0,1,1,Gamma,1,1\n600,0,0,,0,0\n", {"0": {**FLAT, "input_tokens": "__import__('os')"}}, "expected a dict"),
    ],
)
def test_a_broken_profile_names_file_and_value(tmp_path: Path, rows: str, lengths: object, message: str) -> None:
    """Numbers that are none, shapes without a mean, lengths and shares that no request has."""
    with pytest.raises(InputError, match=message):
        read(profile(tmp_path, rows, lengths))


@pytest.mark.parametrize("part", [{"start_s": float("nan")}, {"start_s": -1.0}, {"duration_s": 0.0}])
def test_a_part_of_a_profile_is_a_part_of_time(tmp_path: Path, part: dict[str, float]) -> None:
    """Negative, empty and undefined parts are refused."""
    with pytest.raises(InputError, match=f"{next(iter(part))} = "):
        read(profile(tmp_path, "0,1,1,Gamma,1,1\n600,0,0,,0,0\n"), **part)
