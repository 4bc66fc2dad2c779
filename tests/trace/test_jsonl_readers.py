"""Claims about the JSON-lines formats: Mooncake, Qwen-Bailian, LLMServingSim. All rows are invented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.errors import InputError
from headway.trace import read, select
from headway.trace.shape import shape


def put(folder: Path, rows: list[Any], name: str = "trace.jsonl") -> Path:
    """Write rows as JSON lines (strings as they are)."""
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def mooncake(ms: float, tokens: int, ids: list[int] | dict[str, Any], out: int = 1) -> dict[str, Any]:
    """Return one Mooncake row."""
    return {"timestamp": ms, "input_length": tokens, "output_length": out, "hash_ids": ids}


def test_mooncake_times_are_milliseconds_and_the_short_last_block_has_an_id(tmp_path: Path) -> None:
    """513 tokens are two blocks of 512: ceil, not floor."""
    trace = read(put(tmp_path, [mooncake(0, 512, [0]), mooncake(1500, 513, [0, 1], 7)]))
    assert trace.format == "mooncake"
    assert trace.block_size == 512
    assert trace.frame["arrival_s"].to_list() == [0.0, 1.5]
    assert trace.frame["hash_ids"].to_list() == [[0], [0, 1]]


def test_mooncake_number_of_ids_is_checked_against_the_input(tmp_path: Path) -> None:
    """One id too few is an error that tells the right number."""
    path = put(tmp_path, [mooncake(0, 512, [0]), mooncake(1, 513, [0])])
    with pytest.raises(InputError, match=r"trace.jsonl:2: hash_ids = '1 ids': expected exactly 2 ids"):
        read(path)


def test_mooncake_ids_must_be_chained(tmp_path: Path) -> None:
    """Id 5 follows 1 in one row and 2 in another: it cannot stand for a prefix."""
    path = put(tmp_path, [mooncake(0, 1000, [1, 5]), mooncake(1, 1000, [2, 5])])
    with pytest.raises(InputError, match=r"trace.jsonl:2: hash_ids = 5: expected an id that always follows"):
        read(path)


def test_mooncake_ticks_are_noted_and_can_be_spread(tmp_path: Path) -> None:
    """Ten requests each on ticks of 3 s: the note says so, spreading leaves no two together."""
    rows = [mooncake(3000 * tick, 10, [100 * tick + i]) for tick in range(6) for i in range(10)]
    trace = read(put(tmp_path, rows))
    assert "ticks about 3 s apart with 10 requests each" in trace.history[0]
    assert any("distinct arrival times" in text for text in shape(trace).warnings)
    spread = select(trace, spread_s=3.0, seed=1)
    assert spread.frame["arrival_s"].n_unique() == 60
    assert "spread uniformly over ticks of 3 s" in spread.history[-1]


def test_mooncake_without_hash_ids_is_read_as_lengths(tmp_path: Path) -> None:
    """The ids are optional; then there is no block size."""
    trace = read(put(tmp_path, [{"timestamp": 0, "input_length": 5, "output_length": 1}]))
    assert trace.block_size is None


def test_a_cousin_with_dicts_of_ids_and_string_times_is_not_taken_for_mooncake(tmp_path: Path) -> None:
    """RAGPulse uses the same keys for other things; nothing is guessed."""
    row = mooncake(0, 3140, {"sys_prompt": [1], "passages_ids": [2]}) | {"timestamp": "43200"}
    with pytest.raises(InputError, match="expected a request trace in one of the formats"):
        read(put(tmp_path, [row]))


def test_mooncake_end_of_file_may_hold_empty_lines(tmp_path: Path) -> None:
    """Empty lines hold no request and shift no line number."""
    path = put(tmp_path, [mooncake(0, 5, [1]), "", mooncake(1, 5, [2]), ""])
    assert len(read(path)) == 2
    path = put(tmp_path, [mooncake(0, 5, [1]), "", mooncake(1, -5, [2])])
    with pytest.raises(InputError, match=r"trace.jsonl:3: input_length = -5"):
        read(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"timestamp": 1, "input_length": "5", "output_length": 1},
            r":2: input_length = '5': expected a whole",
        ),
        ({"timestamp": 1, "input_length": 5.5, "output_length": 1}, r":2: input_length = 5.5"),
        ({"timestamp": 1, "input_length": True, "output_length": 1}, r":2: input_length = True"),
        ({"timestamp": 1, "output_length": 1}, r":2: input_length = None"),
        (
            {"timestamp": 1, "input_length": 5, "output_length": 1, "colour": 3},
            r":2: colour = 3: expected only",
        ),
        (mooncake(1, 5, [-1]), r":2: hash_ids = \[-1\]: expected a list of whole numbers"),
        (mooncake(1, 5, ["a"]), r":2: hash_ids = \['a'\]"),
        ("{", r":2: not valid JSON"),
        ("[1]", r":2: \[1\]: expected a JSON object"),
        (mooncake(-1, 5, [1]), r":2: timestamp = -0.001: expected a time that is not before"),
        (
            '{"timestamp": NaN, "input_length": 5, "output_length": 1}',
            r":2: timestamp = nan: expected a finite",
        ),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_key(tmp_path: Path, bad: Any, message: str) -> None:
    """The quick way of reading hands every doubt to the way that can name it."""
    path = put(tmp_path, [mooncake(0, 5, [9]), bad])
    with pytest.raises(InputError, match=r"trace\.jsonl" + message):
        read(path)


def test_bailian_sessions_follow_parents_to_the_root(tmp_path: Path) -> None:
    """Chat 3 answers 2 answers 1: one session, turns counted from 0; times are seconds."""
    base = {"output_length": 2, "type": "text"}
    rows = [
        {
            "chat_id": 1,
            "parent_chat_id": -1,
            "timestamp": 61.0,
            "input_length": 16,
            "turn": 1,
            "hash_ids": [7],
        },
        {
            "chat_id": 9,
            "parent_chat_id": -1,
            "timestamp": 61.5,
            "input_length": 17,
            "turn": 1,
            "hash_ids": [7, 8],
        },
        {
            "chat_id": 2,
            "parent_chat_id": 1,
            "timestamp": 62.5,
            "input_length": 40,
            "turn": 2,
            "hash_ids": [7, 3],
        },
        {"chat_id": 3, "parent_chat_id": 2, "timestamp": 63.0, "input_length": 40, "turn": 3},
    ]
    trace = read(put(tmp_path, [base | row for row in rows]))
    assert trace.format == "qwen-bailian"
    assert trace.block_size == 16
    assert trace.frame["arrival_s"].to_list() == [0.0, 0.5, 1.5, 2.0]
    assert trace.frame["session_id"].to_list() == ["1", "9", "1", "1"]
    assert trace.frame["turn"].to_list() == [0, 0, 1, 2]
    assert trace.frame["think_s"].null_count() == 4


def test_bailian_parent_outside_the_file_starts_a_session_and_is_noted(tmp_path: Path) -> None:
    """A trace cut out of a longer one has such rows; they stay."""
    row = {
        "chat_id": 5,
        "parent_chat_id": 4,
        "timestamp": 0,
        "input_length": 5,
        "output_length": 1,
        "turn": 2,
    }
    trace = read(put(tmp_path, [row]))
    assert trace.frame["session_id"].to_list() == ["5"]
    assert "1 requests have a parent that is not in the file" in trace.history[0]


def test_bailian_more_ids_than_blocks_are_refused(tmp_path: Path) -> None:
    """16 tokens are one block."""
    row = {"chat_id": 5, "timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1, 2]}
    with pytest.raises(InputError, match="expected at most 1 ids: one for each 16 of 16 input tokens"):
        read(put(tmp_path, [row]))


def test_llmservingsim_measured_run_uses_the_arrival_clock_only(tmp_path: Path) -> None:
    """Rows lie in the order of completion and are sorted; the monotonic stamps are never mixed in."""
    rows = [
        {
            "request_id": "b",
            "input_toks": 2,
            "output_toks": 3,
            "arrival_time": 1787267981.5,
            "queued_ts": 9.0,
        },
        {
            "request_id": "a",
            "input_toks": 1,
            "output_toks": 3,
            "arrival_time": 1787267980.0,
            "queued_ts": 7.0,
        },
    ]
    trace = read(put(tmp_path, rows))
    assert trace.format == "llmservingsim"
    assert trace.frame["arrival_s"].to_list() == [0.0, 1.5]
    assert trace.frame["input_tokens"].to_list() == [1, 2]


def test_llmservingsim_workload_is_nanoseconds_with_16_token_blocks(tmp_path: Path) -> None:
    """The other kind of file of the same project."""
    rows = [
        {"arrival_time_ns": 46_000_001, "input_toks": 17, "output_toks": 3, "hash_ids": [0, 1]},
        {"arrival_time_ns": 1_046_000_002, "input_toks": 5, "output_toks": 3},
    ]
    trace = read(put(tmp_path, rows))
    assert trace.block_size == 16
    assert trace.frame["arrival_s"].to_list() == pytest.approx([0.0, 1.000000001], abs=1e-12)
