"""`headway calibrate`: fit the twin's step cost to what an engine's steps took."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headway.twin.calibration import StepLog
    from headway.twin.profile import Profile

HELP = """Fit the twin's step cost to an engine's steps; write a profile.

`headway calibrate URL` sends a sweep to a running `headway serve` that keeps a step log (HEADWAY_STEP_LOG) on this
machine. `headway calibrate -- [MODEL] [VLLM OPTIONS]` starts a server itself, sweeps and stops it; without a model the
embedded one. `headway calibrate --steps FILE` sends nothing: it fits a log that is there.
"""


ROUNDS = (
    "Rounds of the sweep, up to 158 requests each: 350 steps where they share steps, 800 and more where they do not."
)

#: vLLM options that a server started here cannot take -> why.
_OWN = {
    "--host": "the server is started here, on this machine",
    "--port": "the server is started here, on a free port",
    "--scheduler-cls": "the steps are logged by Headway's scheduler",
}


def register(app: typer.Typer) -> None:
    """Add `headway calibrate`."""
    app.command(
        "calibrate",
        help=HELP,
        options_metavar="[OPTIONS]",
        context_settings={"ignore_unknown_options": False},
    )(calibrate)


def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write, .toml or .json.")],
    target: Annotated[
        list[str] | None, typer.Argument(metavar="[URL | -- MODEL VLLM_OPTIONS]", show_default=False)
    ] = None,
    steps: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Step log: q, n, K, X, seconds a line. With a URL: where its log is, if not as it says.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help=ROUNDS)] = 3,
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="What the server at URL asks for.")] = None,
    policy: Annotated[str, typer.Option(help="Ordering and step size of a server started here.")] = "fcfs",
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the step log of a server started here.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile; default: that of the file.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Engine fact for the profile: kv_blocks, block_size, ..."),
    ] = None,
    eps: Annotated[float, typer.Option(min=1e-6, max=0.5, help="Share of steps that may exceed the envelope.")] = 0.05,
    note: Annotated[str, typer.Option(help="Machine, model, versions: kept as provenance.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Fit, report the error by regime on steps that were held out, write the profile."""
    from headway.cli.given import make_folder
    from headway.errors import InputError
    from headway.twin.calibration import calibrate as fit_profile
    from headway.twin.profile import ENGINE_KEYS, engine_words, is_engine_fact
    from headway.twin.scenario import parse_settings

    engine = parse_settings(set_ or [])
    for key, value in engine.items():
        if key not in ENGINE_KEYS:
            raise InputError(f"--set {key}: expected one of {', '.join(ENGINE_KEYS)}")
        if not is_engine_fact(key, value):
            raise InputError(f"--set {key}={value}: expected {engine_words(key)}")
    if out.is_dir():
        raise InputError(f"--out {out}: is a folder: expected a file")
    make_folder(out.parent, of=out)
    words = list(target or [])
    of_url = bool(words) and words[0].startswith(("http://", "https://"))
    _check_options(context, url=of_url, file=steps is not None)
    if of_url:
        if len(words) > 1:
            raise InputError(f"{words[1]} after {words[0]}: expected the URL alone")
        log = _from_server(words[0].rstrip("/"), steps, rounds, api_key)
    elif steps is not None:
        if words:
            raise InputError(f"--steps and {words[0]}: expected a step log or a server to start")
        log = _read(steps)
    else:
        log = _from_own_server(words, rounds, policy, keep)
    profile = fit_profile(log, name=name or out.stem, eps=eps, engine=engine, note=note)
    profile.save(out)
    if as_json:
        typer.echo(json.dumps(profile.as_dict(), indent=2))
        return
    _show(profile, log)
    _say(f"profile in {out}")


def _check_options(context: typer.Context, *, url: bool, file: bool) -> None:
    """Raise `InputError` for an option that says nothing about where the steps come from."""
    from headway.errors import InputError

    if url:
        useless, why = ("policy", "keep"), "the server at a URL runs already and keeps its own log"
    elif file:
        useless, why = ("policy", "keep", "rounds", "api_key"), "--steps sends nothing"
    else:
        useless, why = ("api_key",), "the server is started here"
    for name in useless:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name.replace('_', '-')}: {why}: leave it out")


