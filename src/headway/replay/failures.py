"""Why requests failed: kinds with counts and the server's own words, for `run.json` and the lines under the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import polars as pl

#: Kinds that the lines under a table name.
_NAMED = 3
#: Most kinds that are told apart: a server may say something new every time.
_MOST = 100
_OTHER = (None, "other reasons", "")
_DIGITS = re.compile(r"\d+")

_Kind = tuple[int | None, str, str]


class Failures:
    """Counts failures by HTTP status, reason and message; messages that differ by numbers alone are one kind."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, list] = {}  # kind -> [count, the first message]

    def add(self, http_status: int | None, reason: str, message: str | None, n: int = 1) -> None:
        """Count `n` failures."""
        kind: _Kind = (http_status, reason, _DIGITS.sub("#", message or ""))
        if kind not in self._kinds and len(self._kinds) >= _MOST:
            kind, message = _OTHER, None
        self._kinds.setdefault(kind, [0, message])[0] += n

    def facts(self) -> list[dict[str, Any]]:
        """Return `http_status` (None without an answer), `reason`, `message` (None) and `n`, most frequent first."""
        ordered = sorted(self._kinds.items(), key=lambda item: (-item[1][0], str(item[0])))
        return [
            {"http_status": status, "reason": reason, "message": message, "n": n}
            for (status, reason, _), (n, message) in ordered
        ]


def from_frame(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the `facts` of a table of requests, which holds no messages: for a run that was killed."""
    found = Failures()
    for status, reason in frame.filter(pl.col("status") == "failed").select("http_status", "reason").iter_rows():
        found.add(status, reason or "unknown", None)
    return found.facts()


def in_words(facts: Sequence[dict[str, Any]]) -> str:
    """Return the most frequent kinds on one line, not yet fit for a terminal; empty without failures."""
    words = [_words(each) for each in facts[:_NAMED]]
    if rest := sum(each["n"] for each in facts[_NAMED:]):
        words.append(f"{rest} x other reasons (--json)")
    return "; ".join(words)


def _words(kind: dict[str, Any]) -> str:
    status, reason = kind["http_status"], kind["reason"]
    named = [] if status is None else [f"HTTP {status}"]
    named += [] if reason == f"http_{status}" else [reason]
    said = f', "{kind["message"]}"' if kind["message"] else ""
    return " ".join(f"{kind['n']} x {' '.join(named)}{said}".split())
