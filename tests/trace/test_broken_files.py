"""Broken files of every kind end in one error that names where and what; none ends in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.errors import InputError
from headway.printable import plain, printable
from headway.trace import read, select
from headway.trace.charts import terminal_lines
from headway.trace.shape import shape
from headway.trace.synthetic import demo_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
VLLM = {"endpoint_type": "x", "num_prompts": 1, "tokenizer_id": "x"}


def otel(attributes: object, **span: object) -> str:
    """Return an OTLP document of one span."""
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": attributes, **span}]}]}]})


def guide(**requests: object) -> str:
    """Return a GuideLLM report of one benchmark."""
    return json.dumps({"version": "guidellm", "benchmarks": [{"requests": requests}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE, "no request is in it: expected rows below the header"),
        (AZURE + "tomorrow,5,6\n", r":2: TIMESTAMP = 'tomorrow': expected .* 2023.* or .* 2024"),
        (AZURE + "0001-01-01 00:00:00,5,6\n", r":2: TIMESTAMP = '0001-01-01 00:00:00'"),
        (AZURE + "2023-11-16 18:17:03,5," + "6" * 9999 + "\n", r"Tokens = '6{139}\.\.\. \(10,001 characters\)"),
        (BURST + "5,a,nan,G,1,2,3,x\n", r":2: Elapsed time = 'nan': expected 0 or more seconds"),
        (BURST + "5,a,-1,G,1,2,3,x\n", r":2: Elapsed time = '-1'"),
        ('{"arrival_s":0,"input_tokens":5,"output_tokens":6}\n[' + "[" * 99_999 + "\n", ":2: JSON nested too deeply"),
        ('{"arrival_s":0,"input_tokens":5,"output_tokens":6,"think_s":NaN}\n', ":1: think_s = nan"),
        ('{"arrival_s":0,"input_tokens":5,"output_tokens":6}\n{"arrival_s":1e300,"input_tokens":5,"output_tokens":6}\n',
         r":2: arrival_s = 1e\+300: expected a time at most"),
        ('{"headway_trace":true}\n{"arrival_s":0,"input_tokens":5,"output_tokens":6}\n', "expected version 1"),
        ('{"arrival_time_ns":-5,"input_toks":5,"output_toks":3}\n', ":1: arrival_time_ns = -5: expected 0 or more"),
        ('{"resourceSpans":{}}', "resourceSpans = {}: expected a list"),
        ('{"resourceSpans":[1]}', r"resourceSpans\[0\] = 1: expected an object"),
        ('{"spans":[1],"span_id":1,"attributes":1}', r"spans\[0\] = 1: expected an object"),
        (otel([3]), r"spans\[0\]\.attributes\[0\] = 3: expected an object"),
        (otel([{"key": "a", "value": 3}]), r"attributes\[0\]\.value = 3: expected an object"),
        (otel([{"key": "a", "value": {"intValue": "x"}}]), r"value\.intValue = 'x': expected a whole number"),
        (json.dumps({**VLLM, "start_times": [1], "input_lens": [1], "output_lens": [2], "queue_times": 3}),
         "queue_times = 3: expected a list"),
        (json.dumps({**VLLM, "start_times": [1], "input_lens": [10**22], "output_lens": [2]}),
         r"input_lens\[0\] = 10000000000000000000000: expected a whole number"),
        ('{"metadata":{"request_start_ns":1},"metrics":[]}\n', ":1: metrics = .*expected an object"),
        ('{"metadata":{"request_start_ns":1},"metrics":{"input_sequence_length":3}}\n',
         "metrics.input_sequence_length = 3: expected an object"),
        ('{"x":"guidellm","benchmarks":[3]}', r"benchmarks\[0\] = 3: expected an object"),
        (guide(successful=[3]), r"successful\[0\] = 3: expected an object"),
        (guide(successful=[{"info": 3}]), r"successful\[0\]\.info = 3: expected an object"),
        (guide(successful=[], errored=3), r"requests\.errored = 3: expected a list"),
        ('[{"start_time":1,"end_time":2,"request":"x","info":3}]', r"\[0\]\.info = 3: expected an object"),
        ('[{"start_time":1,"end_time":2,"request":"x","info":{"response_metrics":3}}]',
         r"\[0\]\.info\.response_metrics = 3: expected an object"),
    ],
)  # fmt: skip
def test_a_broken_file_names_place_and_value(tmp_path: Path, text: str, message: str) -> None:
    """File, line or path in the document, value, and what was expected."""
    file = tmp_path / "trace"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read(file)
    assert str(caught.value).startswith(str(file))


def test_identifiers_that_are_numbers_are_names(tmp_path: Path) -> None:
    """Two requests of conversation 7 are one session."""
    record = {
        "metadata": {"request_start_ns": 1, "request_end_ns": 2, "x_correlation_id": 7},
        "metrics": {"input_sequence_length": {"value": 3}, "output_sequence_length": {"value": 3}},
    }
    later = {**record, "metadata": {**record["metadata"], "request_start_ns": 5, "request_end_ns": 6}}
    file = tmp_path / "profile_export.jsonl"
    file.write_text(f"{json.dumps(record)}\n{json.dumps(later)}\n")
    assert read(file).frame["session_id"].to_list() == ["7", "7"]


def test_quotes_and_spaces_do_not_hide_the_format(tmp_path: Path) -> None:
    """Spreadsheets quote every field."""
    file = tmp_path / "a.csv"
    file.write_text(AZURE + '"2023-11-16 18:17:03.9799600", "5" ,"6"\n'.replace(' "5" ', '"5"'))
    assert read(file).frame["input_tokens"].to_list() == [5]


def test_arrivals_that_no_clock_tells_apart_have_no_rate(tmp_path: Path) -> None:
    """A span of 5e-324 s is none: no rate of infinity, and a chart all the same."""
    file = tmp_path / "t.jsonl"
    rows = [{"arrival_s": at, "input_tokens": 5, "output_tokens": 6} for at in (0, 5e-324)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read(file)
    found = shape(trace)
    assert (found.rate, found.input_tokens_per_s) == (None, None)
    assert terminal_lines(trace, 40)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_scale": 1e30}, "expected at most 2147483647"),
        ({"time_scale": 1e-320}, "expected a trace of at most"),
        ({"seed": -1}, "seed = -1"),
        ({"classes": [("a", None), ("b", 5)]}, "covers no prompt"),
    ],
)
def test_settings_beyond_reason_are_refused(settings: dict, message: str) -> None:
    """Nothing is clipped or ignored in silence."""
    with pytest.raises(InputError, match=message):
        select(demo_trace(rate=1, seed=0, n=5), **settings)


def test_a_negative_seed_is_an_input_error() -> None:
    """The generator's own error would be a traceback."""
    with pytest.raises(InputError, match="seed = -1"):
        demo_trace(rate=1, seed=-1, n=5)


def test_names_of_others_cannot_steer_the_terminal() -> None:
    """Control codes and direction marks become escapes, brackets stay brackets, letters stay letters."""
    assert printable("größe\x1b[31m\u202e☃\nx") == "größe\\x1b[31m\\u202e☃\nx"
    assert plain("[bold]x[/]") == "\\[bold]x\\[/]"
