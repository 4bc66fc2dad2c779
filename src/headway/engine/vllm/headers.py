"""SLO headers of a request: parsed strictly, because they come from outside.

x-slo-class      name of a class of headway.toml
x-slo-ttft-ms    target for the first token, overrides the class's
x-slo-tpot-ms    target for the mean pace after it
x-slo-tbt-ms     target for every gap

Another name that begins with x-slo- is a slip of the pen, and refused like a bad value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from headway.config import CALIBRATION_CLASS
from headway.core.slo import MAX_TARGET_S
from headway.errors import InputError

TARGETS = {b"x-slo-ttft-ms": "ttft_ms", b"x-slo-tpot-ms": "tpot_ms", b"x-slo-tbt-ms": "tbt_ms"}
CLASS = b"x-slo-class"
PREFIX = b"x-slo-"

_NUMBER = re.compile(rb"\s*[0-9]{1,12}(\.[0-9]{1,12})?\s*")


class HeaderError(InputError):
    """A bad header; `header` names it."""

    def __init__(self, header: str, value: str, expected: str) -> None:
        super().__init__(f"{header}: {value!r}: expected {expected}")
        self.header = header


def parse(headers: Iterable[tuple[bytes, bytes]], known: Iterable[str]) -> dict[str, str | float]:
    """Return `slo_class`, `ttft_ms`, `tpot_ms`, `tbt_ms`, as far as the headers name them.

    Raises:
        HeaderError: a value is not a plain positive number of at most one day in milliseconds, the class is not
            one of `known`, a header comes twice, or there is no such header.
    """
    found: dict[str, str | float] = {}
    seen: set[bytes] = set()
    for raw_name, value in headers:
        name = raw_name.lower()
        if not name.startswith(PREFIX):
            continue
        label = name.decode("latin-1")[:80]
        text = value.strip().decode("latin-1")
        shown = text[:80]
        if name != CLASS and name not in TARGETS:
            raise HeaderError(label, shown, f"one of {', '.join(each.decode('ascii') for each in (CLASS, *TARGETS))}")
        if name in seen:
            raise HeaderError(label, shown, "the header once")
        seen.add(name)
        if name == CLASS:
            names = list(known)
            if text not in names:
                offered = [each for each in names if each != CALIBRATION_CLASS]
                raise HeaderError(label, shown, f"one of {', '.join(offered)}")
            found["slo_class"] = text
            continue
        limit = MAX_TARGET_S * 1e3
        if not _NUMBER.fullmatch(value) or not 0 < float(value) <= limit:
            raise HeaderError(label, shown, f"a number of milliseconds above 0 and at most {limit:.0f} (one day)")
        found[TARGETS[name]] = float(value)
    return found


def first(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the name of the first SLO header, None when there is none."""
    for name, _ in headers:
        if name.lower().startswith(PREFIX):
            return name.lower().decode("latin-1")[:80]
    return None
