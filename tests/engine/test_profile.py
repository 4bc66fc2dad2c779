"""The learned step cost on disk."""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path

import pytest

from headway.core import CostCoefficients, StepCost
from headway.engine.vllm import profile
from headway.engine.vllm.messages import ENV_PROFILE

KNOWN = CostCoefficients(g=0.02, a=0.001, b=0.0005, k=1e-6, x=1e-7)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """All five coefficients; the loaded cost promises at once, with the caller's eps."""
    path = tmp_path / "deep" / "p.json"
    profile.save(path, StepCost(KNOWN))
    cost = profile.load(path, eps=0.01)
    assert (cost.mean, cost.ready, cost.eps) == (KNOWN, True, 0.01)
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]


def test_no_profile_is_an_unknown_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The normal first start: nothing is promised and nothing is said."""
    assert not profile.load(tmp_path / "none.json", eps=0.05).ready
    assert caplog.records == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"g":1}',
        '{"g":"x","a":1,"b":1,"k":1,"x":1}',
        '{"g":NaN,"a":1,"b":1,"k":1,"x":1}',
        '{"g":-1,"a":1,"b":1,"k":1,"x":1}',
        '{"g":0,"a":0,"b":1,"k":1,"x":1}',
        '{"g":Infinity,"a":1,"b":1,"k":1,"x":1}',
    ],
)
def test_a_bad_profile_is_named_and_ignored(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A cache must not stop a server."""
    path = tmp_path / "p.json"
    path.write_text(text)
    assert not profile.load(path, eps=0.05).ready
    assert f"ignoring the step-cost profile {path}" in caplog.text


def test_a_profile_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk must not stop a server either."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="headway"):
        profile.save(tmp_path / "file" / "p.json", StepCost(KNOWN))
    assert "cannot save the step-cost profile" in caplog.text


def config(**changes: object) -> types.SimpleNamespace:
    """Return what of a VllmConfig decides the cost of a step."""
    model = {"model": "m", "dtype": "bfloat16", "quantization": None, "enforce_eager": True}
    space = types.SimpleNamespace
    return space(
        model_config=space(**(model | changes)),
        parallel_config=space(tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=space(cache_dtype="auto"),
        device_config=space(device_type="cuda"),
    )


def test_each_engine_has_its_own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By model, its settings, and the name of the accelerator; the same again for the same engine."""
    name = ["H200"]
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(get_device_name=lambda: name[0])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(ENV_PROFILE, raising=False)
    first = profile.path_for(config())
    assert first == profile.path_for(config())
    assert first.parent == tmp_path / "headway" / "profiles"
    others = [profile.path_for(config(model="n")), profile.path_for(config(enforce_eager=False))]
    name[0] = "A100"
    others.append(profile.path_for(config()))
    assert len({first, *others}) == 4
    monkeypatch.setenv(ENV_PROFILE, "/some/p.json")
    assert profile.path_for(config()) == Path("/some/p.json")


def test_a_profile_is_plain_json(tmp_path: Path) -> None:
    """Numbers only."""
    profile.save(tmp_path / "p.json", StepCost(KNOWN))
    assert json.loads((tmp_path / "p.json").read_text()) == {
        "g": 0.02,
        "a": 0.001,
        "b": 0.0005,
        "k": 1e-6,
        "x": 1e-7,
        "steps": 0,
    }
