"""The summary of a run: one dictionary, one table. All numbers follow docs/replay.md.

Percentiles are nearest rank. Latency percentiles are over requests with status `ok`; `*_all` takes every offered
request, where one without an answer counts as infinite (null), so a fast refusal never improves a percentile.

Intervals are at 95 %: order statistics for percentiles, Wilson for attainment (docs/compare.md). Both take requests as
independent, which neighbours in one queue are not: they are the least that the noise of one run can be, and two runs
are compared by `headway compare`, which resamples blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import polars as pl
from rich.console import Group
from rich.table import Table
from rich.text import Text

from headway.printable import plain, printable
from headway.replay.failures import from_frame
from headway.replay.failures import in_words as failures_in_words
from headway.replay.server_metrics import in_words
from headway.replay.stats import interval_ranks, min_n, wilson
from headway.replay.store import Run
from headway.replay.targets import DEFAULT_CLASS

METHOD = "nearest rank"
_POINTS = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
#: Outcomes by which the server took a request on, so that breaking a target is a miss.
_ACCEPTED = (
    pl.col("status").is_in(["ok", "cut_off"])
    | ((pl.col("status") == "failed") & ((pl.col("http_status") == 200) | (pl.col("reason") == "timeout")))
).fill_null(False)


def summarise(frame: pl.DataFrame) -> dict:
    """Return the summary of a table of requests (`record.SCHEMA`): `total`, `classes` by name, `percentile_method`.

    Each part holds: n, ok, refused, failed, cut_off (counts); attained, attainment (share of ALL n); goodput_req_s and
    goodput_tok_s (attained requests and their tokens per second from the first scheduled arrival to the last end);
    accepted, missed, miss_share (accepted = ok, cut off, or failed after a 200 or by time-out); ttft, tpot, tbt, e2e,
    service_ttft, queue (told by the server), compute (service_ttft - queue: prefill and HTTP) (each n, p50_s, p90_s,
    p99_s, max_s, and `p50_interval_s` to `p99_interval_s`, None where n is too small; tbt has none, because the gaps
    of one answer are no sample of requests); attainment_interval; ttft_all (over all n, null = infinite);
    attainment_from_send (the service-time view, blind to a late client); offered_req_s; refusal and failure
    reasons with counts.
    """
    span = _span_s(frame)
    named = frame.with_columns(pl.col("slo_class").fill_null(DEFAULT_CLASS))
    classes = named["slo_class"].unique().sort().to_list()
    return {
        "percentile_method": METHOD,
        "span_s": span,
        "total": _part(frame, span),
        "classes": {name: _part(named.filter(pl.col("slo_class") == name), span) for name in classes},
    }


def _part(frame: pl.DataFrame, span_s: float) -> dict:
    n = frame.height
    counts = dict(frame["status"].value_counts().iter_rows())
    ok = frame.filter(pl.col("status") == "ok")
    attained = int(frame["attained"].sum())
    accepted = frame.filter(_ACCEPTED)
    missed = accepted.height - int(accepted["attained"].sum())
    good_tokens = int(frame.filter(pl.col("attained"))["generated_tokens"].sum())
    gaps = (
        ok["token_s"].list.diff(null_behavior="drop").explode().drop_nulls()
        if ok.height
        else pl.Series([], dtype=pl.Float64)
    )
    ttft_all = np.concatenate([ok["ttft_s"].to_numpy(), np.full(n - ok.height, np.inf)])
    arrivals = frame["scheduled_s"]
    offered_span = float(arrivals.max() - arrivals.min()) if n > 1 else 0.0
    return {
        "n": n,
        **{status: counts.get(status, 0) for status in ("ok", "refused", "failed", "cut_off")},
        "attained": attained,
        "attainment": attained / n if n else None,
        "attainment_interval": list(wilson(attained, n)) if n else None,
        "attainment_from_send": _from_send(frame) / n if n else None,
        "goodput_req_s": attained / span_s if span_s else None,
        "goodput_tok_s": good_tokens / span_s if span_s else None,
        "offered_req_s": (n - 1) / offered_span if offered_span else None,
        "accepted": accepted.height,
        "missed": missed,
        "miss_share": missed / accepted.height if accepted.height else None,
        "ttft": _points(ok["ttft_s"].to_numpy()),
        "tpot": _points(ok["tpot_s"].drop_nulls().to_numpy()),
        "tbt": _points(gaps.to_numpy(), intervals=False),
        "e2e": _points(ok["e2e_s"].to_numpy()),
        "service_ttft": _points(ok["service_ttft_s"].drop_nulls().to_numpy()),
        "queue": _points(ok["queue_s"].drop_nulls().to_numpy()),
        "compute": _points((ok["service_ttft_s"] - ok["queue_s"]).drop_nulls().to_numpy()),
        "ttft_all": _points(ttft_all),
        "targets_s": {
            key: frame[f"{key}_target_s"].drop_nulls().unique().sort().to_list() for key in ("ttft", "tpot", "tbt")
        },
        "reasons": dict(
            frame.filter(pl.col("reason").is_not_null())["reason"].value_counts().sort("reason").iter_rows()
        ),
    }


def _from_send(frame: pl.DataFrame) -> int:
    within = lambda value, target: (pl.col(value) <= pl.col(target)).fill_null(True)  # noqa: E731
    met = (
        (pl.col("status") == "ok")
        & within("service_ttft_s", "ttft_target_s")
        & within("tpot_s", "tpot_target_s")
        & within("tbt_max_s", "tbt_target_s")
    )
    return frame.filter(met).height


def _span_s(frame: pl.DataFrame) -> float:
    if not frame.height:
        return 0.0
    return float((frame["end_s"].max() or 0.0) - frame["scheduled_s"].min())


def _points(values: np.ndarray, *, intervals: bool = True) -> dict[str, float | int | list[float | None] | None]:
    ordered = np.sort(values)
    n = len(ordered)
    at = lambda q: _finite(ordered[max(0, math.ceil(q * n - 1e-9) - 1)]) if n else None  # noqa: E731
    found = {"n": n, **{f"{name}_s": at(q) for name, q in _POINTS.items()}, "max_s": at(1.0)}
    if intervals:
        for name, q in _POINTS.items():
            ranks = interval_ranks(n, q) if n else None
            found[f"{name}_interval_s"] = None if ranks is None else [_finite(ordered[rank - 1]) for rank in ranks]
    return found


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def table(run: Run) -> Group:
    """Return the summary of a run for a Rich console: a column a class, one for all, a row a quantity; words below."""
    summary = summarise(run.frame)
    parts = dict(summary["classes"])
    if len(parts) != 1:
        parts["all"] = summary["total"]
    view = Table(title=plain(run.meta.get("label") or run.path.name))
    view.add_column("")
    for name in parts:
        view.add_column(plain(name), justify="right")
    rows: dict[str, Callable[[dict], str]] = {
        "requests": lambda part: str(part["n"]),
        "offered, req/s": lambda part: _number(part["offered_req_s"], 2),
        "attained": lambda part: _percent(part["attainment"]),
        "attained, interval": lambda part: _span(part["attainment_interval"], 100, 1, " %"),
        "goodput, req/s": lambda part: _number(part["goodput_req_s"], 2),
        "refused": lambda part: str(part["refused"]),
        "failed": lambda part: str(part["failed"]),
        "cut off": lambda part: str(part["cut_off"]),
        "missed of accepted": lambda part: f"{part['missed']} of {part['accepted']}",
        "TTFT P50 / P90 / P99, s": lambda part: _triple(part["ttft"], 1, 3),
        "  from the send, s": lambda part: _triple(part["service_ttft"], 1, 3),
        "TPOT P50 / P90 / P99, ms": lambda part: _triple(part["tpot"], 1e3, 1),
        "TBT P50 / P90 / P99, ms": lambda part: _triple(part["tbt"], 1e3, 1),
    }
    if any(part["ttft"]["p99_interval_s"] for part in parts.values()):
        rows |= {
            "TTFT P99 interval, s": lambda part: _span(part["ttft"]["p99_interval_s"], 1, 3),
            "TPOT P99 interval, ms": lambda part: _span(part["tpot"]["p99_interval_s"], 1e3, 1),
        }
    if any(part["queue"]["n"] for part in parts.values()):
        rows |= {
            "queue P50 / P90 / P99, s": lambda part: _triple(part["queue"], 1, 3),
            "compute P50 / P90 / P99, s": lambda part: _triple(part["compute"], 1, 3),
        }
    for name, cell in rows.items():
        view.add_row(name, *(cell(part) for part in parts.values()))
    # Not the table's caption, which would be as narrow as the table.
    return Group(view, Text(printable(caption(run, summary)), style="dim"))


def caption(run: Run, summary: dict) -> str:
    """Return the lines under the table: what was counted, how honest the client was, what to mistrust."""
    total, meta = summary["total"], run.meta
    lines = [
        f"Latency from the scheduled arrival; percentiles by {METHOD} over the {total['ok']} requests that ended well; "
        "attained = share of all, refused, failed and cut-off ones included.",
        "Intervals at 95 %, of this run alone, requests taken as independent: Wilson for shares, order statistics for "
        f"percentiles (a P99 takes {min_n(0.99)} requests).",
    ]
    facts = meta["failures"] if "failures" in meta else from_frame(run.frame)
    if why := failures_in_words(facts):
        lines.append(f"Failed: {why}.")
    client = meta.get("client")
    if client:
        late, lag = client["lateness"], client["loop_lag"]
        wait = client.get("cpu_wait_s")
        waited = "" if wait is None else f", {wait:.2f} s ready to run and without a CPU"
        lines.append(
            f"Client: sent late by {_ms(late['p50_ms'])} / {_ms(late['p99_ms'])} / {_ms(late['max_ms'])} ms "
            f"(P50 / P99 / max, n {late['n']}), loop lag P99 {_ms(lag['p99_ms'])} ms, "
            f"{client['cpu_s']:.2f} CPU s{waited}."
        )
    if total["queue"]["n"]:
        lines.append(
            f"Queue: told by the server for {total['queue']['n']} answers; compute = first token - sent - queue: "
            "prefill and HTTP."
        )
    if told := in_words((meta.get("server") or {}).get("metrics") or {}):
        lines.append(f"The server's own histograms over the run: {told}.")
    if (cap := meta.get("load", {}).get("max_in_flight")) is not None:
        lines.append(
            f"The client's own cap of {cap} in flight held requests back: counted from the send, as if that wait "
            f"had not been, attainment would read {_percent(total['attainment_from_send'])}; from the schedule it is "
            f"{_percent(total['attainment'])}."
        )
    if meta.get("load", {}).get("loop") == "closed":
        lines.append("Closed loop: a slow server slows its own load down, so overload does not show in full.")
    if meta.get("buffered_responses"):
        lines.append(f"{meta['buffered_responses']} answers came in one piece: their TPOT and TBT say nothing.")
    if estimated := sum(meta.get("tokens_counted_by", {}).get(how, 0) for how in ("bytes", "tokenizer")):
        lines.append(f"{estimated} answers told only their total: tokens were shared out over chunks by text length.")
    delta = meta.get("prompt_tokens_minus_asked", {})
    if delta.get("min") or delta.get("max"):
        lines.append(
            f"By the server's count prompts differ from what was asked by {delta['min']} to {delta['max']} tokens."
        )
    if meta.get("state") == "running":
        offered = meta.get("trace", {}).get("requests")
        lines.append(f"Killed, or still going on: {total['n']} of {offered} requests have an outcome.")
    if meta.get("not_offered"):
        lines.append(f"{meta['not_offered']} requests of the trace were never sent ({meta.get('state')}).")
    lines += [f"Note: {note}." for note in meta.get("notes", [])]
    lines += [f"INVALID: {reason}." for reason in meta.get("invalid_reasons", [])]
    return "\n".join(lines)


def _triple(points: dict, scale: float, digits: int) -> str:
    values = [points[f"{name}_s"] for name in _POINTS]
    return " / ".join("-" if value is None else f"{value * scale:.{digits}f}" for value in values)


def _span(bounds: list[float | None] | None, scale: float, digits: int, unit: str = "") -> str:
    """Return `low to high`; a dash where n is too small for an interval."""
    if bounds is None:
        return "-"
    low, high = ("inf" if bound is None else f"{bound * scale:.{digits}f}" for bound in bounds)
    return f"{low} to {high}{unit}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
