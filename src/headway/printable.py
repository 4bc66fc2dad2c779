"""Text of others on a terminal: names in traces, runs and servers can hold control codes and markup."""

from __future__ import annotations


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
