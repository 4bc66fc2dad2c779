"""The summary of a run: counts, attainment, goodput, percentiles, by hand."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from headway.replay.record import SCHEMA
from headway.replay.stats import interval_ranks
from headway.replay.store import Run
from headway.replay.summary import summarise, table


def frame(rows: list[dict]) -> pl.DataFrame:
    """Return a table of requests; what a row leaves out is null."""
    return pl.DataFrame(
        [dict.fromkeys(SCHEMA) | {"index": i, "token_s": []} | row for i, row in enumerate(rows)],
        schema=SCHEMA,
    )


def ok(due: float, *times: float, sent: float | None = None, **more: object) -> dict:
    """Return a request due at `due` with tokens at `times`."""
    sent = due if sent is None else sent
    gaps = [b - a for a, b in itertools.pairwise(times)]
    row = {
        "status": "ok", "http_status": 200, "scheduled_s": due, "sent_s": sent, "end_s": times[-1],
        "ttft_s": times[0] - due, "service_ttft_s": times[0] - sent, "e2e_s": times[-1] - due, "token_s": list(times),
        "tpot_s": sum(gaps) / len(gaps) if gaps else None, "tbt_max_s": max(gaps, default=None),
        "generated_tokens": len(times), "attained": True,
    }  # fmt: skip
    return row | more


def bad(status: str, due: float, end: float, **more: object) -> dict:
    """Return a request that did not end well."""
    return {
        "status": status,
        "scheduled_s": due,
        "end_s": end,
        "generated_tokens": 0,
        "attained": False,
    } | more


def test_every_offered_request_is_in_the_denominator():
    """Two of six attained: refused, failed, cut off and late ones all count against."""
    total = summarise(
        frame(
            [
                ok(0.0, 1.0, 1.5),
                ok(1.0, 2.0, 2.5),
                ok(2.0, 9.0, 10.0, attained=False),
                bad("refused", 3.0, 3.1, http_status=429, reason="full"),
                bad("failed", 4.0, 4.1, http_status=500, reason="http_500"),
                bad("cut_off", 5.0, 10.0, reason="end_of_run"),
            ]
        )
    )["total"]
    assert (total["n"], total["ok"], total["refused"], total["failed"], total["cut_off"]) == (6, 3, 1, 1, 1)
    assert total["attainment"] == pytest.approx(2 / 6)
    assert total["goodput_req_s"] == pytest.approx(2 / 10)
    assert total["goodput_tok_s"] == pytest.approx(4 / 10)
    assert total["offered_req_s"] == pytest.approx(1.0)
    assert (total["accepted"], total["missed"]) == (4, 2)
    assert total["reasons"] == {"end_of_run": 1, "full": 1, "http_500": 1}


def test_what_counts_as_accepted():
    """A 200 that broke, a time-out and a cut-off were taken on; a refusal, an HTTP error and no connection were not."""
    rows = [
        bad("failed", 0.0, 1.0, http_status=200, reason="dropped"),
        bad("failed", 0.0, 1.0, reason="timeout"),
        bad("cut_off", 0.0, 1.0, reason="end_of_run"),
        bad("failed", 0.0, 1.0, http_status=400, reason="never_fits"),
        bad("failed", 0.0, 1.0, reason="connection:ConnectionRefusedError"),
        bad("refused", 0.0, 1.0, http_status=503, reason="draining"),
    ]
    assert summarise(frame(rows))["total"]["accepted"] == 3


def test_percentiles_are_nearest_rank_over_what_ended_well():
    """TTFT 1..10 s: P50 5, P90 9, P99 10; over all 20 offered, half of them refused, P50 is 10 and P90 infinite."""
    rows = [ok(0.0, float(i)) for i in range(1, 11)] + [bad("refused", 0.0, 0.1)] * 10
    total = summarise(frame(rows))["total"]
    assert [total["ttft"][key] for key in ("n", "p50_s", "p90_s", "p99_s")] == [10, 5.0, 9.0, 10.0]
    assert (total["ttft_all"]["p50_s"], total["ttft_all"]["p90_s"]) == (10.0, None)
    assert total["tpot"]["n"] == 0


def test_gaps_between_tokens_are_pooled():
    """A chunk of two tokens gives a gap of 0; n counts gaps, arrivals - 1 for each request."""
    total = summarise(frame([ok(0.0, 1.0, 1.0, 1.5), ok(0.0, 2.0, 2.25), ok(0.0, 3.0)]))["total"]
    assert total["tbt"]["n"] == 3
    assert (total["tbt"]["p50_s"], total["tbt"]["max_s"]) == (0.25, 0.5)


def test_the_view_from_the_send_stands_beside():
    """Sent 7 s late, first token 50 ms after: attained from the send, not from the schedule."""
    total = summarise(frame([ok(0.0, 7.05, sent=7.0, ttft_target_s=0.5, attained=False)]))["total"]
    assert (total["attainment"], total["attainment_from_send"]) == (0.0, 1.0)
    assert total["service_ttft"]["p50_s"] == pytest.approx(0.05)


def test_classes_are_summarised_apart():
    """Rows without a class belong to `default`; goodput of the parts adds up."""
    rows = [ok(0.0, 1.0, slo_class="chat"), ok(0.0, 2.0, slo_class="doc", attained=False), ok(0.0, 4.0)]
    summary = summarise(frame(rows))
    assert list(summary["classes"]) == ["chat", "default", "doc"]
    assert [part["attained"] for part in summary["classes"].values()] == [1, 1, 0]
    assert sum(p["goodput_req_s"] for p in summary["classes"].values()) == summary["total"]["goodput_req_s"]


def test_an_empty_run_has_no_numbers():
    """Nulls, not zeros and not a crash; the summary is valid JSON."""
    summary = summarise(frame([]))
    assert summary["total"]["n"] == 0
    assert summary["total"]["attainment"] is None
    json.dumps(summary, allow_nan=False)


def test_the_table_of_a_killed_run(tmp_path):
    """No honesty of the client yet, but what finished is counted."""
    meta = {"state": "running", "trace": {"requests": 9}}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(Run(path=tmp_path, meta=meta, frame=frame([ok(0.0, 1.0)]))))
    assert "1 of 9 requests have an outcome" in " ".join(console.export_text().split())


def test_the_table_says_what_it_counts(tmp_path):
    """n, percentile method, the client's lateness, what to mistrust, why the run is invalid."""
    spread = {"n": 1, "p50_ms": 0.1, "p99_ms": 70.0, "max_ms": 70.0}
    meta = {
        "label": "x", "load": {"max_in_flight": 4, "loop": "open"}, "invalid_reasons": ["client late"],
        "client": {"lateness": spread, "loop_lag": spread, "cpu_s": 1.0, "cpu_wait_s": 0.25}, "notes": ["random ids"],
    }  # fmt: skip
    rows = [ok(0.0, 7.05, sent=7.0, ttft_target_s=0.5, attained=False)]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(Run(path=tmp_path, meta=meta, frame=frame(rows))))
    text = " ".join(console.export_text().split())
    for part in (
        "nearest rank over the 1 requests", "0.0 %", "would read 100.0 %", "INVALID: client late", "random ids",
        "0.1 / 70.0 / 70.0 ms", "from the send, s │ 0.050 / 0.050 / 0.050",
    ):  # fmt: skip
        assert part in text


