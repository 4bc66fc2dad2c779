"""Text of others on a terminal: names in traces, runs and servers can hold control codes and markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def printable(text: object) -> str:
    """Return `text` with everything that a terminal would act on, or not show, written as an escape; lines stay."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape", "surrogatepass").decode()
        for one in str(text)
    )


def plain(text: object) -> str:
    """Return `text` for a Rich table or console: `printable`, and brackets mean brackets."""
    from rich.markup import escape

    return escape(printable(text))


def wide_console(width: int = 120) -> Console:
    """Return a console for standard output; a pipe or log file has no width of its own, and 80 would break cells."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)
