"""`headway compare`: arms of runs against a baseline, gates for CI, the noise floor of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("compare", help="Compare runs with sound statistics; gate a change in CI.")(compare)


def compare(
    arms: Annotated[
        list[str],
        typer.Argument(
            help="Arms, the baseline first: run folders, each `A1,A2,A3`, a glob or a folder of runs; "
            "`name=` before it names the arm. With --aa: repeats of one configuration.",
            metavar="A B [C...]",
        ),
    ],
    gate: Annotated[
        list[str] | None,
        typer.Option(help='Requirement, repeatable: "p99_ttft<=+5%", "attainment>=0.9", "chat:p99_tpot<=120ms".'),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A gate that cannot tell at this n fails.")] = False,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to compare, repeatable, instead of the usual ones.")
    ] = None,
    aa: Annotated[
        bool, typer.Option("--aa", help="Measure the noise floor from repeats of one configuration.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --aa: where to write it (noise-floor.json).")
    ] = None,
    noise_floor: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Call nothing better or worse under this floor (from --aa)."),
    ] = None,
    allow_invalid: Annotated[
        bool, typer.Option("--allow-invalid", help="Take runs that are invalid or not finished.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of tables.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one self-contained page with charts.")
    ] = None,
    draws: Annotated[int, typer.Option(min=200, max=100_000, help="Bootstrap draws.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
) -> None:
    """Compare the arms with the first one. Exit 1: a gate failed; 2: bad input."""
    from headway.errors import InputError
    from headway.replay import gate as gates_
    from headway.replay import metrics

    if json_ and markdown:
        raise InputError("--json and --markdown: expected only one of them")
    gates = [gates_.parse(text) for text in gate or []]
    names = [*(metric or metrics.DEFAULT), *(each.metric.name for each in gates)]
    if aa:
        if gates or strict or noise_floor or markdown or html:
            raise InputError("--aa only measures: expected none of --gate, --strict, --noise-floor, --markdown, --html")
        _noise(arms, out or Path("noise-floor.json"), names, json_, allow_invalid)
        return
    if out is not None:
        raise InputError("--out: expected only with --aa")
    if strict and not gates:
        raise InputError("--strict: expected only with --gate")
    results, outcomes = _compare(arms, names, gates, allow_invalid, noise_floor, draws, seed)
    _print(results, outcomes, json_, markdown)
    if html is not None:
        from headway.cli.given import write_named
        from headway.replay.report import page

        write_named(html, page(results, outcomes))
    failing = (gates_.FAIL, gates_.CANNOT_TELL) if strict else (gates_.FAIL,)
    if any(outcome.outcome in failing for outcome in outcomes):
        raise typer.Exit(1)


def _noise(texts: list[str], path: Path, names: list[str], json_: bool, allow_invalid: bool) -> None:
    from headway.printable import wide_console
    from headway.replay import arms, noise, verdicts

    runs = [run for text in texts for run in arms.load_arm(text, allow_invalid=allow_invalid).runs]
    floor = noise.measure(arms.Arm(name="A", runs=tuple(runs)), names=names)
    noise.write(floor, path)
    if json_:
        typer.echo(path.read_text(), nl=False)
        return
    wide_console(160).print(verdicts.noise_table(floor))
    typer.echo(f"Written to {path}.")


def _compare(
    texts: list[str],
    names: list[str],
    gates: list,
    allow_invalid: bool,
    noise_floor: Path | None,
    draws: int,
    seed: int,
) -> tuple[list, list]:
    from headway.errors import InputError
    from headway.replay import arms, noise
    from headway.replay.compare import compare as run_comparison
    from headway.replay.gate import gate_confidence, judge
    from headway.replay.stats import CONFIDENCE

    if len(texts) < 2:
        raise InputError(f"{texts[0]}: only one arm: expected a baseline and at least one candidate")
    floor = noise.read(noise_floor) if noise_floor is not None else None
    base, *others = arms.distinct([arms.load_arm(text, allow_invalid=allow_invalid) for text in texts])
    results, outcomes = [], []
    for other in others:
        if floor is not None:
            for note in dict.fromkeys([*noise.applies(floor, base), *noise.applies(floor, other)]):
                typer.echo(f"note: {note}", err=True)
        found = run_comparison(base, other, names=names, draws=draws, seed=seed, floor=floor)
        results.append(found)
        judged = len(gates) * len(found.levels) * len(others)
        for each in gates:
            outcomes += judge(each, found, confidence=gate_confidence(judged, CONFIDENCE))
    return results, outcomes


def _print(results: list, outcomes: list, json_: bool, markdown: bool) -> None:
    from headway.printable import wide_console
    from headway.replay import verdicts

    if json_:
        import json

        typer.echo(json.dumps(verdicts.as_json(results, outcomes), indent=2))
        return
    if markdown:
        typer.echo(verdicts.markdown(results, outcomes))
        return
    console = wide_console(160)
    for comparison in results:
        for table in verdicts.tables(comparison):
            console.print(table)
            console.print()
    for outcome in outcomes:
        typer.echo(verdicts.gate_line(outcome))
