"""What `headway simulate` and `headway check` read alike: classes and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.core import Slo
    from headway.trace.record import Trace
    from headway.twin.scenario import Scenario, Value


def with_config(
    config: Path | None, slo: list[str] | None, settings: Mapping[str, Value]
) -> tuple[dict[str, Slo] | None, dict[str, Value]]:
    """Return the classes of a `headway.toml` (None without one) and its settings under those given."""
    from headway.errors import InputError
    from headway.twin.scenario import merged

    if config is None:
        return None, dict(settings)
    if slo:
        raise InputError("--config and --slo: expected the classes in one of them")
    slos, given = _from_config(config)
    return slos, merged(given, settings, [key for key in given if "." in key])


def _from_config(path: Path) -> tuple[dict[str, Slo], dict[str, Value]]:
    """Return the classes and settings of a `headway.toml`; a request that names no class is of the default one."""
    from headway import config as configs

    config = configs.load(path)
    slos = {name: each.slo(name) for name, each in config.classes.items() if name != configs.CALIBRATION_CLASS}
    slos["default"] = slos[config.default_class]
    settings: dict[str, Value] = {
        "policy": config.policy,
        "admission": config.admission,
        "eps": config.eps,
        "patience_s": config.patience_s,
        "front_s": (configs.FRONT_MS if config.front_ms is None else config.front_ms) / 1e3,
        **{f"policy.{key}": value for key, value in config.policy_parameters.items()},
        **{f"admission.{key}": value for key, value in config.admission_parameters.items()},
    }
    if config.blocking_ms is not None:
        settings["blocking_s"] = config.blocking_ms / 1e3
    return slos, settings


def say_classes(trace: Trace, scenario: Scenario) -> None:
    """Print on stderr where classes and trace differ; a class that nobody defined is an `InputError`."""
    import typer

    from headway.twin.source import class_notes

    for note in class_notes(trace, scenario.classes, closed=scenario.slos is not None):
        typer.echo(f"note: {note}", err=True)
