"""A sweep on Ray against a scripted `ray`: order, what is under way, errors. The real one was tried by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from headway.cli.main import build
from headway.errors import EngineError, InputError
from headway.fleet import sweep as fleet
from headway.replay.targets import Targets
from headway.trace import Trace
from headway.trace.synthetic import demo_trace
from headway.twin import Scenario, find_profile, sweep


class TaskError(Exception):
    """As ray.exceptions.RayTaskError: the error of the task is its `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a traceback of many lines, {cause}")
        self.cause = cause


class Script(ModuleType):
    """The part of `ray` that is used, in one process. Tasks run when their result is asked for, the last one first."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[str] = []
        self.under_way = 0
        self.most = 0

    def init(self, *, address: str, **_: Any) -> None:
        """Connect; `nowhere` cannot be reached."""
        if address == "nowhere:1":
            raise ConnectionError("nobody answers")
        self.calls.append(f"init {address}")

    def shutdown(self) -> None:
        """Disconnect."""
        self.calls.append("shutdown")

    def cluster_resources(self) -> dict[str, float]:
        """Two processors."""
        return {"CPU": 2.0}

    def put(self, value: Any) -> Any:
        """Ship a value."""
        self.calls.append("put")
        return value

    def remote(self, function: Any) -> Any:
        """Make a task of a function."""
        script = self

        class Task:
            """Its `remote` gives a reference."""

            def remote(self, *arguments: Any) -> Any:
                """Start it."""
                script.under_way += 1
                script.most = max(script.most, script.under_way)
                return lambda: function(*arguments)

        return Task()

    def get(self, reference: Any) -> Any:
        """Return a result."""
        self.under_way -= 1
        try:
            return reference()
        except Exception as error:
            raise TaskError(error) from error


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Script:
    """A scripted ray in place of the real one."""
    script = Script()
    monkeypatch.setitem(sys.modules, "ray", script)
    return script


def scenario(**settings: Any) -> Scenario:
    """Return a small what-if."""
    targets = {"chat": Targets(ttft_s=1.0), "document": Targets(ttft_s=6.0)}
    return Scenario(profile=find_profile("cpu-smollm2"), targets=targets, settings=settings)


def trace() -> Trace:
    """Return twelve requests."""
    return demo_trace(rate=2.0, seed=1, n=12)


def test_a_sweep_there_equals_one_here(ray: Script, tmp_path: Path) -> None:
    """Same settings, summaries and runs, in order; the trace is shipped once, two points a processor at most."""
    points = sweep.grid("token_budget=64..448/64")
    here = list(sweep.run(trace(), scenario(), points))
    there = list(sweep.run(trace(), scenario(), points, pool=fleet.RayPool("auto"), out=tmp_path))
    assert [(each.settings, each.summary) for each in there] == [(each.settings, each.summary) for each in here]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{i:04d}" for i in range(7)]
    assert ray.calls == ["init auto", "put"]
    assert (ray.most, ray.under_way) == (4, 0)


def test_the_error_of_a_point_is_its_own(ray: Script) -> None:
    """Not Ray's wrapping of it."""
    with pytest.raises(InputError, match=r"^token_budget = 0: expected a whole number of at least 1$"):
        list(sweep.run(trace(), scenario(), [{"token_budget": 0}], pool=fleet.RayPool("auto")))


def test_a_failure_of_the_cluster_is_an_engine_error(ray: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node died, for instance."""

    def lost(*_: Any) -> Any:
        raise OSError("node lost")

    monkeypatch.setattr(fleet, "_one", lost)
    with pytest.raises(EngineError, match=r"--ray auto: a point failed: .*node lost"):
        list(sweep.run(trace(), scenario(), [{}], pool=fleet.RayPool("auto")))


def test_another_version_on_a_node_is_refused(ray: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would be those of other code."""
    monkeypatch.setattr(fleet, "_one", lambda *_: ("0.0.1", None))
    with pytest.raises(EngineError, match=r"a node runs headway 0\.0\.1: expected"):
        list(sweep.run(trace(), scenario(), [{}], pool=fleet.RayPool("auto")))


def test_a_missing_ray_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional extra."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"--ray auto: Ray is not installed: pip install '\.\[ray\]'"):
        fleet.RayPool("auto")


def test_an_address_that_does_not_answer_is_named(ray: Script) -> None:
    """With what Ray said."""
    with pytest.raises(EngineError, match="--ray nowhere:1: cannot connect: nobody answers"):
        fleet.RayPool("nowhere:1")


def invoke(*words: str) -> Any:
    """Run `headway simulate`."""
    command = ["simulate", "demo", "--limit", "10", *words]
    return CliRunner().invoke(build(command), command)


def test_the_command_leaves_the_cluster(ray: Script) -> None:
    """Also after an error."""
    result = invoke("--sweep", "token_budget=64,128", "--ray", "local", "--json")
    assert result.exit_code == 0, result.output
    assert ray.calls == ["init local", "put", "shutdown"]
    assert invoke("--sweep", "eps=0.1,7", "--ray", "local").exit_code == 1
    assert ray.calls[-1] == "shutdown"


@pytest.mark.parametrize("words", [["--jobs", "2", "--sweep", "eps=0.1,0.2"], []])
def test_ray_is_for_a_sweep_alone(ray: Script, words: list[str]) -> None:
    """One place to run it, and more than one point."""
    assert isinstance(invoke("--ray", "auto", *words).exception, InputError)
    assert ray.calls == []


def test_results_travel_as_values() -> None:
    """What a worker returns holds the whole table."""
    version, outcome = fleet._one(trace(), scenario())
    assert version
    assert isinstance(outcome.frame, pl.DataFrame)
