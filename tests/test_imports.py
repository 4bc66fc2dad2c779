"""The import rule of docs/design.md, section 2: who may know whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway

ROOT = Path(headway.__file__).parent
OURS = ("core", "policies", "admission", "levers", "engine", "twin", "trace", "replay", "audit", "fleet", "cli")
IMPURE = {
    "asyncio",
    "datetime",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "sys",
    "threading",
    "time",
}


def modules(part: str) -> list[Path]:
    """Return the files of one part of the package."""
    return sorted((ROOT / part).rglob("*.py")) if (ROOT / part).is_dir() else []


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names a file imports, wherever in it: a name imported from a package is dotted on to it."""
    package = ["headway", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    """Whether a dotted name is the package or lies in it."""
    return name == package or name.startswith(package + ".")


def breaches(part: str, allowed: tuple[str, ...]) -> list[str]:
    """Return the imports of our own package in `part` that are not allowed."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imported(path)
        if within(name, "headway") and not any(within(name, one) for one in allowed)
    ]


def test_core_imports_nothing_of_ours() -> None:
    """Decisions depend on nothing but themselves."""
    assert modules("core")
    assert breaches("core", ("headway.core",)) == []


@pytest.mark.parametrize("part", ["policies", "admission", "levers"])
def test_decisions_import_core_registry_and_errors_only(part: str) -> None:
    """A policy, an admission test or a lever knows the core, not who runs it."""
    assert breaches(part, ("headway.core", "headway.registry", "headway.errors", f"headway.{part}")) == []


@pytest.mark.parametrize("part", ["trace", "replay"])
def test_measuring_knows_no_engine(part: str) -> None:
    """Traces and replay work against any server, so they import neither decisions nor engines."""
    others = [one for one in OURS if one not in ("trace", "replay")]
    assert modules(part)
    assert [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imported(path)
        if any(within(name, f"headway.{one}") for one in others) or within(name, "vllm") or within(name, "torch")
    ] == []


def test_only_the_vllm_adapter_imports_vllm() -> None:
    """Everything else runs where vLLM is not installed."""
    assert [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if not path.is_relative_to(ROOT / "engine" / "vllm") and any(within(name, "vllm") for name in imported(path))
    ] == []


def test_only_the_fleet_imports_ray() -> None:
    """A single engine needs no cluster."""
    assert [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if not path.is_relative_to(ROOT / "fleet") and any(within(name, "ray") for name in imported(path))
    ] == []


def test_nobody_imports_the_command_line() -> None:
    """The command line is the last layer."""
    assert [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if not path.is_relative_to(ROOT / "cli") and any(within(name, "headway.cli") for name in imported(path))
    ] == []


@pytest.mark.parametrize("part", ["core", "policies", "admission", "levers"])
def test_decisions_are_pure(part: str) -> None:
    """No clock, no randomness, no I/O, no logging: time comes in as a number, decisions go out as values."""
    assert [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imported(path)
        if name.split(".")[0] in IMPURE or within(name, "numpy.random")
    ] == []
    source = "".join(path.read_text(encoding="utf-8") for path in modules(part))
    assert "np.random" not in source
    assert "print(" not in source
