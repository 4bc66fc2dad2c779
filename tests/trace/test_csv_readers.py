"""Claims about the CSV formats: Azure 2023, Azure 2024, BurstGPT. All rows are invented."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import InputError
from headway.trace import read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_LONG = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def put(folder: Path, text: str, name: str = "trace.csv") -> Path:
    """Write `text` byte for byte."""
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_azure_2023_keeps_100_ns_reads_crlf_and_needs_no_last_end_of_line(tmp_path: Path) -> None:
    """Seven decimals survive; the last row counts although its line does not end."""
    path = put(
        tmp_path,
        AZURE + "2023-11-16 18:17:03.0000001,374,44\r\n2023-11-16 18:17:04.5000002,9,1",
    )
    trace = read(path)
    assert trace.format == "azure2023"
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0.0, 1.5000001], abs=1e-12)
    assert trace.frame["input_tokens"].to_list() == [374, 9]
    assert trace.frame["output_tokens"].to_list() == [44, 1]
    assert (trace.report.read, trace.report.kept, trace.report.dropped) == (2, 2, {})
    assert trace.block_size is None


def test_azure_2024_is_told_by_the_offset_of_its_first_stamp(tmp_path: Path) -> None:
    """The header is that of 2023; the stamps decide."""
    path = put(
        tmp_path,
        AZURE.replace("\r", "") + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,9,1\n",
    )
    trace = read(path)
    assert trace.format == "azure2024"
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0.0, 0.99007], abs=1e-12)


def test_azure_stamp_of_the_other_year_is_refused_with_its_line(tmp_path: Path) -> None:
    """Mixed stamps are an error, not a guess; the empty line in between counts as a line."""
    path = put(tmp_path, AZURE + "2023-11-16 18:17:03.1,3,4\r\n\r\n2023-11-16 18:17:04.1+00:00,3,4\r\n")
    with pytest.raises(InputError, match=r"trace.csv:4: TIMESTAMP = '2023-11-16 18:17:04.1\+00:00'"):
        read(path)


def test_azure_backward_time_is_refused_with_its_line(tmp_path: Path) -> None:
    """The file is sorted; a row out of order means that something is wrong with it."""
    path = put(tmp_path, AZURE + "2023-11-16 18:17:04.0,3,4\r\n2023-11-16 18:17:03.0,3,4\r\n")
    with pytest.raises(InputError, match=r"trace.csv:3: TIMESTAMP = .*not before the row above"):
        read(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:17:04.0,x,4", r":3: ContextTokens = 'x': expected a whole number"),
        ("2023-11-16 18:17:04.0,4.5,4", r":3: ContextTokens = '4.5'"),
        ("2023-11-16 18:17:04.0,-4,4", r":3: ContextTokens = -4"),
        ("2023-11-16 18:17:04.0,4,", r":3: GeneratedTokens = None"),
        ("2023-11-16 18:17:04.0,4,9999999999", r":3: GeneratedTokens = 9999999999"),
        ("2023-11-16 18:17:04.0,4,4,4", r":3: .*expected 3 fields"),
        ("2023-11-16 18:17:04.0", r":3: column 'ContextTokens' is missing: the row has 1 of 3 expected fields"),
        ("2023-11-16 18:17:04.0,4", r":3: column 'GeneratedTokens' is missing: the row has 2 of 3 expected fields"),
    ],
)
def test_a_bad_value_is_named_with_file_line_and_key(tmp_path: Path, row: str, message: str) -> None:
    """Whatever is wrong, the error says where it stands."""
    path = put(tmp_path, f"{AZURE}2023-11-16 18:17:03.0,3,4\r\n{row}\r\n")
    with pytest.raises(InputError, match=r"trace\.csv" + message):
        read(path)


def test_burstgpt_short_layout_drops_failed_calls_and_counts_them(tmp_path: Path) -> None:
    """Zero output is a failed call, zero input is always dropped; both are counted apart; read = kept + dropped."""
    path = put(tmp_path, BURST + "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,7,0,7,API log\n"
               "46,GPT-4,0,0,0,API log\n118,GPT-4,417,276,693,API log\n")  # fmt: skip
    trace = read(path)
    assert trace.format == "burstgpt"
    assert trace.frame["arrival_s"].to_list() == [0.0, 113.0]
    assert trace.report.dropped == {"zero input tokens": 1, "zero output tokens": 1}
    assert trace.report.read == 4


def test_zero_output_can_be_kept_as_one_token(tmp_path: Path) -> None:
    """The load of the prompt stays; zero input is dropped all the same."""
    path = put(tmp_path, BURST + "5,ChatGPT,472,0,472,API log\n6,ChatGPT,0,0,0,API log\n")
    trace = read(path, zero_output="one")
    assert trace.frame["output_tokens"].to_list() == [1]
    assert trace.report.dropped == {"zero input tokens": 1}
    assert trace.history == ("1 requests with zero output tokens kept with one",)


def test_burstgpt_long_layout_is_read_by_name_and_has_sessions(tmp_path: Path) -> None:
    """Columns two and three are new; think time is the pause after the answer (10.5 + 2 s) ended."""
    path = put(
        tmp_path,
        BURST_LONG
        + "19440110.5,7,2.0,ChatGPT,10,5,15,Conversation log\n"
        + "19440111.0,,1.0,ChatGPT,20,5,25,API log\n"
        + "19440120.0,7,1.0,ChatGPT,30,5,35,Conversation log\n",
    )
    frame = read(path).frame
    assert frame["arrival_s"].to_list() == [0.0, 0.5, 9.5]
    assert frame["session_id"].to_list() == ["7", None, "7"]
    assert frame["turn"].to_list() == [0, None, 1]
    assert frame["think_s"].to_list() == [None, None, 7.5]


def test_burstgpt_without_a_request_left_says_what_became_of_the_rows(tmp_path: Path) -> None:
    """A file of failures only is no trace."""
    path = put(tmp_path, BURST + "5,ChatGPT,472,0,472,API log\n")
    with pytest.raises(InputError, match=r"no request is left of 1 rows \(1 zero output tokens\)"):
        read(path)