def test_queue_and_compute_where_the_server_tells():
    """Sent at 0.1, first token at 1.0, queue 0.4: compute 0.5; a row of the table only when some answer told."""
    rows = frame([ok(0.0, 1.0, 1.1, sent=0.1, queue_s=0.4), ok(1.0, 2.0, 2.1)])
    total = summarise(rows)["total"]
    assert (total["queue"]["n"], total["queue"]["p50_s"]) == (1, 0.4)
    assert (total["compute"]["n"], total["compute"]["p50_s"]) == (1, pytest.approx(0.5))
    console = Console(width=160, file=io.StringIO())
    console.print(table(Run(path=Path("r"), meta={}, frame=rows)))
    shown = console.file.getvalue()
    assert "queue P50 / P90 / P99, s" in shown
    assert "0.400 / 0.400 / 0.400" in shown
    console = Console(width=160, file=io.StringIO())
    console.print(table(Run(path=Path("r"), meta={}, frame=frame([ok(1.0, 2.0, 2.1)]))))
    assert "queue" not in console.file.getvalue()


def test_intervals_of_one_run():
    """3 of 4 attained: Wilson 0.301 to 0.954. 400 TTFTs of 1 to 400 ms: P99 396, interval of order statistics; none
    below 368 requests, and none for pooled gaps.
    """
    few = summarise(frame([ok(0.0, 1.0)] * 3 + [bad("refused", 0.0, 0.1)]))["total"]
    assert few["attainment_interval"] == pytest.approx([0.3006, 0.9544], abs=1e-4)
    assert few["ttft"]["p99_interval_s"] is None
    many = summarise(frame([ok(0.0, (i + 1) / 1000) for i in range(400)]))["total"]
    assert many["ttft"]["p99_s"] == 0.396
    low, high = (round(bound * 1000) for bound in many["ttft"]["p99_interval_s"])
    assert (low, high) == interval_ranks(400, 0.99)
    assert "p99_interval_s" not in many["tbt"]
    console = Console(width=160, file=io.StringIO())
    console.print(table(Run(path=Path("r"), meta={}, frame=frame([ok(0.0, 1.0)] * 3 + [bad("refused", 0.0, 0.1)]))))
    assert "30.1 to 95.4 %" in console.file.getvalue()