def _read(path: Path, start: int = 0) -> StepLog:
    from headway.twin.calibration import read_steps

    return read_steps(path, start=start)


def _from_server(url: str, steps: Path | None, rounds: int, api_key: str | None) -> StepLog:
    """Sweep a running server; return the steps that it logged meanwhile."""
    from headway.engine.vllm import calibrate as sweeps
    from headway.errors import InputError

    path = steps or Path(sweeps.step_log_of(url, api_key=api_key))
    if not path.is_file():
        raise InputError(
            f"{path}: the step log of {url} is not on this machine: run `headway calibrate` there, or name a copy that "
            "grows with it by --steps"
        )
    start = path.stat().st_size
    model = sweeps.served_model(url, api_key=api_key)
    with _progress() as show:
        sent = sweeps.survey(url, model, headway=True, rounds=rounds, api_key=api_key, progress=show)
    if path.stat().st_size == start:
        raise InputError(
            f"{path} did not grow while {url} served {sent} requests: expected the step log of that server"
        )
    return _read(path, start)


def _from_own_server(words: list[str], rounds: int, policy: str, keep: Path | None) -> StepLog:
    """Start a server, sweep it, stop it; return the steps that it logged."""
    from headway.engine.vllm import calibrate as sweeps
    from headway.engine.vllm import launch, versions
    from headway.engine.vllm import model as models
    from headway.engine.vllm.messages import ENV_PROFILE, ENV_STEP_LOG
    from headway.engine.vllm.server import Server
    from headway.errors import InputError

    given = launch.option_names(words)
    for option, why in _OWN.items():
        if option in given:
            raise InputError(f"{option} after `--`: {why}: leave it out (a server that runs is named by its URL)")
    model = words.pop(0) if words and not words[0].startswith("-") else None
    if keep is not None and keep.exists():
        raise InputError(f"--keep {keep}: exists: expected a new file")
    version = versions.check()
    if model is None and "--model" not in launch.option_names(words):
        models.embedded_model(progress=_say)
    with tempfile.TemporaryDirectory(prefix="headway-calibrate-") as folder:
        log = keep or Path(folder) / "steps.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = launch.command(
            model=model,
            port=0,
            policy=policy,
            admission="admit_all",
            extra=words,
            environ={**os.environ, ENV_STEP_LOG: str(log), ENV_PROFILE: str(Path(folder) / "cost.json")},
        )
        _say(f"starting vLLM {version} for {command.model}")
        with Server(command, log=Path(folder) / "server.log") as server, _progress() as show:
            sweeps.survey(server.url, server.model, headway=True, rounds=rounds, api_key=command.api_key, progress=show)
        return _read(log)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show how much of the sweep is done."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sweeping")
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _show(profile: Profile, log: StepLog) -> None:
    from rich.console import Console
    from rich.table import Table

    cost = profile.cost
    q, n, K = (int(most) for most in log.terms[:, :3].max(axis=0))
    view = Table(
        title=f"{profile.name}: {len(log)} steps",
        caption=f"|predicted / measured - 1| of the last {profile.provenance['held_out']} steps under a fit of those "
        f"before.\nStep = {cost.g * 1e3:.2f} ms + {cost.a * 1e6:.1f} us a prompt token + {cost.b * 1e6:.1f} us a "
        f"decode + {cost.k * 1e9:.2f} ns a context token + {cost.x * 1e9:.3f} ns a token pair; envelope x"
        f"{profile.envelope_factor:.3f} at eps {profile.eps:g}; scatter {profile.noise.sigma * 100:.1f} %, "
        f"and {profile.noise.drift * 100:.1f} % that lasts about {profile.noise.drift_steps:.0f} steps.\n"
        f"Seen: up to {q} prompt tokens, {n} decodes and {K} context tokens a step; beyond that it extrapolates.",
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


def _say(line: str) -> None:
    typer.echo(f"headway: {line}", err=True)
