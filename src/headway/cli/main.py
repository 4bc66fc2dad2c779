"""Entry point of the `headway` command.

Each command lives in a module of its own that is imported only when that command runs, so `headway --help`
stays fast and a machine without vLLM can measure. A command module defines `register(app: typer.Typer) -> None`.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import typer


class Command(NamedTuple):
    """One line of the command table: which module registers it and what it does."""

    module: str
    help: str


#: Every command, in the order in which the help prints them.
COMMANDS: dict[str, Command] = {
    "serve": Command("headway.cli.serve", "Serve a model with SLOs through vLLM's OpenAI-compatible server."),
    "demo": Command("headway.cli.demo", "Serve and replay: stock vLLM against Headway, side by side."),
    "replay": Command("headway.cli.replay", "Replay a trace against an OpenAI-compatible server and score SLOs."),
    "trace": Command("headway.cli.trace", "Inspect, convert, synthesize or record request traces."),
    "runs": Command("headway.cli.runs", "List and show recorded runs."),
    "compare": Command("headway.cli.compare", "Compare runs with sound statistics; gate a change in CI."),
    "simulate": Command("headway.cli.simulate", "Replay a trace through the twin: what would other settings do?"),
    "check": Command("headway.cli.check", "Verify on a trace that no accepted request misses, whatever steps take."),
    "calibrate": Command("headway.cli.calibrate", "Fit the twin's step cost to a step log; write a profile."),
}


def build(argv: list[str]) -> typer.Typer:
    """Return the application for `argv`, with only the command that it names imported."""
    app = typer.Typer(
        name="headway",
        help="The SLO layer for LLM serving.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def root(
        ctx: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    ) -> None:
        if version:
            from headway import __version__

            typer.echo(__version__)
            raise typer.Exit()
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)

    named = next((word for word in argv if not word.startswith("-")), None)
    if named in COMMANDS:
        importlib.import_module(COMMANDS[named].module).register(app)
    else:
        for name, command in COMMANDS.items():
            app.command(name, help=command.help)(lambda: None)
    return app


def run() -> None:
    """Run the command line; bad input leaves with exit code 2 and one clear line on stderr."""
    from headway.errors import HeadwayError
    from headway.printable import printable

    argv = sys.argv[1:]
    try:
        build(argv)(argv)
    except HeadwayError as error:
        typer.echo(f"headway: {printable(error)}", err=True)
        raise SystemExit(error.exit_code) from None
