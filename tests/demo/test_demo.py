"""The demo's parts that need no server: what is offered, what is started, the order of runs, the table."""

from __future__ import annotations

import io
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway.cli.main import build
from headway.config import load
from headway.demo.capacity import served_rate
from headway.demo.duel import Cell, Spread, expert, order, spread
from headway.demo.systems import headway, no_op, stock, tuned, write_config
from headway.demo.table import meaning, table
from headway.demo.workload import MIXED, SINGLE, WEIGHTS, Workload, from_file
from headway.errors import InputError
from headway.replay.record import SCHEMA
from headway.replay.store import Run
from headway.replay.targets import Targets


def run_of(*rows: dict, valid: bool = True) -> Run:
    """Return a run with these requests; what a row does not say is null."""
    empty = dict.fromkeys(SCHEMA)
    frame = pl.DataFrame([{**empty, **row} for row in rows], schema=SCHEMA)
    return Run(path=Path("runs/x"), meta={"valid": valid}, frame=frame)


def served(index: int, *, end: float, attained: bool) -> dict:
    """Return a request that ended well."""
    return {
        "index": index,
        "slo_class": "chat",
        "status": "ok",
        "http_status": 200,
        "scheduled_s": float(index),
        "first_token_s": end - 0.5,
        "end_s": end,
        "ttft_s": end - 0.5 - index,
        "tpot_s": 0.1,
        "generated_tokens": 6,
        "attained": attained,
        "token_s": [end - 0.5 + 0.1 * i for i in range(6)],
    }


def refused(index: int) -> dict:
    """Return a request that was refused."""
    return {
        "index": index,
        "slo_class": "chat",
        "status": "refused",
        "http_status": 429,
        "scheduled_s": float(index),
        "end_s": index + 0.1,
        "attained": False,
    }


def test_every_run_comes_once_and_the_first_system_changes() -> None:
    """Interleaved: the system changes fastest, and another one starts each time."""
    systems = [stock(), tuned(64, 300), no_op(MIXED)]
    runs = list(order(systems, (0.7, 2.0), (1, 2)))
    assert len({(s.name, load, seed) for s, load, seed in runs}) == 12
    assert [s.name for s, _, _ in runs[::3]] == ["stock", "tuned-64-300", "no-op", "stock"]


def test_the_classes_of_headway_are_a_valid_configuration(tmp_path: Path) -> None:
    """What the demo writes is read back with the same targets and weights."""
    path = write_config(headway(MIXED, WEIGHTS, eps=0.1), tmp_path)
    assert path is not None
    config = load(path)
    assert config.eps == 0.1
    assert config.classes["chat"].ttft_ms == 1000
    assert config.classes["document"].tpot_ms == 150
    assert config.classes["document"].weight == WEIGHTS["document"]
    assert write_config(stock(), tmp_path) is None
    nothing = write_config(no_op(MIXED), tmp_path)
    assert nothing is not None
    assert load(nothing).policy == "fcfs"
    # The client names classes, so a no-op without them would refuse every request for its header.
    assert set(MIXED) <= set(load(nothing).classes)


def test_an_expert_sizes_the_budget_for_the_pace_and_the_queue_for_the_target() -> None:
    """30 ms + 1 ms a token under 0.9 x 150 ms: 105 tokens, so 96; 1 s at 96 tokens in 126 ms: 761 tokens, so 750."""
    metrics = "headway_step_cost_base_seconds 0.03\nheadway_step_cost_prefill_token_seconds 0.001\n"
    system = expert(metrics, Workload(targets=MIXED))
    assert system.extra[:4] == ("--max-num-batched-tokens", "96", "--max-num-queued-tokens", "750")


def test_the_served_rate_is_all_that_finished_over_the_whole_run() -> None:
    """20 requests done 40 s after the first was due: 0.5 a second; refused ones do not count."""
    rows = [served(i, end=2.0 * i + 2, attained=False) for i in range(20)]
    assert served_rate(run_of(*rows, refused(20))) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least 20"):
        served_rate(run_of(*rows[:5]))


