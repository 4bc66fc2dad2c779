"""`headway demo`: stock vLLM, stock vLLM tuned by hand, and Headway on the same trace, side by side."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

HELP = """Serve one model three times (stock vLLM with defaults, stock vLLM tuned by hand, Headway), measure the
capacity of stock vLLM, replay the same requests against each at multiples of it, and print one table.

Without MODEL the embedded SmolLM2-135M-Instruct is served; nothing is downloaded. Options after `--` go to all three
vLLM servers.
"""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command(name="demo", help=HELP, context_settings={"allow_extra_args": True})
    def demo(
        ctx: typer.Context,
        model: Annotated[str | None, typer.Option(help="Model name or folder; default the embedded one.")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="One load, 30 s a run: under 4 minutes.")] = False,
        kind: Annotated[str, typer.Option(help="Generated traffic: mixed (chat and documents) or single.")] = "mixed",
        trace: Annotated[Path | None, typer.Option(help="A real trace instead (any format headway reads).")] = None,
        slo: Annotated[list[str] | None, typer.Option(help="Targets, for instance chat:ttft=1,tpot=0.15.")] = None,
        loads: Annotated[str, typer.Option(help="Multiples of capacity.")] = "0.7,1.4,2",
        seeds: Annotated[int, typer.Option(min=1, help="Seeds a load.")] = 1,
        duration: Annotated[float, typer.Option(min=10, help="Seconds of arrivals a run.")] = 45.0,
        max_input: Annotated[int, typer.Option(min=1, help="Cut prompts of --trace to this length.")] = 1800,
        max_output: Annotated[int, typer.Option(min=1, help="Cut outputs of --trace to this length.")] = 96,
        input_scale: Annotated[float, typer.Option(help="Scale prompt lengths of --trace.")] = 1.0,
        output_scale: Annotated[float, typer.Option(help="Scale output lengths of --trace.")] = 1.0,
        out: Annotated[Path | None, typer.Option(help="Folder of the runs; default runs/demo-TIME.")] = None,
    ) -> None:
        from rich.console import Console

        from headway.demo.arena import Arena
        from headway.demo.capacity import measure
        from headway.demo.duel import Cell, duel, expert
        from headway.demo.systems import headway, stock
        from headway.demo.table import meaning, table
        from headway.demo.workload import MIXED, SINGLE, WEIGHTS, Workload, from_file
        from headway.errors import InputError
        from headway.replay.targets import parse_slo

        _check_given(ctx, quick=quick, traced=trace is not None)
        if kind not in ("mixed", "single"):
            raise InputError(f"--kind {kind}: expected mixed or single")
        targets = parse_slo(slo) if slo else SINGLE if trace is not None or kind == "single" else MIXED
        if trace is not None:
            workload = from_file(
                trace,
                targets,
                max_input=max_input,
                max_output=max_output,
                input_scale=input_scale,
                output_scale=output_scale,
            )
        else:
            weights = WEIGHTS if kind == "mixed" and not slo else {}
            workload = Workload(kind=kind, targets=targets, weights=weights)
        multiples = [1.4] if quick else _loads(loads)
        seconds = 30.0 if quick else duration
        folder = out or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        console = Console(width=max(100, Console().width))
        started = time.monotonic()

        def say(line: str) -> None:
            console.print(f"[dim]{time.monotonic() - started:5.0f} s[/dim]  {line}", highlight=False)

        def tell(cell: Cell) -> None:
            total = cell.summary["total"]
            say(
                f"{cell.load:g}x capacity, seed {cell.seed}, {cell.system.title}: "
                f"{total['attained']} of {total['n']} attained, {total['refused']} refused"
            )

        with Arena(folder, model=model, say=say, extra=ctx.args) as arena:
            base, ours = stock(), headway(workload.targets, workload.weights)
            arena.start(base, ours)
            hand = expert(arena.metrics(ours), workload)
            arena.start(hand)
            say("measuring the capacity of stock vLLM: everything offered at once")
            capacity, _ = measure(arena, base, workload, n=60 if quick else 90)
            say(f"capacity {capacity:.2f} requests/s; runs of {seconds:.0f} s follow")
            systems = [base, hand, ours]
            cells = duel(
                arena,
                systems,
                workload,
                capacity=capacity,
                loads=multiples,
                seeds=range(1, seeds + 1),
                duration_s=seconds,
                on_run=tell,
            )
        result = {
            "capacity_req_s": capacity,
            "cells": [
                {
                    "system": c.system.name,
                    "load": c.load,
                    "rate_req_s": c.rate,
                    "seed": c.seed,
                    "valid": c.run.valid,
                    "run": str(c.run.path),
                    **c.summary,
                }
                for c in cells
            ],
        }
        (folder / "demo.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        console.print(table(cells, systems, capacity))
        console.print(meaning(cells, systems), highlight=False)
        console.print(f"Runs and server logs: {folder}", highlight=False)


def _check_given(ctx: typer.Context, *, quick: bool, traced: bool) -> None:
    """Raise `InputError` for an option on the command line that another one would make void."""
    from headway.cli.given import on_command_line
    from headway.errors import InputError

    void: dict[str, str] = {}
    if quick:
        void |= dict.fromkeys(("loads", "duration"), "with --quick: expected only one of them: --quick sets it itself")
    if traced:
        void["kind"] = "with --trace: expected only one of them: it is the kind of generated traffic"
    else:
        lengths = ("max_input", "max_output", "input_scale", "output_scale")
        void |= dict.fromkeys(lengths, "without --trace: expected --trace: generated traffic has lengths of its own")
    for name, why in void.items():
        if on_command_line(ctx, name):
            raise InputError(f"--{name.replace('_', '-')} {ctx.params[name]} {why}")


def _loads(text: str) -> list[float]:
    from headway.errors import InputError

    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < v <= 100 for v in values):
        raise InputError(f"--loads {text}: expected multiples of capacity such as 0.7,1.4,2")
    return values
