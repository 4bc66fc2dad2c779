"""Claims about per-request outputs of load generators, OpenTelemetry spans and Headway's own runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from headway.errors import InputError
from headway.trace import read

VLLM = {"endpoint_type": "vllm", "tokenizer_id": "t", "num_prompts": 3, "request_rate": "inf"}


def put(folder: Path, text: str, name: str = "result.json") -> Path:
    """Write `text`."""
    path = folder / name
    path.write_text(text)
    return path


def vllm_result(**changes: Any) -> str:
    """Return the result of a run of three requests, the last of which failed."""
    lists = {
        "start_times": [103.0, 100.0, 101.0],
        "input_lens": [30, 10, 20],
        "output_lens": [3, 1, 0],
        "errors": ["", "", "boom"],
    }
    return json.dumps({**VLLM, **lists, **changes})


def test_vllm_bench_sorts_drops_failures_and_takes_the_client_queue_off(tmp_path: Path) -> None:
    """The first waited 2 s for the client's concurrency cap, so it was due at 101."""
    trace = read(put(tmp_path, vllm_result(queue_times=[2.0, 0.0, 0.0])))
    assert trace.format == "vllm-bench"
    assert trace.frame["arrival_s"].to_list() == [0.0, 1.0]
    assert trace.frame["input_tokens"].to_list() == [10, 30]
    assert trace.report.dropped == {"failed request": 1}


def test_vllm_bench_without_details_says_how_to_get_them(tmp_path: Path) -> None:
    """The lists are only there with --save-detailed."""
    with pytest.raises(InputError, match="--save-detailed"):
        read(put(tmp_path, json.dumps(VLLM)))


def test_vllm_bench_lists_of_different_lengths_are_refused(tmp_path: Path) -> None:
    """Parallel lists must be parallel."""
    with pytest.raises(InputError, match="input_lens = '1 values': expected 3"):
        read(put(tmp_path, vllm_result(input_lens=[1])))


def aiperf(start_s: float, *, error: Any = None, phase: str = "profiling", tokens: Any = 5) -> str:
    """Return one AIPerf record."""
    return json.dumps(
        {
            "metadata": {
                "request_start_ns": 1_759_813_207_000_000_000 + int(start_s * 1e9),
                "request_end_ns": 1_759_813_207_000_000_000 + int((start_s + 1) * 1e9),
                "x_correlation_id": "c",
                "benchmark_phase": phase,
                "was_cancelled": error is not None,
            },
            "metrics": {
                "input_sequence_length": {"value": tokens, "unit": "tokens"},
                "output_sequence_length": {"value": 9, "unit": "tokens"},
            },
            "error": error,
        }
    )


def test_aiperf_records_are_sorted_with_sessions_failures_and_warm_up_apart(tmp_path: Path) -> None:
    """Two good requests of one conversation: the second came 3 s after the end of the first."""
    lines = [aiperf(4.0), aiperf(0.0), aiperf(1.0, error={"code": 499}), aiperf(0.5, phase="warmup")]
    trace = read(put(tmp_path, "\n".join(lines) + "\n", "profile_export.jsonl"))
    assert trace.format == "aiperf"
    assert trace.frame["arrival_s"].to_list() == [0.0, 4.0]
    assert trace.frame["session_id"].to_list() == ["c", "c"]
    assert trace.frame["think_s"].to_list() == [None, 3.0]
    assert trace.report.dropped == {"failed request": 1, "warm-up": 1}


def test_aiperf_bad_length_names_line_and_key(tmp_path: Path) -> None:
    """A length that is text is no length."""
    path = put(tmp_path, aiperf(0.0) + "\n" + aiperf(1.0, tokens="many") + "\n")
    with pytest.raises(InputError, match=r":2: metrics.input_sequence_length.value = 'many'"):
        read(path)


