"""`headway replay --self-test`: what this client adds to the truth on this machine.

Three replays against the null server in a process of its own:

- accuracy: 200 streams at a time; TTFT, TPOT, TBT and E2E of every request against the script, and against the
  moments at which the server really wrote (the difference between the two is the server's lateness, not the client's);
- schedule: 1,000 requests/s for a few seconds; how late each was sent;
- omission: 4 slots, twice the load they can serve, client capped at 4 in flight. Scored from the send everything looks
  well; from the schedule about 7 % attain, which plain arithmetic gives beforehand.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from rich.table import Table

from headway.errors import EngineError
from headway.replay.client import replay
from headway.replay.nullserver import Script
from headway.replay.store import Run
from headway.replay.targets import DEFAULT_CLASS, Targets
from headway.trace.record import SCHEMA, ReadReport, Trace

#: Largest error at P99 and largest lateness at P99 with which the test passes, seconds.
ERROR_LIMIT_S, LATENESS_LIMIT_S = 0.002, 0.005

_ACCURACY = Script(ttft_s=0.5, tpot_s=0.05)
_SCHEDULE = Script(ttft_s=0.02, tpot_s=0.01)
#: PEERS: 50 ms + 31 x 10 ms a request on 4 slots, 22 req/s offered, TTFT target 500 ms; played four times as fast.
_SPEED = 4
_OMISSION = Script(ttft_s=0.05 / _SPEED, tpot_s=0.01 / _SPEED, slots=4)
_OMISSION_RATE, _OMISSION_TOKENS, _OMISSION_N = 22.0 * _SPEED, 32, 170
_OMISSION_TARGET_S = 0.5 / _SPEED


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute errors of one quantity over n values, seconds, nearest rank."""

    n: int
    p50_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, errors: np.ndarray) -> Errors:
        """Return the percentiles of the absolute values."""
        ordered = np.sort(np.abs(errors))
        rank = lambda q: float(ordered[max(0, int(np.ceil(q * len(ordered) - 1e-9)) - 1)])  # noqa: E731
        return cls(n=len(ordered), p50_s=rank(0.5), p99_s=rank(0.99), max_s=rank(1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Outcome of the self-test; times in seconds."""

    to_script: dict[str, Errors]  # ttft, tpot, tbt, e2e against the script
    to_writes: dict[str, Errors]  # the same against what the server really wrote: the client's own part
    streams: int  # most streams open at the same time
    lateness: dict  # of the 1,000 req/s schedule, as in run.json
    cpu_s_per_1000_tokens: float
    expected_attained: int  # of the omission case, by arithmetic
    attained: int
    attained_from_send: int
    offered: int

    @property
    def passed(self) -> bool:
        """Whether every error at P99 and the lateness stay under their limits and the omission case comes out right."""
        return (
            all(errors.p99_s <= ERROR_LIMIT_S for errors in self.to_script.values())
            and self.lateness["p99_ms"] <= LATENESS_LIMIT_S * 1e3
            and self.omission_right
        )

    @property
    def omission_right(self) -> bool:
        """Whether attainment from the schedule is the expected one, give or take one request in fifty."""
        return abs(self.attained - self.expected_attained) <= self.offered / 50

    def as_dict(self) -> dict:
        """Return the report with its serialised names."""
        plain = lambda part: {  # noqa: E731
            name: {"n": e.n, "p50_s": e.p50_s, "p99_s": e.p99_s, "max_s": e.max_s} for name, e in part.items()
        }
        return {
            "passed": self.passed,
            "streams": self.streams,
            "error_to_script": plain(self.to_script),
            "error_to_server_writes": plain(self.to_writes),
            "error_limit_s": ERROR_LIMIT_S,
            "lateness": self.lateness,
            "lateness_limit_s": LATENESS_LIMIT_S,
            "cpu_s_per_1000_tokens": self.cpu_s_per_1000_tokens,
            "omission": {
                "offered": self.offered,
                "expected_attained": self.expected_attained,
                "attained": self.attained,
                "attained_from_send": self.attained_from_send,
            },
        }

    def table(self) -> Table:
        """Return the report as a Rich table."""
        view = Table(
            title="Self-test of the replay client: " + ("passed" if self.passed else "FAILED"),
            caption=self._caption(),
            caption_justify="left",
        )
        view.add_column("")
        for name in ("n", "P50 ms", "P99 ms", "max ms", "limit at P99"):
            view.add_column(name, justify="right")
        limit = f"{ERROR_LIMIT_S * 1e3:g} ms"
        for part, title, bound in ((self.to_script, "to script", limit), (self.to_writes, "to writes", "")):
            for name, e in part.items():
                cells = (f"{value * 1e3:.2f}" for value in (e.p50_s, e.p99_s, e.max_s))
                view.add_row(f"{name.upper()} error {title}", str(e.n), *cells, bound)
        late = self.lateness
        cells = (f"{late[key]:.2f}" for key in ("p50_ms", "p99_ms", "max_ms"))
        view.add_row("sent late, 1,000 req/s", str(late["n"]), *cells, f"{LATENESS_LIMIT_S * 1e3:g} ms")
        return view

    def _caption(self) -> str:
        share = lambda count: f"{count / self.offered * 100:.1f} %"  # noqa: E731
        return (
            f"Absolute errors with up to {self.streams} streams open, nearest rank. `to writes` is the client's own "
            f"part; the rest of `to script` is the server waking late.\n"
            f"{self.cpu_s_per_1000_tokens * 1e3:.1f} ms of client CPU for 1,000 tokens.\n"
            f"Omission case (4 slots, twice their load, client cap 4): {share(self.attained)} attained from the "
            f"schedule, {share(self.expected_attained)} by arithmetic; from the send it would read "
            f"{share(self.attained_from_send)}."
        )


def self_test() -> Report:
    """Run the three replays (about 20 s) and return what they show; raises `EngineError` when no server starts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run, log = measure(_ACCURACY, regular_trace(n=600, rate=100.0, output_tokens=31), folder / "accuracy")
        to_script, to_writes = errors(run, log, _ACCURACY)
        schedule, _ = measure(_SCHEDULE, regular_trace(n=4000, rate=1000.0, output_tokens=1), folder / "schedule")
        omission = regular_trace(n=_OMISSION_N, rate=_OMISSION_RATE, output_tokens=_OMISSION_TOKENS)
        targets = {DEFAULT_CLASS: Targets(ttft_s=_OMISSION_TARGET_S)}
        capped, _ = measure(_OMISSION, omission, folder / "omission", targets=targets, max_in_flight=4)
        from_send = capped.frame.filter(pl.col("service_ttft_s") <= _OMISSION_TARGET_S).height
        return Report(
            to_script=to_script,
            to_writes=to_writes,
            streams=most_open(run.frame),
            lateness=schedule.meta["client"]["lateness"],
            cpu_s_per_1000_tokens=run.meta["client"]["cpu_s_per_1000_tokens"],
            expected_attained=expected_attained(
                n=_OMISSION_N,
                rate=_OMISSION_RATE,
                slots=4,
                ttft_s=_OMISSION.ttft_s,
                service_s=_OMISSION.ttft_s + (_OMISSION_TOKENS - 1) * _OMISSION.tpot_s,
                target_s=_OMISSION_TARGET_S,
            ),
            attained=int(capped.frame["attained"].sum()),
            attained_from_send=from_send,
            offered=_OMISSION_N,
        )


def measure(script: Script, trace: Trace, folder: Path, **options: object) -> tuple[Run, dict[int, dict]]:
    """Replay `trace` against a null server of its own; return the run and the server's log by request index."""
    options.setdefault("targets", {})
    with null_server(script) as url:
        run = replay(trace, url=url, run_dir=folder, prompts="tokens", send_slo_headers=False, **options)  # type: ignore[arg-type]
        with urllib.request.urlopen(url + "/log") as answer:
            lines = [json.loads(line) for line in answer.read().splitlines()]
    prefix = run.meta["run_id"] + "-"
    return run, {
        int(line["request_id"].removeprefix(prefix)): line for line in lines if line["request_id"].startswith(prefix)
    }


@contextlib.contextmanager
def null_server(script: Script) -> Iterator[str]:
    """Run the null server in a process of its own; yields its address."""
    command = [sys.executable, "-m", "headway.replay.nullserver", *script.arguments()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        words = process.stdout.readline().split()  # type: ignore[union-attr]
        if len(words) != 2:
            raise EngineError("the null server did not start")
        try:
            yield f"http://127.0.0.1:{int(words[1])}"
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(timeout=10)


def errors(run: Run, log: dict[int, dict], script: Script) -> tuple[dict[str, Errors], dict[str, Errors]]:
    """Return the errors of ttft, tpot, tbt and e2e (from the send) against the script and the server's writes."""
    zero = run.meta["clock"]["zero_s"]
    seen: dict[str, tuple[list, list]] = {name: ([], []) for name in ("ttft", "tpot", "tbt", "e2e")}
    for row in run.frame.filter(pl.col("status") == "ok").iter_rows(named=True):
        times = np.asarray(row["token_s"])
        wrote = np.asarray(log[row["index"]]["written"]) - zero
        last = script.ttft_s + (len(times) - 1) * script.tpot_s
        facts = {
            "ttft": (times[0] - row["sent_s"], script.ttft_s, wrote[0] - row["sent_s"]),
            "e2e": (times[-1] - row["sent_s"], last, wrote[-1] - row["sent_s"]),
        }
        if len(times) > 1:
            pace = lambda t: (t[-1] - t[0]) / (len(t) - 1)  # noqa: E731
            facts["tpot"] = (pace(times), script.tpot_s, pace(wrote))
            facts["tbt"] = (np.diff(times), script.tpot_s, np.diff(wrote))
        for name, (measured, scripted, real) in facts.items():
            seen[name][0].append(np.atleast_1d(measured - scripted))
            seen[name][1].append(np.atleast_1d(measured - real))
    to_script, to_writes = (
        {name: Errors.of(np.concatenate(parts[i])) for name, parts in seen.items() if parts[i]} for i in (0, 1)
    )
    return to_script, to_writes


def regular_trace(*, n: int, rate: float, output_tokens: int, input_tokens: int = 32) -> Trace:
    """Return `n` equal requests, one every 1 / `rate` seconds."""
    frame = pl.DataFrame(
        {
            "arrival_s": [i / rate for i in range(n)],
            "input_tokens": [input_tokens] * n,
            "output_tokens": [output_tokens] * n,
        },
        schema_overrides=SCHEMA,
    )
    missing = [pl.lit(None, dtype=dtype).alias(name) for name, dtype in SCHEMA.items() if name not in frame.columns]
    return Trace(
        frame=frame.with_columns(missing).select(list(SCHEMA)),
        format="regular",
        source=f"regular-n={n}-rate={rate:g}",
        sha256="",
        report=ReadReport(read=n, kept=n),
    )


def expected_attained(*, n: int, rate: float, slots: int, ttft_s: float, service_s: float, target_s: float) -> int:
    """Return how many of `n` regular arrivals on `slots` equal servers get their first token within the target."""
    free = [0.0] * slots
    attained = 0
    for i in range(n):
        due = i / rate
        start = max(due, heapq.heappop(free))
        heapq.heappush(free, start + service_s)
        attained += start + ttft_s - due <= target_s
    return attained


def most_open(frame: pl.DataFrame) -> int:
    """Return the largest number of requests open at the same time."""
    moments = [(at, 1) for at in frame["sent_s"].drop_nulls()] + [(at, -1) for at in frame["end_s"].drop_nulls()]
    count = most = 0
    for _, step in sorted(moments):
        count += step
        most = max(most, count)
    return most
