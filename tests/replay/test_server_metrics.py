"""Queue against compute time from the histograms of a server's /metrics, by hand."""

from __future__ import annotations

import json

import pytest
from compare_runs import arm, noisy
from compare_runs import run as made
from replay_wire import good, make_trace, serve

from headway.replay import report, verdicts
from headway.replay.client import replay_async
from headway.replay.compare import compare
from headway.replay.server_metrics import growth, in_words, parse
from headway.replay.summary import caption, summarise

QUEUE = "vllm:request_queue_time_seconds"


def page(buckets: dict[str, int], total: float, count: int, *, model: str = "m", engine: int = 0) -> str:
    """Return the lines of one queue histogram."""
    labels = f'engine="{engine}",model_name="{model}"'
    lines = [f"# HELP {QUEUE} text", f"# TYPE {QUEUE} histogram"]
    lines += [f'{QUEUE}_bucket{{{labels},le="{bound}"}} {value}' for bound, value in buckets.items()]
    return "\n".join([*lines, f"{QUEUE}_sum{{{labels}}} {total}", f"{QUEUE}_count{{{labels}}} {count}", ""])


def test_growth_is_the_run_alone():
    """4 before, 10 more: mean 0.2 s; 5 of the 10 at or under 0.3 s, 9 at or under 1 s, the last above every bound."""
    before = parse(page({"0.3": 4, "1.0": 4, "+Inf": 4}, 0.4, 4))
    after = parse(page({"0.3": 9, "1.0": 13, "+Inf": 14}, 2.4, 14))
    told = growth(before, after)
    assert told == {
        "queue": {"n": 10, "mean_s": 0.2, "p50_at_most_s": 0.3, "p90_at_most_s": 1.0, "p99_at_most_s": None}
    }
    assert in_words(told) == "queue mean 200.0 ms, P99 above its last bucket (n 10)"


def test_engines_add_up_and_other_models_stay_out():
    """Two engines of the served model are one histogram; an adapter's series is not ours."""
    text = page({"1.0": 2}, 1.0, 2) + page({"1.0": 3}, 2.0, 3, engine=1) + page({"1.0": 7}, 9.0, 7, model="other")
    found = parse(text, "m").histograms["queue"]
    assert (found.count, found.total_s, found.buckets) == (5.0, 3.0, {1.0: 5.0})


def test_preemptions_are_counted_beside_the_histograms():
    """A counter without any histogram is no timing, so it says nothing alone."""
    line = 'vllm:num_preemptions_total{engine="0",model_name="m"} '
    before, after = parse(page({}, 0, 0) + line + "3"), parse(page({}, 1.0, 2) + line + "5.0")
    assert growth(before, after)["preemptions"] == 2
    assert growth(parse(line + "3"), parse(line + "5")) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>vllm</html>",
        f'{QUEUE}_sum NaN\n{QUEUE}_count many\n{QUEUE}_bucket{{le="x"}} 1',
        f"{QUEUE}_count{{ 3",
        "vllm:",
    ],
)
def test_what_is_no_metric_tells_nothing(text):
    """Broken lines, NaN and web pages are left out without an error."""
    assert growth(parse(""), parse(text)) == {}


def test_a_server_that_was_started_anew_tells_nothing():
    """Totals that shrank belong to another life of the server."""
    assert growth(parse(page({"1.0": 9}, 9.0, 9)), parse(page({"1.0": 4}, 4.0, 4))) == {}


async def test_a_replay_keeps_what_the_server_counted(tmp_path):
    """Read before the first and after the last request; in run.json and in the words under the table."""
    pages = [page({"0.3": 1, "+Inf": 1}, 0.1, 1), page({"0.3": 3, "+Inf": 3}, 0.5, 3)]
    asked = []

    async def answer(request, writer):
        await good(request, writer)

    async with serve(answer, metrics=lambda: asked.append(1) or pages[len(asked) - 1]) as server:
        run = await replay_async(
            make_trace([{"arrival_s": 0.0}] * 2), url=server.url, targets={}, run_dir=tmp_path / "run", prompts="tokens"
        )
    assert len(asked) == 2
    assert run.meta["server"]["metrics"]["queue"]["n"] == 2
    assert run.meta["server"]["metrics"]["queue"]["mean_s"] == 0.2
    assert "queue mean 200.0 ms, P99 at most 0.3 s (n 2)" in caption(run, summarise(run.frame))


async def test_a_server_without_metrics_is_asked_once(tmp_path):
    """No /metrics, no second question, and no word about it."""

    async def answer(request, writer):
        await good(request, writer)

    async with serve(answer) as server:
        run = await replay_async(
            make_trace([{"arrival_s": 0.0}]), url=server.url, targets={}, run_dir=tmp_path / "run", prompts="tokens"
        )
    assert [request.path for request in server.requests].count("/metrics") == 1
    assert "metrics" not in run.meta["server"]


def test_a_comparison_shows_both_servers():
    """In the notes of the table, of the page and in the JSON."""
    told = {"queue": {"n": 9, "mean_s": 0.2, "p50_at_most_s": 0.3, "p90_at_most_s": 0.3, "p99_at_most_s": 0.3}}
    server = {"model": "m", "version": None, "metrics": told}
    found = compare(arm("A", made(noisy(1), server=server)), arm("B", made(noisy(2))), draws=300)
    line = "A (run), the server's own histograms: queue mean 200.0 ms"
    assert line in verdicts.markdown([found])
    assert line.replace("'", "&#x27;") in report.page([found])
    assert json.loads(json.dumps(verdicts.as_json([found])))["comparisons"][0]["server_metrics"] == {"run": told}