def test_guidellm_takes_the_targeted_start_and_counts_errored_and_incomplete(tmp_path: Path) -> None:
    """The request was due at 10 although it was sent at 17: its arrival is when it was due."""
    late = {
        "request_start_time": 17.0,
        "request_end_time": 18.0,
        "prompt_tokens": 5.0,
        "output_tokens": 2,
        "info": {"timings": {"targeted_start": 10.0}},
    }
    early = {"request_start_time": 9.0, "request_end_time": 9.5, "prompt_tokens": 4, "output_tokens": 1}
    requests = {"successful": [late, early], "errored": [{}], "incomplete": [{}, {}]}
    document = {"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [{"requests": requests}]}
    trace = read(put(tmp_path, json.dumps(document)))
    assert trace.format == "guidellm"
    assert trace.frame["arrival_s"].to_list() == [0.0, 1.0]
    assert trace.frame["input_tokens"].to_list() == [4, 5]
    assert trace.report.dropped == {"failed request": 1, "unfinished request": 2}


@pytest.mark.parametrize(
    "info",
    [
        {"input_tokens": 7, "output_tokens": 3},
        {"input_tokens": 7, "response_metrics": {"output_tokens": 3}},
    ],
)
def test_inference_perf_finds_output_tokens_in_old_and_new_reports(tmp_path: Path, info: Any) -> None:
    """Two places, one meaning; the failed request is counted."""
    rows = [
        {"start_time": 5.0, "end_time": 6.0, "request": "{}", "info": info, "error": None},
        {"start_time": 5.5, "end_time": 6.0, "request": "{}", "info": {}, "error": {"error_type": "x"}},
    ]
    trace = read(put(tmp_path, json.dumps(rows)))
    assert trace.format == "inference-perf"
    assert trace.frame["output_tokens"].to_list() == [3]
    assert trace.report.dropped == {"failed request": 1}


def span(start: str, end: str, **attributes: Any) -> dict[str, Any]:
    """Return one GenAI span; double underscores in names stand for dots."""
    base = {"gen_ai.operation.name": "chat"}
    named = {name.replace("__", "."): value for name, value in attributes.items()}
    return {"span_id": "s", "start_time": start, "end_time": end, "attributes": {**base, **named}}


def counted(start: str, end: str, tokens: int, session: str = "a") -> dict[str, Any]:
    """Return a span with usage."""
    usage = {"gen_ai__usage__input_tokens": tokens, "gen_ai__usage__output_tokens": 2}
    return span(start, end, gen_ai__conversation__id=session, **usage)


def test_otel_spans_without_counts_are_dropped_not_guessed(tmp_path: Path) -> None:
    """max_tokens and text are no lengths; a tool call is no model call."""
    spans = [
        counted("2026-02-25T10:00:00.5", "2026-02-25T10:00:02", 5),
        span("2026-02-25T10:00:03", "2026-02-25T10:00:04", gen_ai__request__max_tokens=500),
        span("2026-02-25T10:00:03", "2026-02-25T10:00:04", gen_ai__operation__name="execute_tool"),
        counted("2026-02-25T10:00:04", "2026-02-25T10:00:05", 6),
    ]
    trace = read(put(tmp_path, json.dumps({"spans": spans})))
    assert trace.format == "otel-genai"
    assert trace.frame["arrival_s"].to_list() == [0.0, 3.5]
    assert trace.frame["think_s"].to_list() == [None, 2.0]
    assert trace.report.dropped == {"no token counts": 1, "not a model call": 1}


def test_otel_old_usage_names_and_offsets_are_read(tmp_path: Path) -> None:
    """`prompt_tokens` came before `input_tokens`."""
    usage = {"gen_ai__usage__prompt_tokens": 5, "gen_ai__usage__completion_tokens": 2}
    spans = [span("2026-02-25T10:00:00+00:00", "2026-02-25T10:00:01+00:00", **usage)]
    assert read(put(tmp_path, json.dumps({"spans": spans}))).frame["input_tokens"].to_list() == [5]


def test_otel_naive_and_offset_times_in_one_file_are_refused(tmp_path: Path) -> None:
    """They are two clocks."""
    spans = [
        counted("2026-02-25T10:00:00", "2026-02-25T10:00:01", 5),
        counted("2026-02-25T10:00:00+02:00", "2026-02-25T10:00:01+02:00", 5),
    ]
    with pytest.raises(InputError, match="with and without an offset"):
        read(put(tmp_path, json.dumps({"spans": spans})))


def test_otel_parallel_calls_are_no_chain_of_turns(tmp_path: Path) -> None:
    """A sub-agent that begins before the answer is there cannot be a next turn."""
    spans = [
        counted("2026-02-25T10:00:00", "2026-02-25T10:00:09", 5),
        counted("2026-02-25T10:00:01", "2026-02-25T10:00:02", 6),
    ]
    trace = read(put(tmp_path, json.dumps({"spans": spans})))
    assert trace.frame["session_id"].null_count() == 2
    assert trace.history == ("1 sessions with overlapping requests kept as independent requests",)


def test_otlp_export_is_read_with_string_integers(tmp_path: Path) -> None:
    """OTLP JSON writes 64-bit integers as strings and attributes as pairs."""
    attributes = [
        {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "11"}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "4"}},
    ]
    times = {"startTimeUnixNano": "1700000000000000000", "endTimeUnixNano": "1700000001000000000"}
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [{**times, "attributes": attributes}]}]}]}
    trace = read(put(tmp_path, json.dumps(document)))
    assert trace.frame.select("input_tokens", "output_tokens").rows() == [(11, 4)]


