"""The table of trace formats, and `read`, the one way in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headway.errors import InputError
from headway.trace.assemble import Rows, assemble
from headway.trace.readers import azure, headway_jsonl
from headway.trace.record import Trace
from headway.trace.source import Source


class Format(NamedTuple):
    """One line of the table: what the format is, whether a source is one, how its rows are read."""

    help: str
    fits: Callable[[Source], bool]
    read: Callable[[Source], Rows]


#: Name -> format. `fits` looks at header AND first row; exactly one may fit a file.
FORMATS: dict[str, Format] = {
    "headway-jsonl": Format("Headway's own JSON lines", headway_jsonl.fits, headway_jsonl.read),
    "azure2023": Format("Azure LLM inference trace 2023, CSV", azure.fits_2023, azure.read_2023),
    "azure2024": Format("Azure LLM inference trace 2024, CSV", azure.fits_2024, azure.read_2024),
}


def read(path: str | Path, format: str | None = None, *, zero_output: str = "drop") -> Trace:
    """Return the trace in the file (or folder) `path`.

    `format` is a name of `FORMATS`; None finds it from the content and refuses unless exactly one fits.
    `zero_output` says what becomes of requests that generated nothing: "drop" (counted in the report) or
    "one" (kept with one output token, so that the load of their prompts stays). Raises `InputError`, naming
    file, line and value.
    """
    source = Source(Path(path))
    name = format if format is not None else detect(source)
    if name not in FORMATS:
        raise InputError(f"format = {name!r}: expected one of {', '.join(FORMATS)}")
    return assemble(source, name, FORMATS[name].read(source), zero_output=zero_output)


def detect(source: Source) -> str:
    """Return the name of the only format that fits; `InputError` when none or several do."""
    names = [name for name, format in FORMATS.items() if format.fits(source)]
    if len(names) == 1:
        return names[0]
    if names:
        raise InputError(
            f"{source.path}: fits several trace formats ({', '.join(names)}): name one with --format"
        )
    start = next(iter(source.head_lines()), "")[:120]
    raise InputError(
        f"{source.path}:1: {start!r}: expected a request trace in one of the formats {', '.join(FORMATS)}"
    )
