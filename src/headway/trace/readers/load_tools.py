"""Per-request outputs of load generators: vLLM bench, AIPerf, GuideLLM, inference-perf.

Such a file says when the tool sent each request, so a trace of it holds the load as the server met it. Failed
requests have no output length and are dropped, counted. Rows lie in the order of completion and are sorted.

- `vllm-bench`: `vllm bench serve --save-result --save-detailed`: one object with parallel lists.
  `start_times` (client's monotonic seconds) minus `queue_times` (wait for the client's concurrency cap, newer
  versions) is when a request was due.
- `aiperf`: `profile_export.jsonl`: one object a request, `metadata.request_start_ns` (epoch) and
  `metrics.NAME.value`.
- `guidellm`: `benchmarks.json`: `benchmarks[].requests.{successful,errored,incomplete}[]`.
  `info.timings.targeted_start` is when a request was due; without it `request_start_time` is taken.
- `inference-perf`: `per_request_lifecycle_metrics.json`: a list; output tokens lie in `info.output_tokens`
  or, in newer versions, `info.response_metrics.output_tokens`.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from headway.errors import InputError
from headway.trace.assemble import Rows
from headway.trace.json_table import objects
from headway.trace.json_values import items, mapping, name, number, parse, whole
from headway.trace.sessions import with_turns
from headway.trace.source import Source

FAILED = "failed request"
_VLLM_LISTS = ("start_times", "input_lens", "output_lens")


def fits_vllm_bench(source: Source) -> bool:
    """Tell whether the document has the settings that `vllm bench serve` writes first."""
    return {"endpoint_type", "num_prompts", "tokenizer_id"} <= source.json_keys("{")


def read_vllm_bench(source: Source) -> Rows:
    """Read one result of `vllm bench serve`."""
    results = list(objects(source))
    if len(results) != 1:
        raise InputError(f"{source.path}:2: {len(results)} results in one file (--append-result): expected one")
    line, result = results[0]
    for key in _VLLM_LISTS:
        if not isinstance(result.get(key), list):
            raise InputError.at(source.path, line, key, result.get(key), "a list (save the run with --save-detailed)")
    count = len(result["start_times"])
    due = items(source, line, "queue_times", result.get("queue_times")) or [0.0] * count
    errors = items(source, line, "errors", result.get("errors")) or [""] * count
    columns = {**{key: result[key] for key in _VLLM_LISTS}, "queue_times": due, "errors": errors}
    for key, values in columns.items():
        if len(values) != count:
            raise InputError.at(source.path, line, key, f"{len(values)} values", f"{count}, as in start_times")
    rows: list[dict[str, Any]] = []
    failed = 0
    for index in range(count):
        if errors[index]:
            failed += 1
            continue
        start = number(source, line, f"start_times[{index}]", result["start_times"][index])
        rows.append(
            {
                "arrival_s": start - number(source, line, f"queue_times[{index}]", due[index]),
                "input_tokens": whole(source, line, f"input_lens[{index}]", result["input_lens"][index]),
                "output_tokens": whole(source, line, f"output_lens[{index}]", result["output_lens"][index]),
            }
        )
    return _rows(rows, {FAILED: failed})


def fits_aiperf(source: Source) -> bool:
    """Tell whether the first row is a record of one request."""
    first = source.first_object()
    metadata = first.get("metadata")
    return "metrics" in first and isinstance(metadata, dict) and "request_start_ns" in metadata


def read_aiperf(source: Source) -> Rows:
    """Read records; those of other phases than `profiling` are dropped, counted."""
    rows: list[dict[str, Any]] = []
    dropped = {FAILED: 0, "warm-up": 0}
    for line, record in objects(source):
        metadata = mapping(source, line, "metadata", record.get("metadata"))
        metrics = mapping(source, line, "metrics", record.get("metrics"))
        if metadata.get("benchmark_phase", "profiling") != "profiling":
            dropped["warm-up"] += 1
            continue
        if record.get("error") is not None or metadata.get("was_cancelled"):
            dropped[FAILED] += 1
            continue
        out = "output_sequence_length" if "output_sequence_length" in metrics else "output_token_count"
        lengths = {}
        for column, key in (("input_tokens", "input_sequence_length"), ("output_tokens", out)):
            metric = mapping(source, line, f"metrics.{key}", metrics.get(key))
            lengths[column] = whole(source, line, f"metrics.{key}.value", metric.get("value"))
        start = whole(source, line, "metadata.request_start_ns", metadata.get("request_start_ns"))
        end = metadata.get("request_end_ns")
        end_ns = None if end is None else whole(source, line, "metadata.request_end_ns", end)
        rows.append(
            {
                "line": line,
                "start_ns": start,
                "end_ns": end_ns,
                **lengths,
                "session_id": name(metadata.get("x_correlation_id")),
            }
        )
    # Whole nanoseconds are subtracted before they become a float, which would keep only 0.2 us of an epoch.
    first = min((row["start_ns"] for row in rows), default=0)
    for row in rows:
        start_ns, end_ns = row.pop("start_ns"), row.pop("end_ns")
        row["arrival_s"] = (start_ns - first) / 1e9
        row["end_s"] = None if end_ns is None else (end_ns - first) / 1e9
    return _rows(rows, dropped, "arrivals are the times at which the client sent (request_start_ns)")


def fits_guidellm(source: Source) -> bool:
    """Tell whether the document is a report of GuideLLM."""
    return "benchmarks" in source.json_keys("{") and b"guidellm" in source.head


def read_guidellm(source: Source) -> Rows:
    """Read all benchmarks of a report; they ran one after another on one clock."""
    document = parse(source, None, source.path.read_bytes())
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    if not isinstance(benchmarks, list) or not benchmarks:
        raise InputError.at(source.path, None, "benchmarks", benchmarks, "a list of at least one benchmark")
    rows: list[dict[str, Any]] = []
    dropped = {FAILED: 0, "unfinished request": 0}
    for place, benchmark in enumerate(benchmarks):
        above = f"benchmarks[{place}]"
        requests = mapping(source, None, above, benchmark).get("requests")
        if not isinstance(requests, dict) or not isinstance(requests.get("successful"), list):
            raise InputError.at(source.path, None, f"{above}.requests.successful", None, "a list of requests")
        for reason, key in ((FAILED, "errored"), ("unfinished request", "incomplete")):
            dropped[reason] += len(items(source, None, f"{above}.requests.{key}", requests.get(key)))
        for index, each in enumerate(requests["successful"]):
            where = f"{above}.requests.successful[{index}]"
            request = mapping(source, None, where, each)
            info = mapping(source, None, f"{where}.info", request.get("info"))
            due = mapping(source, None, f"{where}.info.timings", info.get("timings")).get("targeted_start")
            start = request.get("request_start_time") if due is None else due
            end = request.get("request_end_time")
            rows.append(
                {
                    "arrival_s": number(source, None, f"{where}.request_start_time", start),
                    "end_s": None if end is None else number(source, None, f"{where}.request_end_time", end),
                    "input_tokens": whole(source, None, f"{where}.prompt_tokens", request.get("prompt_tokens")),
                    "output_tokens": whole(source, None, f"{where}.output_tokens", request.get("output_tokens")),
                    "session_id": name(info.get("conversation_id")),
                }
            )
    note = f"{len(benchmarks)} benchmarks, one after another" if len(benchmarks) > 1 else ""
    return _rows(rows, dropped, note)


def fits_inference_perf(source: Source) -> bool:
    """Tell whether the document is a list of request life cycles."""
    return {"start_time", "end_time", "request"} <= source.json_keys("[")


def read_inference_perf(source: Source) -> Rows:
    """Read a list of request life cycles."""
    document = parse(source, None, source.path.read_bytes())
    rows: list[dict[str, Any]] = []
    dropped = {FAILED: 0}
    for index, item in enumerate(document):
        if not isinstance(item, dict):
            raise InputError.at(source.path, None, f"[{index}]", item, "an object")
        if item.get("error") is not None:
            dropped[FAILED] += 1
            continue
        info = mapping(source, None, f"[{index}].info", item.get("info"))
        newer = mapping(source, None, f"[{index}].info.response_metrics", info.get("response_metrics"))
        output = newer.get("output_tokens", info.get("output_tokens"))
        rows.append(
            {
                "arrival_s": number(source, None, f"[{index}].start_time", item.get("start_time")),
                "input_tokens": whole(source, None, f"[{index}].info.input_tokens", info.get("input_tokens")),
                "output_tokens": whole(source, None, f"[{index}].info.output_tokens", output),
            }
        )
    return _rows(rows, dropped, "arrivals are the times at which the client sent (start_time)")


def _rows(rows: list[dict[str, Any]], dropped: dict[str, int], note: str = "") -> Rows:
    schema = {
        "line": pl.Int64(),
        "arrival_s": pl.Float64(),
        "end_s": pl.Float64(),
        "input_tokens": pl.Int64(),
        "output_tokens": pl.Int64(),
        "session_id": pl.String(),
    }
    frame = pl.DataFrame({key: [row.get(key) for row in rows] for key in schema}, schema=schema).with_columns(
        pl.col("line").fill_null(0)
    )
    # A session of one request is only an id.
    several = pl.len().over("session_id") > 1
    frame = frame.with_columns(pl.when(several).then(pl.col("session_id")).alias("session_id"))
    frame, notes = with_turns(frame)
    notes = (note, *notes) if note else notes
    reasons = {reason: count for reason, count in dropped.items() if count}
    return Rows(frame=frame.drop("end_s"), dropped=reasons, unsorted=True, notes=notes)