def run_folder(folder: Path) -> Path:
    """Return a run folder of three requests, written in the order of completion."""
    frame = pl.DataFrame(
        {
            "slo_class": ["chat", "chat", None],
            "session_id": [None, None, None],
            "input_tokens": [10, 20, 30],
            "max_tokens": [50, 60, 70],
            "prompt_tokens": [12, None, None],
            "generated_tokens": [5, None, 3],
            "status": ["ok", "refused", "cut_off"],
            "scheduled_s": [2.0, 1.0, 3.0],
            "end_s": [4.0, 1.1, None],
        },
        schema_overrides={
            "session_id": pl.String,
            "scheduled_s": pl.Float64,
            **dict.fromkeys(("input_tokens", "max_tokens", "prompt_tokens", "generated_tokens"), pl.Int32),
        },
    )
    frame.write_parquet(folder / "requests.parquet")
    return folder


def test_a_run_becomes_the_load_that_was_offered(tmp_path: Path) -> None:
    """A refused request was offered all the same: it keeps what was asked for, and the note says so."""
    trace = read(run_folder(tmp_path))
    assert trace.format == "headway-run"
    assert trace.frame["arrival_s"].to_list() == [0.0, 1.0, 2.0]
    assert trace.frame["input_tokens"].to_list() == [20, 12, 30]
    assert trace.frame["output_tokens"].to_list() == [60, 5, 70]
    assert trace.frame["slo_class"].to_list() == ["chat", "chat", None]
    assert trace.history == ("2 requests did not finish: their lengths are those asked for",)


def test_a_parquet_file_with_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    """The first missing column is named."""
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(InputError, match="slo_class = 'None': expected a column of type String"):
        read(tmp_path / "x.parquet")


def test_a_killed_run_gives_what_had_finished(tmp_path: Path) -> None:
    """The part file holds one request a line; half a line at the end had not finished."""
    row = {"status": "ok", "scheduled_s": 1.0, "end_s": 2.0, "input_tokens": 7, "max_tokens": 9}
    lines = [json.dumps(row | {"generated_tokens": 4}), json.dumps(row | {"scheduled_s": 0.0}), '{"status": "o']
    (tmp_path / "requests.jsonl.part").write_text("\n".join(lines))
    trace = read(tmp_path)
    assert trace.frame.select("arrival_s", "input_tokens", "output_tokens").rows() == [(0.0, 7, 9), (1.0, 7, 4)]
    assert trace.history == ("the run was killed: only its finished requests are here",)
