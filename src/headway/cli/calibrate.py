"""`headway calibrate`: fit the twin's step cost to the engine's step log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `headway calibrate`."""
    app.command("calibrate", help="Fit the twin's step cost to a step log; write a profile.")(calibrate)


def calibrate(
    steps: Annotated[Path, typer.Option(metavar="FILE", help="Step log (HEADWAY_STEP_LOG): q, n, K, X, seconds.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write, .toml or .json.")],
    name: Annotated[str | None, typer.Option(help="Name of the profile; default: that of the file.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Engine fact for the profile: kv_blocks, block_size, ..."),
    ] = None,
    eps: Annotated[float, typer.Option(help="Share of steps that may exceed the envelope.")] = 0.05,
    note: Annotated[str, typer.Option(help="Machine, model, versions: kept as provenance.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Fit, report the error by regime on steps that were held out, write the profile."""
    from rich.console import Console
    from rich.table import Table

    from headway.errors import InputError
    from headway.twin.calibration import calibrate as fit_profile
    from headway.twin.calibration import read_steps
    from headway.twin.profile import ENGINE_KEYS
    from headway.twin.scenario import parse_settings

    engine = parse_settings(set_ or [])
    for key in engine:
        if key not in ENGINE_KEYS:
            raise InputError(f"--set {key}: expected one of {', '.join(ENGINE_KEYS)}")
    log = read_steps(steps)
    profile = fit_profile(log, name=name or out.stem, eps=eps, engine=engine, note=note)
    profile.save(out)
    if as_json:
        typer.echo(json.dumps(profile.as_dict(), indent=2))
        return
    cost = profile.cost
    view = Table(
        title=f"{profile.name}: {len(log)} steps",
        caption=f"|predicted / measured - 1| of the last {profile.provenance['held_out']} steps under a fit of those "
        f"before.\nStep = {cost.g * 1e3:.2f} ms + {cost.a * 1e6:.1f} us a prompt token + {cost.b * 1e6:.1f} us a "
        f"decode + {cost.k * 1e9:.2f} ns a context token + {cost.x * 1e9:.3f} ns a token pair; envelope x"
        f"{profile.envelope_factor:.3f} at eps {profile.eps:g}; scatter {profile.noise.sigma * 100:.1f} %.",
        caption_justify="left",
    )
    for column in ("regime", "steps", "P50", "P90", "bias"):
        view.add_column(column, justify="left" if column == "regime" else "right")
    for regime, values in profile.fit_error.items():
        view.add_row(
            regime,
            f"{values['n']:.0f}",
            *(f"{values[key] * 100:.1f} %" for key in ("p50", "p90")),
            f"{values['bias'] * 100:+.1f} %",
        )
    Console().print(view)
    Console(stderr=True).print(f"profile in {out}", highlight=False)
