"""What commands are given: the trace they work on, and which options stood on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from headway.trace.record import Trace


def on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether a parameter stood on the command line, and is not a default or from the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def read_trace(path: Path, format_: str | None, seed: int, *, generated: int, **selection: object) -> Trace:
    """Return the selected part of a trace file, or of a generated trace when the path is `demo`.

    `generated`: how many requests that has without a limit.
    """
    from headway.errors import InputError
    from headway.trace import read, select
    from headway.trace.synthetic import demo_trace

    if str(path) == "demo":
        if format_ is not None:
            raise InputError(f"--format {format_!r} with demo: expected no format: the trace is generated, not read")
        rate, limit = selection.pop("rate"), selection.pop("limit")
        if limit is not None and limit < 1:  # type: ignore[operator]
            raise InputError(f"limit = {limit!r}: expected a number above 0")  # demo_trace calls it n
        n = generated if limit is None else limit
        made = demo_trace(rate=2.0 if rate is None else rate, seed=seed, n=n)  # type: ignore[arg-type]
        return select(made, **selection)  # type: ignore[arg-type]
    return select(read(path, format_), **selection)  # type: ignore[arg-type]


def write_named(path: Path, text: str) -> None:
    """Write a file that the command line names; `InputError` where that can't be done."""
    from headway.errors import InputError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def make_folder(folder: Path, *, of: Path | None = None) -> None:
    """Make a folder that the command line names, or that of the file `of`; `InputError` where that can't be done."""
    from headway.errors import InputError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{of or folder}: cannot be written: {error.strerror}") from None
