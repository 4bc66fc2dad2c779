"""The two ways through a file of JSON lines agree: what one reads the other reads, what one refuses the other does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import InputError
from headway.trace import json_table
from headway.trace.json_table import read_jsonl
from headway.trace.source import Source

REQUIRED = {"a": "float", "n": "int"}
OPTIONAL = {"s": "str", "ids": "ids"}

_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**63, 2**64, -(2**63), 10**30, 1.5, 2.0, 1e300]),
    st.sampled_from(["", "x", "n", "null", "true", "7", "{", "[1]", 'say "n":', "back\\slash", "größe", "\ud800"]),
    st.lists(st.one_of(st.none(), st.integers(-1, 2), st.just(1.5), st.just(2**64 - 1), st.just("x")), max_size=2),
    st.dictionaries(st.sampled_from(["n", "zz"]), st.integers(0, 1), max_size=1),
)
_good = st.fixed_dictionaries(
    {"a": st.floats(0, 9), "n": st.integers(0, 9)},
    optional={"s": st.sampled_from(["x", "y"]), "ids": st.lists(st.integers(0, 9), max_size=3)},
)
_odd = st.dictionaries(st.sampled_from(["a", "n", "s", "ids", "zz"]), _values, max_size=5)


def outcome(read: Any) -> pl.DataFrame | str:
    """Return the table, or the message of the error."""
    try:
        return read()
    except InputError as error:
        return str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(_good, _good, _good, _odd), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_both_ways_agree(tmp_path: Path, rows: list[dict[str, Any]], tight: bool, header: bool) -> None:
    """Rows of every kind, good and odd, with and without a header, in either spelling of JSON."""
    lines = [{"head": 1, "history": ["zz"]}, *rows] if header else rows
    separators = (",", ":") if tight else (", ", ": ")
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row, separators=separators) + "\n" for row in lines))
    source = Source(file)
    known = {**REQUIRED, **OPTIONAL}
    fast = outcome(lambda: read_jsonl(source, REQUIRED, OPTIONAL, skip_first=header))
    slow = outcome(lambda: json_table._line_by_line(source, REQUIRED, known, header, False))
    if isinstance(slow, str) or isinstance(fast, str):
        assert fast == slow
    else:
        assert fast.equals(slow)


@pytest.mark.parametrize("null", [False, True])
def test_an_unknown_key_in_the_last_of_many_rows_is_found(tmp_path: Path, null: bool) -> None:
    """Not even one whose value is null goes by unseen."""
    file = tmp_path / "t.jsonl"
    rows = [{"a": 0.5 * i, "n": i} for i in range(2000)]
    rows[-1]["zz"] = None if null else 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r":2000: zz = "):
        read_jsonl(Source(file), REQUIRED, OPTIONAL)


def test_ordinary_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at the schema first, no reading line by line."""
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"a": 0.5 * i, "n": i, "s": "x", "ids": [i]}) + "\n" for i in range(50)))
    monkeypatch.setattr(pl, "scan_ndjson", None)
    monkeypatch.setattr(json_table, "_line_by_line", None)
    assert read_jsonl(Source(file), REQUIRED, OPTIONAL).height == 50
