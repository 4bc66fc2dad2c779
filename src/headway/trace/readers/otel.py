"""OpenTelemetry spans of model calls, by the GenAI semantic conventions: JSON.

Two shapes: `{"spans": [...]}` with ISO times and plain attributes (as inference-perf keeps them), and an OTLP
export (`{"resourceSpans": [...]}`, one or one a line) with epoch nanoseconds and key/value attributes. A span
counts when its `gen_ai.operation.name` is a model call; lengths come from `gen_ai.usage.input_tokens` /
`output_tokens` (older name: `prompt_tokens` / `completion_tokens`). Text is never read and a length is never
guessed from it or from `max_tokens`: spans without counts are dropped, counted. Sessions come from
`gen_ai.conversation.id` or a `*session.id` attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import polars as pl

from headway.errors import InputError
from headway.trace.assemble import Rows
from headway.trace.json_table import objects
from headway.trace.json_values import items, mapping, parse, whole
from headway.trace.sessions import with_turns
from headway.trace.source import Source

OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_SESSION = ("gen_ai.conversation.id", "session.id", "exgentic.session.id")


def fits(source: Source) -> bool:
    """Tell whether the document holds spans."""
    keys = source.json_keys("{")
    return "resourceSpans" in keys or {"spans", "span_id", "attributes"} <= keys


def read(source: Source) -> Rows:
    """Read all spans of model calls."""
    rows: list[dict[str, Any]] = []
    dropped = {"not a model call": 0, "no token counts": 0}
    zones = set()
    for where, span, attributes in _spans(source):
        if attributes.get("gen_ai.operation.name") not in OPERATIONS:
            dropped["not a model call"] += 1
            continue
        lengths = [_count(source, where, attributes, names) for names in (_INPUT, _OUTPUT)]
        if None in lengths:
            dropped["no token counts"] += 1
            continue
        start_ns, zone = _time(source, where, span, "start_time", "startTimeUnixNano")
        end_ns, _ = _time(source, where, span, "end_time", "endTimeUnixNano")
        zones.add(zone)
        session = next((str(attributes[name]) for name in _SESSION if attributes.get(name)), None)
        rows.append({"start": start_ns, "end": end_ns, "input": lengths[0], "output": lengths[1], "session": session})
    if len(zones) > 1:
        raise InputError(f"{source.path}: start_time: times with and without an offset: expected one kind")
    first = min((row["start"] for row in rows), default=0)
    frame = pl.DataFrame(
        {
            "line": [0] * len(rows),
            "arrival_s": [(row["start"] - first) / 1e9 for row in rows],
            "end_s": [(row["end"] - first) / 1e9 for row in rows],
            "input_tokens": [row["input"] for row in rows],
            "output_tokens": [row["output"] for row in rows],
            "session_id": [row["session"] for row in rows],
        },
        schema_overrides={
            "line": pl.Int64,
            "arrival_s": pl.Float64,
            "end_s": pl.Float64,
            "session_id": pl.String,
            "input_tokens": pl.Int64,
            "output_tokens": pl.Int64,
        },
    )
    frame, notes = with_turns(frame)
    reasons = {reason: count for reason, count in dropped.items() if count}
    return Rows(frame=frame.drop("end_s"), dropped=reasons, unsorted=True, notes=notes)


def _spans(source: Source) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (place in the file, span, attributes) of every span."""
    lines = source.head_lines()
    if lines and lines[0].startswith('{"resourceSpans"') and lines[0].endswith("}"):
        documents = [(f"line {number}: ", value) for number, value in objects(source)]
    else:
        documents = [("", parse(source, None, source.path.read_bytes()))]

    def each(where: str, holder: object, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        place = f"{where}.{key}".lstrip(".")
        parent = mapping(source, None, where or None, holder)
        for index, value in enumerate(items(source, None, place, parent.get(key))):
            yield f"{place}[{index}]", mapping(source, None, f"{place}[{index}]", value)

    for prefix, document in documents:
        for place, span in each("", document, "spans"):
            yield prefix + place, span, mapping(source, None, f"{prefix}{place}.attributes", span.get("attributes"))
        for where, resource in each("", document, "resourceSpans"):
            for inside, scope in each(where, resource, "scopeSpans"):
                for place, span in each(inside, scope, "spans"):
                    pairs = dict(_pair(source, *found) for found in each(place, span, "attributes"))
                    yield prefix + place, span, pairs


def _pair(source: Source, where: str, pair: dict[str, Any]) -> tuple[Any, Any]:
    """Return (key, value) of an OTLP attribute; its whole numbers are strings in JSON."""
    holder = mapping(source, None, f"{where}.value", pair.get("value"))
    kind, value = next(iter(holder.items()), ("", None))
    if kind == "intValue":
        try:
            value = int(value)
        except (TypeError, ValueError):
            raise InputError.at(source.path, None, f"{where}.value.intValue", value, "a whole number") from None
    return str(pair.get("key")), value


def _count(source: Source, where: str, attributes: dict[str, Any], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if attributes.get(name) is not None), None)
    if name is None:
        return None
    value = attributes[name]
    return whole(source, None, f"{where}.attributes.{name}", value)


def _time(source: Source, where: str, span: dict[str, Any], iso: str, nano: str) -> tuple[int, str]:
    """Return (epoch nanoseconds, kind of clock); a time without an offset counts as UTC."""
    key, value = (nano, span[nano]) if nano in span else (iso, span.get(iso))
    try:
        if key == nano and 0 <= int(value) < 2**63:
            return int(value), "epoch"
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InputError.at(source.path, None, f"{where}.{key}", value, "a time") from None
    kind = "naive" if time.tzinfo is None else "offset"
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    seconds = int(time.replace(microsecond=0).timestamp())
    return seconds * 1_000_000_000 + time.microsecond * 1000, kind
