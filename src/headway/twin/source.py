"""Requests of a trace in the order of arrival, a slice at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from headway.core import Slo
from headway.errors import InputError
from headway.trace.record import Trace

DEFAULT_CLASS = "default"
_SLICE = 8192
_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "slo_class", "session_id")


class Arrival(NamedTuple):
    """One request of the trace.

    The last six are for requests that a real engine has seen: when its server got them, which answer they declared,
    the deadline of their first token (None: on arrival, the true length, by the engine's settings), the prompt
    tokens that its prefix cache held, in place of prefix ids, what tells that a request came again (None: it is like
    no other), and when they reached the engine, of which it took notice at `time_s`.
    """

    row: int  # position in the trace that is simulated
    time_s: float
    input_tokens: int
    output_tokens: int
    slo_class: str | None  # as the trace says
    slo: Slo
    session_id: str | None = None
    hash_ids: Sequence[int] | None = None
    hash_block: int = 0
    asked_s: float | None = None
    declared: int | None = None
    due_s: float | None = None
    cached_tokens: int = 0
    fingerprint: str | None = None
    reached_s: float | None = None

    @property
    def id(self) -> str:
        """Id of the request in the engine."""
        return str(self.row)


def class_notes(trace: Trace, slos: Mapping[str, Slo], *, closed: bool) -> list[str]:
    """Return what is odd about the classes of `trace` beside those of `slos`, in words.

    `closed`: `slos` are the classes of a server, which refuses any other (HTTP 400); otherwise, as in a replay, targets
    of class `default` are those of every class without its own. A request that names no class is of class `default`.

    Raises:
        InputError: classes are given, and those of the trace are not among them.
    """
    if not slos:
        return []
    named = set(trace.frame["slo_class"].fill_null(DEFAULT_CLASS).unique())
    known = sorted({slo.name for slo in slos.values()})  # the default one may stand under two keys
    unknown = sorted(named - set(slos) - {DEFAULT_CLASS})
    if unknown and (closed or DEFAULT_CLASS not in slos):
        others = "" if closed else f" (or targets of class {DEFAULT_CLASS}, which are for all others)"
        raise InputError(
            f"{trace.source}: requests of class {', '.join(map(repr, unknown))}: expected one of the classes given: "
            f"{', '.join(known)}{others}"
        )
    notes = []
    if not closed and (unused := sorted(set(slos) - named - {DEFAULT_CLASS})):
        notes.append(f"no request of class {', '.join(unused)} in the trace")
    if DEFAULT_CLASS in named and DEFAULT_CLASS not in slos:
        notes.append(f"no targets for class {DEFAULT_CLASS}, of requests that name none: every answer attains them")
    return notes


def arrivals(trace: Trace, slos: Mapping[str, Slo], *, hashes: bool) -> Iterator[Arrival]:
    """Yield the requests of `trace`.

    A class without targets of its own has those of class `default`, as in a replay; without those, none. Prefix ids
    are left out unless `hashes`.
    """
    frame, block = trace.frame, trace.block_size or 0
    default = slos.get(DEFAULT_CLASS)
    known: dict[str | None, Slo] = {}
    for start in range(0, frame.height, _SLICE):
        part = frame.slice(start, _SLICE)
        ids = part["hash_ids"].to_list() if hashes and block else [None] * part.height
        for row, (values, hash_ids) in enumerate(zip(part.select(_COLUMNS).iter_rows(), ids, strict=True), start):
            time_s, inputs, outputs, name, session = values
            slo = known.get(name)
            if slo is None:
                slo = slos.get(name or DEFAULT_CLASS) or default or Slo(name=name or DEFAULT_CLASS)
                known[name] = slo
            yield Arrival(row, time_s, inputs, outputs, name, slo, session, hash_ids, block)
