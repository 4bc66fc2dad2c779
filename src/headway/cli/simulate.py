"""`headway simulate`: what would happen to a trace with other settings, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headway.twin.sweep import Pool


def register(app: typer.Typer) -> None:
    """Add `headway simulate`."""
    app.command("simulate", help="Replay a trace through the twin: what would other settings do?")(simulate)


def simulate(
    trace: Annotated[Path, typer.Argument(help="Trace file of any known format, or `demo` for a generated one.")],
    profile: Annotated[
        str, typer.Option(help="Profile file, `cpu-smollm2`, or estimated:DEVICE/MODEL\\[xN].")
    ] = "cpu-smollm2",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting, repeatable: policy, admission, token_budget, ..."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help='Grid: "token_budget=64,128,256;policy=fcfs,headway", ranges 64..512/64.')
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="Targets of a class, `chat:ttft=1,tpot=0.12`; repeatable.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="headway.toml", help="Classes, policy and admission of a server's file.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes of a sweep.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run a sweep on this Ray cluster: ray://HOST:PORT, auto, or local."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the run (of a sweep: a folder of runs) here.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one page with the Pareto chart.")] = None,
    label: Annotated[str, typer.Option(help="Name of the run in tables.")] = "",
    format_: Annotated[str | None, typer.Option("--format", help="Trace format, when it can't be told.")] = None,
    rate: Annotated[float | None, typer.Option(help="Scale time so that this many requests arrive a second.")] = None,
    time_scale: Annotated[float, typer.Option(help="Speed: 2 plays the trace twice as fast.")] = 1.0,
    start: Annotated[float, typer.Option(help="Leave out what arrives before this second of the trace.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of the trace.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many requests.")] = None,
    max_input: Annotated[int | None, typer.Option(help="Cap on prompt tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(help="Cap on output tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the step noise (and of a generated trace).")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate; exit 2: bad input."""
    from rich.console import Console
    from rich.progress import track

    from headway.cli.given import make_folder, read_trace, write_named
    from headway.cli.what_if import say_classes, with_config
    from headway.errors import InputError
    from headway.replay.targets import parse_slo
    from headway.twin import builtin, report
    from headway.twin import sweep as sweeps
    from headway.twin.scenario import Scenario, check_new, parse_settings

    found = builtin.find(profile)
    settings = parse_settings(set_ or [])
    points = sweeps.grid(sweep) if sweep is not None else [{}]
    if clash := sorted(set(settings) & set(points[0])):
        raise InputError(f"--sweep and --set: {clash[0]} is in both: expected it in one of them")
    if sweep is None and jobs > 1:
        raise InputError(f"--jobs {jobs} without --sweep: expected a sweep")
    if sweep is not None and label:
        raise InputError(f"--label {label} with --sweep: the runs are named by their settings")
    for number in range(len(points)) if out is not None else ():
        check_new(sweeps.folder_of(out, number, len(points)))
    if out is not None:
        make_folder(out)
    if html is not None:
        if html.is_dir():
            raise InputError(f"--html {html}: is a folder: expected a file")
        make_folder(html.parent, of=html)
    told = settings
    slos, settings = with_config(config, slo, told)
    selected = read_trace(
        trace, format_, seed, generated=200, start_s=start, duration_s=duration, limit=limit, time_scale=time_scale,
        rate=rate, max_input=max_input, max_output=max_output,
    )  # fmt: skip
    scenario = Scenario(
        profile=found, targets=parse_slo(slo or []), slos=slos, settings=settings, seed=seed, label=label
    )
    say_classes(selected, scenario)
    stderr = Console(stderr=True)
    with _pool(ray, jobs, sweep) as pool:
        optional = [key for key in settings if "." in key and key not in told]  # of the server's file
        runs = sweeps.run(selected, scenario, points, jobs=jobs, pool=pool, out=out, optional=optional)
        shown = track(runs, "simulating", total=len(points), console=stderr, transient=True)
        predictions = list(shown if len(points) > 1 else runs)
    if html is not None:
        write_named(html, report.page(predictions, found, selected.source))
        stderr.print(f"charts in {html}", highlight=False)
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in predictions], indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    console.print(report.table(predictions, found))
    total = sum(each.wall_s for each in predictions)
    steps = sum(each.facts["steps"] for each in predictions)
    stderr.print(
        f"{len(predictions)} x {len(selected)} requests, {steps} steps, {total:.2f} s of simulation", highlight=False
    )
    if out is not None:
        stderr.print(f"run kept in {out}", highlight=False)


@contextmanager
def _pool(address: str | None, jobs: int, sweep: str | None) -> Iterator[Pool | None]:
    """Give the cluster at `address` for the time of the sweep, None without an address."""
    from headway.errors import InputError

    if address is None:
        yield None
        return
    if sweep is None or jobs > 1:
        other = "--jobs" if jobs > 1 else "no --sweep"
        raise InputError(f"--ray {address} with {other}: expected a sweep that runs there alone")
    from headway.fleet.sweep import RayPool

    cluster = RayPool(address)
    try:
        yield cluster
    finally:
        cluster.close()
