"""Claims about Headway's own trace file and about finding a format from content."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import InputError
from headway.trace import SCHEMA, ReadReport, Trace, read, write
from headway.trace.synthetic import demo_trace

ROW = '{"arrival_s": 0.5, "input_tokens": 3, "output_tokens": 1}\n'


def put(folder: Path, text: str, name: str = "t.jsonl") -> Path:
    """Write `text`."""
    path = folder / name
    path.write_text(text)
    return path


def test_rows_without_a_header_are_enough(tmp_path: Path) -> None:
    """Times count from the first arrival."""
    trace = read(put(tmp_path, ROW + ROW.replace("0.5", "2")))
    assert trace.format == "headway-jsonl"
    assert trace.frame["arrival_s"].to_list() == [0.0, 1.5]


def test_an_unknown_key_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    """A misspelt column would otherwise vanish."""
    path = put(tmp_path, ROW + '{"arrival_s": 1, "input_tokens": 3, "output_tokens": 1, "clas": "x"}\n')
    with pytest.raises(InputError, match=r"t.jsonl:2: clas = 'x': expected only the keys arrival_s, input_tokens"):
        read(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"headway_trace": 2}', "headway_trace = 2: expected version 1"),
        ('{"headway_trace": 1, "block_size": 0}', "block_size = 0: expected a whole number of tokens"),
        ('{"headway_trace": 1, "blocks": 4}', "blocks = 4: expected only the keys"),
        ('{"headway_trace": 1, "history": "x"}', "history = 'x': expected a list of strings"),
        ('{"headway_trace": 1, "recorded": 1}', "recorded = 1: expected true or false"),
    ],
)
def test_a_bad_header_is_named(tmp_path: Path, header: str, message: str) -> None:
    """Line, key and value of the header."""
    with pytest.raises(InputError, match=f"t.jsonl:1: {message}"):
        read(put(tmp_path, f"{header}\n{ROW}"))


def test_hash_ids_need_a_block_size_and_fit_into_the_prompt(tmp_path: Path) -> None:
    """Without a header the ids mean nothing; with one, 17 tokens hold at most 2 blocks of 16."""
    row = '{"arrival_s": 0, "input_tokens": 17, "output_tokens": 1, "hash_ids": [1, 2]}\n'
    with pytest.raises(InputError, match="expected a first line with the block size"):
        read(put(tmp_path, row))
    header = '{"headway_trace": 1, "block_size": 16}\n'
    assert read(put(tmp_path, header + row)).block_size == 16
    with pytest.raises(InputError, match=r"t.jsonl:2: hash_ids = '3 ids': expected at most 2 ids"):
        read(put(tmp_path, header + row.replace("[1, 2]", "[1, 2, 3]")))


def test_negative_think_time_and_turn_are_refused(tmp_path: Path) -> None:
    """A pause cannot be shorter than nothing."""
    row = '{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1, "think_s": -1}\n'
    with pytest.raises(InputError, match=r"think_s = -1.0: expected 0 to"):
        read(put(tmp_path, row))


texts = st.none() | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "gap": st.floats(0, 1e6),
            "input_tokens": st.integers(32, 2**31 - 1),
            "output_tokens": st.integers(1, 2**31 - 1),
            "slo_class": texts,
            "session_id": texts,
            "turn": st.none() | st.integers(0, 1000),
            "think_s": st.none() | st.floats(0, 1e6),
            "hash_ids": st.none() | st.lists(st.integers(0, 2**64 - 1), max_size=2),
        }
    ),
    min_size=1,
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(rows=rows)
def test_what_is_written_is_read_back_the_same(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    """Any table of the schema survives the file, whatever names and ids it holds."""
    arrival = 0.0
    columns: dict[str, list[object]] = {name: [] for name in SCHEMA}
    for index, row in enumerate(rows):
        arrival = arrival + float(row.pop("gap")) if index else 0.0  # type: ignore[arg-type]
        for name in SCHEMA:
            columns[name].append(arrival if name == "arrival_s" else row.get(name))
    frame = pl.DataFrame(columns, schema=SCHEMA)
    block_size = 16 if frame["hash_ids"].null_count() < frame.height else None
    report = ReadReport(read=len(rows), kept=len(rows))
    made = Trace(
        frame=frame,
        format="made",
        source="made",
        sha256="0",
        report=report,
        block_size=block_size,
        history=("a",),
    )
    write(made, tmp_path / "out.jsonl")
    back = read(tmp_path / "out.jsonl")
    assert back.frame.equals(made.frame)
    assert back.block_size == made.block_size
    assert back.history == made.history


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    """Files can be compared by hash."""
    for name in ("a", "b"):
        write(demo_trace(n=50, rate=2.0, seed=7), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    """The registry is the help."""
    with pytest.raises(InputError, match=r"format = 'azure': expected one of headway-jsonl, .*azure2023"):
        read(put(tmp_path, ROW), "azure")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"\n \n", "empty file"),
        (b"\x1f\x8b123", "gzip data: expected an uncompressed trace"),
        (b"a,b\n1,2\n", "'a,b': expected a request trace in one of the formats"),
        (b'{"a": 1}\n', "expected a request trace in one of the formats"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """Nothing is guessed from a file name."""
    path = tmp_path / "AzureLLMInferenceTrace_code.csv"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read(path)


def test_a_missing_file_and_a_strange_folder_are_refused(tmp_path: Path) -> None:
    """Both name the path."""
    with pytest.raises(InputError, match="nowhere: cannot be read"):
        read(tmp_path / "nowhere")
    with pytest.raises(InputError, match="a folder: expected a request trace"):
        read(tmp_path)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    """A file damaged in the middle."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(ROW.encode() + b'{"arrival_s": 1, "slo_class": "\xff"}\n')
    with pytest.raises(InputError, match=r"t.jsonl:2: not UTF-8 text"):
        read(path)


def test_the_hash_is_that_of_the_source(tmp_path: Path) -> None:
    """Results carry it, so it must be the plain SHA-256 of the file."""
    import hashlib

    path = put(tmp_path, ROW)
    assert read(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_report_that_loses_rows_cannot_be_made() -> None:
    """read == kept + dropped is checked where the report is made."""
    with pytest.raises(ValueError, match="rows vanished"):
        ReadReport(read=3, kept=1, dropped={"x": 1})


def test_header_is_json_with_block_size_and_history(tmp_path: Path) -> None:
    """The first line of a written file."""
    write(demo_trace(n=3, rate=1.0, seed=0), tmp_path / "a")
    header = json.loads((tmp_path / "a").read_text().splitlines()[0])
    assert header["headway_trace"] == 1
    assert header["history"][0].startswith("generated: mixed, n=3")
