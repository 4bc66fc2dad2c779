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
        documents = [("", source.document())]
    for prefix, document in documents:
        if not isinstance(document, dict):
            raise InputError.at(source.path, None, prefix or None, document, "an object with spans")
        for index, span in enumerate(document.get("spans", [])):
            yield f"{prefix}spans[{index}]", span, span.get("attributes") or {}
        for resource, entry in enumerate(document.get("resourceSpans", [])):
            for scope, group in enumerate(entry.get("scopeSpans", [])):
                for index, span in enumerate(group.get("spans", [])):
                    place = f"{prefix}resourceSpans[{resource}].scopeSpans[{scope}].spans[{index}]"
                    yield place, span, {pair["key"]: _value(pair) for pair in span.get("attributes", [])}


def _value(pair: dict[str, Any]) -> Any:
    """Return the value of an OTLP attribute; its whole numbers are strings in JSON."""
    kind, value = next(iter(pair.get("value", {}).items()), ("", None))
    return int(value) if kind == "intValue" else value


def _count(source: Source, where: str, attributes: dict[str, Any], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if attributes.get(name) is not None), None)
    if name is None:
        return None
    value = attributes[name]
    if type(value) is not int:
        raise InputError.at(source.path, None, f"{where}.attributes.{name}", value, "a whole number of tokens")
    return value


def _time(source: Source, where: str, span: dict[str, Any], iso: str, nano: str) -> tuple[int, str]:
    """Return (epoch nanoseconds, kind of clock); a time without an offset counts as UTC."""
    key, value = (nano, span[nano]) if nano in span else (iso, span.get(iso))
    try:
        if key == nano:
            return int(value), "epoch"
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InputError.at(source.path, None, f"{where}.{key}", value, "a time") from None
    kind = "naive" if time.tzinfo is None else "offset"
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    whole = int(time.replace(microsecond=0).timestamp())
    return whole * 1_000_000_000 + time.microsecond * 1000, kind