def test_generated_traffic_is_the_same_for_every_system() -> None:
    """Same rate and seed, same requests; another seed, others."""
    workload = Workload(kind="single", targets=SINGLE, weights={})
    one, two = (workload.offered(rate=2.0, seed=3, duration_s=20.0) for _ in range(2))
    assert one.frame.equals(two.frame)
    assert not one.frame.equals(workload.offered(rate=2.0, seed=4, duration_s=20.0).frame)


def trace_file(folder: Path, name: str | None = None) -> Path:
    """Write a trace of 30 requests, one a second."""
    path = folder / "trace.jsonl"
    extra = f', "slo_class": "{name}"' if name else ""
    rows = [f'{{"arrival_s": {i}.0, "input_tokens": {100 + i}, "output_tokens": 200{extra}}}' for i in range(30)]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_real_trace_is_cut_to_what_the_model_holds(tmp_path: Path) -> None:
    """Lengths are scaled and cut, the rate is the one asked for, and a rate that needs more rows is an error."""
    options = {"max_input": 64, "max_output": 50, "input_scale": 0.5, "output_scale": 0.5}
    workload = from_file(trace_file(tmp_path), SINGLE, **options)
    offered = workload.offered(rate=4.0, seed=1, n=9)
    assert len(offered) == 9
    assert offered.span_s == pytest.approx(2.0)
    assert offered.frame["input_tokens"].max() <= 64
    assert offered.frame["output_tokens"].max() == 50
    with pytest.raises(InputError, match="30 requests: expected at least 80"):
        workload.offered(rate=8.0, seed=1, duration_s=10.0)


def test_classes_without_targets_are_an_error(tmp_path: Path) -> None:
    """A request that no target covers would be scored as attained whatever happens."""
    options = {"max_input": 64, "max_output": 50, "input_scale": 1.0, "output_scale": 1.0}
    targets = {"chat": Targets(ttft_s=1.0), "document": Targets(ttft_s=6.0)}
    with pytest.raises(InputError, match="class default"):
        from_file(trace_file(tmp_path), targets, **options)
    assert from_file(trace_file(tmp_path, "chat"), targets, **options).targets == targets


def test_the_table_counts_refused_requests_as_not_attained() -> None:
    """Two of four attained, one refused, one missed of three accepted; the sentences say so."""
    systems = [stock(), headway({"chat": Targets(ttft_s=1.0)})]
    good = run_of(
        served(0, end=1.0, attained=True),
        served(1, end=2.0, attained=True),
        served(2, end=9.0, attained=False),
        refused(3),
    )
    bad = run_of(*(served(i, end=20.0, attained=False) for i in range(4)), valid=False)
    cells = [
        Cell(system=systems[0], load=2.0, rate=2.0, seed=1, run=bad),
        Cell(system=systems[1], load=2.0, rate=2.0, seed=1, run=good),
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(cells, systems, 1.0))
    text = console.export_text()
    row = next(line for line in text.splitlines() if line.strip().startswith("Headway"))
    assert row.split()[:5] == ["Headway", "4", "50%", "25%", "33%"]
    words = meaning(cells, systems)
    assert "Headway met every target for 50% of all requests (vLLM stock 0%), because it refused at once" in words
    behind = [
        Cell(system=systems[0], load=2.0, rate=2.0, seed=1, run=good),
        Cell(system=systems[1], load=2.0, rate=2.0, seed=1, run=bad),
    ]
    assert "Headway met every target for 0% of all requests (vLLM stock 50%); it refused at once" in meaning(
        behind, systems
    )
    assert "1 of 2 runs are marked invalid" in words
    assert spread(cells, systems[1], 2.0, lambda s: s["total"]["attainment"]) == Spread(median=0.5, low=0.5, high=0.5)
    assert spread(cells, systems[1], 1.0, lambda s: s["total"]["attainment"]) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quick", "--loads", "3"], "--loads 3 with --quick"),
        (["--quick", "--duration", "45"], "--duration 45.0 with --quick"),
        (["--input-scale", "0.5"], "--input-scale 0.5 without --trace"),
        (["--max-output", "96"], "--max-output 96 without --trace"),
        (["--trace", "x.csv", "--kind", "single"], "--kind single with --trace"),
    ],
)
def test_options_that_would_be_void_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any server is started, also when the value is that of the default."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build(["demo", *words]), ["demo", *words])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())
