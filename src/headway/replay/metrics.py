"""The metrics that `headway compare` and its gates know, by name.

    p<percent>_<column>[_adjusted]   percentile of a duration: p50_ttft, p99_tpot, p99.9_e2e, p99_ttft_adjusted
    attainment, refused, failed      shares of ALL offered requests (failed includes cut off)
    goodput, token_goodput           requests and output tokens a second that met every target

A percentile covers the requests with status `ok` that have the value. The `_adjusted` one counts every other request
as +inf, so that a fast refusal never makes a latency look better.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from headway.errors import InputError

Floats = NDArray[np.float64]

#: Duration name -> expression over `replay.record.SCHEMA`, in seconds, and what it is.
COLUMNS: dict[str, tuple[pl.Expr, str]] = {
    "ttft": (pl.col("ttft_s"), "first token - scheduled arrival"),
    "service_ttft": (pl.col("service_ttft_s"), "first token - sent: blind to a late client"),
    "tpot": (pl.col("tpot_s"), "(last - first token) / (tokens - 1), requests of two tokens or more"),
    "tbt_max": (pl.col("tbt_max_s"), "widest gap between two tokens of a request"),
    "e2e": (pl.col("e2e_s"), "last token - scheduled arrival"),
    "queue": (pl.col("queue_s"), "queue time told by the server"),
    "compute": (
        pl.col("service_ttft_s") - pl.col("queue_s"),
        "service TTFT - queue time: prefill compute and HTTP",
    ),
}
SHARES = {
    "attainment": (pl.col("attained").fill_null(False), "share of offered requests that met every target"),
    "refused": (pl.col("status") == "refused", "share of offered requests that were refused"),
    "failed": (pl.col("status").is_in(["failed", "cut_off"]), "share of offered requests failed or cut off"),
}
RATES = {
    "goodput": (pl.lit(1.0), "requests/s that met every target"),
    "token_goodput": (
        pl.col("generated_tokens").fill_null(0),
        "output tokens/s of requests that met every target",
    ),
}
#: The pair that decides the verdict: neither may be bought with the other.
PRIMARY = ("p99_ttft", "p99_tpot")
#: What `compare` prints when it is not asked for anything else; queue and compute only where the server tells.
DEFAULT = (
    *PRIMARY, "attainment", "goodput", "refused", "failed", "p50_ttft", "p90_ttft", "p50_tpot", "p90_tpot",
    "p99_tbt_max", "p99_e2e", "p50_queue", "p99_queue", "p50_compute", "p99_compute",
)  # fmt: skip

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)_([a-z0-9_]+?)(_adjusted)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a run. `quantile` is set for percentiles only."""

    name: str
    kind: Literal["percentile", "share", "rate"]
    column: str
    quantile: float | None = None
    adjusted: bool = False

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller number is the better one."""
        return self.kind == "percentile" or self.column in ("refused", "failed")

    @property
    def unit(self) -> str:
        """The unit of the value: s, share (0 to 1), req/s or tok/s."""
        if self.kind == "rate":
            return "tok/s" if self.column == "token_goodput" else "req/s"
        return "s" if self.kind == "percentile" else "share"

    @property
    def meaning(self) -> str:
        """What is measured, in words."""
        table = {"percentile": COLUMNS, "share": SHARES, "rate": RATES}[self.kind]
        words = table[self.column][1]
        return words + ("; unserved = +inf" if self.adjusted else "")


def known() -> str:
    """Return the names of all metrics, for help texts and errors."""
    columns = "|".join(COLUMNS)
    return f"p<percent>_({columns})[_adjusted], {', '.join([*SHARES, *RATES])}"


def parse(name: str) -> Metric:
    """Return the metric called `name`; `InputError` listing the known ones."""
    if name in SHARES:
        return Metric(name=name, kind="share", column=name)
    if name in RATES:
        return Metric(name=name, kind="rate", column=name)
    found = _PERCENTILE.fullmatch(name)
    if found and found[2] in COLUMNS and 0 < float(found[1]) < 100:
        return Metric(
            name=name,
            kind="percentile",
            column=found[2],
            # Through a decimal string, so that p99.9 is 0.999 and not 0.9990000000000001.
            quantile=round(float(found[1]) / 100.0, 12),
            adjusted=bool(found[3]),
        )
    raise InputError(f"metric {name!r}: expected one of {known()}")


def values(metric: Metric, frame: pl.DataFrame) -> Floats:
    """Return one float a row of `frame`.

    Percentiles: seconds, NaN for a request without the value or not `ok` (the latter +inf when adjusted).
    Shares: 0 or 1. Rates: what the request adds to the numerator.
    """
    if metric.kind == "percentile":
        column = frame.select(COLUMNS[metric.column][0].cast(pl.Float64).fill_null(float("nan")))
        result = column.to_series().to_numpy().copy()
        result[(frame["status"] != "ok").to_numpy()] = np.inf if metric.adjusted else np.nan
        return result
    if metric.kind == "share":
        return frame.select(SHARES[metric.column][0].cast(pl.Float64)).to_series().to_numpy()
    each = frame.select((RATES[metric.column][0] * pl.col("attained").fill_null(False)).cast(pl.Float64).alias("x"))
    return each["x"].to_numpy()
