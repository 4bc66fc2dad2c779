"""The run store: what is written, what survives a kill, what is refused."""

from __future__ import annotations

import json

import polars as pl
import pytest

from headway.errors import InputError
from headway.replay import store
from headway.replay.record import SCHEMA
from headway.replay.request import Call
from headway.replay.targets import Targets


def row(index: int, times: tuple[float, ...] = (1.0, 1.5), status: str = "ok") -> dict:
    """Return the row of a request due at 0 whose tokens came at `times`."""
    call = Call(
        index=index, trace_row=index, due=0.0, input_tokens=4, max_tokens=2, slo_class=None, session_id=None,
        targets=Targets(ttft_s=2.0), done=lambda call: None,
    )  # fmt: skip
    call.on_sent(0.25)
    call.stream.token_times = list(times)
    call.close(status, None if status == "ok" else "why", 2.0)
    return call.row(0.0)


def test_a_row_by_hand():
    """Due 0, sent 0.25, tokens at 1 and 1.5 s: every derived value."""
    made = row(0)
    assert set(made) == set(SCHEMA)
    assert (made["ttft_s"], made["service_ttft_s"], made["tpot_s"], made["tbt_max_s"]) == (
        1.0,
        0.75,
        0.5,
        0.5,
    )
    assert (made["e2e_s"], made["attained"]) == (1.5, True)


def test_a_request_without_tokens_has_no_latency():
    """Null, never 0."""
    made = row(0, times=(), status="refused")
    assert [made[key] for key in ("ttft_s", "tpot_s", "tbt_max_s", "e2e_s", "first_token_s")] == [None] * 5
    assert made["attained"] is False


def test_one_token_has_no_pace():
    """TPOT needs two tokens; a chunk of m tokens has gaps of 0 inside."""
    assert row(0, times=(1.0,))["tpot_s"] is None
    assert row(0, times=(1.0, 1.0, 1.5))["tbt_max_s"] == 0.5
    assert row(0, times=(1.0, 1.0, 1.5))["tpot_s"] == 0.25


def test_write_and_load(tmp_path):
    """Rows come back ordered by index, in the columns of the record, the part file is gone."""
    writer = store.RunWriter(tmp_path / "run")
    writer.open({"state": "running"})
    writer.append(row(1))
    writer.append(row(0, times=(), status="failed"))
    run = writer.close({"state": "finished", "valid": True})
    assert run.frame["index"].to_list() == [0, 1]
    loaded = store.load(tmp_path / "run")
    assert loaded.frame.equals(run.frame)
    assert loaded.frame.schema == pl.Schema(SCHEMA)
    assert loaded.valid
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["requests.parquet", "run.json"]


def test_a_killed_run_keeps_what_finished(tmp_path):
    """Without `close`, and with a last line cut in half, every whole row is there."""
    writer = store.RunWriter(tmp_path / "run")
    writer.open({"state": "running"})
    writer.append(row(0))
    writer.append(row(1))
    with open(tmp_path / "run" / store.PART, "ab") as part:
        part.write(b'{"index":2,"trace_')
    run = store.load(tmp_path / "run")
    writer._part.close()
    assert run.frame["index"].to_list() == [0, 1]
    assert run.frame.schema == pl.Schema(SCHEMA)
    assert run.meta["state"] == "running"
    assert not run.valid


def test_a_run_killed_before_its_first_answer(tmp_path):
    """An empty table, not an error."""
    writer = store.RunWriter(tmp_path / "run")
    writer.open({"state": "running"})
    writer._part.close()
    assert store.load(tmp_path / "run").frame.height == 0


def test_a_run_is_never_overwritten(tmp_path):
    """A folder that holds a run is refused before anything is sent."""
    store.save(tmp_path / "run", {}, pl.DataFrame([row(0)], schema=SCHEMA))
    with pytest.raises(InputError, match="holds a run already"):
        store.RunWriter(tmp_path / "run")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no run.json"),
        ({"run.json": "{"}, "not JSON"),
        ({"run.json": "[]"}, "expected the JSON object of a run"),
        ({"run.json": '{"clock": null}'}, "clock = None: expected an object"),
        ({"run.json": "{}"}, "neither"),
        ({"run.json": "{}", "requests.jsonl.part": '{"index":0}\n'}, "without one of the statuses"),
        ({"run.json": "{}", "requests.jsonl.part": '{"index":0,"status":"ok"}\n'}, "without scheduled_s"),
        ({"run.json": "{}", "requests.parquet": "x"}, "can't be read"),
        ({"run.json": "{}", "requests.jsonl.part": "nonsense\n"}, "can't be read"),
    ],
)
def test_a_broken_folder_is_an_input_error(tmp_path, files, message):
    """Each says what is missing or broken."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        store.load(tmp_path)


def test_a_run_of_an_older_version_loads(tmp_path):
    """Columns added since are null."""
    frame = pl.DataFrame([row(0)], schema=SCHEMA).drop("first_answer_s")
    frame.write_parquet(tmp_path / "requests.parquet")
    (tmp_path / "run.json").write_text(json.dumps({"state": "finished"}))
    run = store.load(tmp_path)
    assert run.frame["first_answer_s"].to_list() == [None]
    assert run.frame.columns == list(SCHEMA)


def test_runs_are_found_two_levels_deep(tmp_path):
    """In order of name; other folders are not runs."""
    for name in ("b", "a", "sweep/1", "not/so/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert [str(path.relative_to(tmp_path)) for path in store.find(tmp_path)] == ["a", "b", "sweep/1"]


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    """A file in the way of the folder is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        store.RunWriter(tmp_path / "file" / "run").open({})
