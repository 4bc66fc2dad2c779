"""`headway check`: try to break the promises that would be made on a trace, before it is deployed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from headway.twin.check import Certificate

#: Steps of a counter-example that are printed; --json has all.
_STEPS = 30


def register(app: typer.Typer) -> None:
    """Add `headway check`."""
    app.command("check", help="Verify on a trace that no accepted request misses, whatever steps take.")(check)


def check(
    trace: Annotated[Path, typer.Argument(help="Trace file of any known format, or `demo` for a generated one.")],
    profile: Annotated[
        str, typer.Option(help="Profile file, `cpu-smollm2`, or estimated:DEVICE/MODEL\\[xN].")
    ] = "cpu-smollm2",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting in place of the strict ones, repeatable."),
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="Targets of a class, `chat:ttft=1,tpot=0.12`; repeatable.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="headway.toml", help="A server's file, checked as it is served.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=0, help="Random courses of service times, of each of two kinds.")] = 4,
    searches: Annotated[int, typer.Option(min=0, help="Courses bent towards the tightest promise.")] = 40,
    format_: Annotated[str | None, typer.Option("--format", help="Trace format, when it can't be told.")] = None,
    rate: Annotated[float | None, typer.Option(help="Scale time so that this many requests arrive a second.")] = None,
    time_scale: Annotated[float, typer.Option(help="Speed: 2 plays the trace twice as fast.")] = 1.0,
    start: Annotated[float, typer.Option(help="Leave out what arrives before this second of the trace.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of the trace.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many requests.")] = None,
    max_input: Annotated[int | None, typer.Option(help="Cap on prompt tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(help="Cap on output tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the courses (and of a generated trace).")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check; exit 1: a promise was broken, 2: bad input."""
    from rich.console import Console

    from headway.cli.given import read_trace
    from headway.cli.what_if import say_classes, with_config
    from headway.replay.targets import parse_slo
    from headway.twin import builtin
    from headway.twin.check import as_served
    from headway.twin.check import check as verify
    from headway.twin.scenario import Scenario, parse_settings

    settings = parse_settings(set_ or [])
    slos, settings = with_config(config, slo, settings)
    if config is not None:
        settings = as_served(settings)
    selected = read_trace(
        trace, format_, seed, generated=200, start_s=start, duration_s=duration, limit=limit, time_scale=time_scale,
        rate=rate, max_input=max_input, max_output=max_output,
    )  # fmt: skip
    scenario = Scenario(
        profile=builtin.find(profile), targets=parse_slo(slo or []), slos=slos, settings=settings, seed=seed
    )
    say_classes(selected, scenario)
    stderr = Console(stderr=True)
    with stderr.status("checking") as status:
        found = verify(
            selected, scenario, seeds=seeds, searches=searches, progress=lambda run: status.update(run.pattern)
        )
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)
        show(console, found)
    if not found.holds:
        raise typer.Exit(1)


def show(console: Any, found: Certificate) -> None:
    """Print the certificate or the counter-example."""
    console.print(_table(found))
    facts, profile = found.trace, found.profile
    lines = [
        f"trace {facts.get('source')}, sha256 {str(facts.get('sha256'))[:16]}, seed {found.seed}",
        f"profile {profile['name']} ({profile['label']}), envelope {profile['envelope']['factor']:g} times the mean",
        "settings " + ", ".join(f"{key}={value}" for key, value in found.settings.items()),
        *(f"assumed: {text}" for text in found.assumptions),
        *(f"DROPPED by these settings: {text}" for text in found.dropped),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if found.counter is None:
        runs, accepted = len(found.attempts), sum(each.accepted for each in found.attempts)
        console.print(
            f"no promise was broken: {accepted} accepted requests in {runs} runs of the trace", highlight=False
        )
        return
    _show_counter(console, found.counter)


def _table(found: Certificate) -> Table:
    from rich.table import Table

    caption = "margin: the promise nearest to being broken, as a share of its target"
    if any(text.startswith("A1' steps") for text in found.assumptions):
        caption += "; steps in a row take no more than A1' says"
    view = Table(caption=caption, caption_justify="left")
    view.add_column("service times")
    names = ("offered", "accepted", "no promise", "refused", "missed", "steps")
    targets = [name for name in ("ttft", "tpot", "tbt") if any(name in each.tightest for each in found.attempts)]
    for name in (*names, *(f"{target} margin" for target in targets)):
        view.add_column(name, justify="right")
    for each in found.attempts:
        view.add_row(
            each.pattern,
            *(str(n) for n in (each.offered, each.accepted, each.unpromised, each.refused, each.missed, each.steps)),
            *(f"{each.tightest[t].relative * 100:.2f} %" if t in each.tightest else "-" for t in targets),
        )
    return view


def _show_counter(console: Any, counter: Any) -> None:
    request, schedule = counter["request"], counter["schedule"]
    console.print(
        f"COUNTER-EXAMPLE under `{counter['pattern']}`: request {request['index']} missed its {counter['target']} by "
        f"{counter['late_s'] * 1e3:.3f} ms",
        highlight=False,
    )
    console.print(", ".join(f"{k} {v}" for k, v in request.items() if v is not None), highlight=False, soft_wrap=True)
    shown = schedule[-_STEPS:]
    if len(shown) < len(schedule):
        console.print(f"the last {len(shown)} of {len(schedule)} steps of its life (all of them: --json)")
    for step in shown:
        chunks = ", ".join(f"{key}: {tokens}" for key, tokens in step["chunks"].items()) or "no prefill"
        console.print(
            f"  step {step['step']}  {step['start_s']:.6f} to {step['end_s']:.6f} s  ({step['times_mean']:.3f} of its "
            f"mean)  {step['decodes']} decodes, {chunks}",
            highlight=False,
            soft_wrap=True,
        )


__all__ = ["register"]
