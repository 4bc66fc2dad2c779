"""The replay client end to end, on loopback servers whose bytes the test scripts."""

from __future__ import annotations

import asyncio
import json

import polars as pl
import pytest
from replay_wire import DONE, END, GOOD, HEAD, chunk, good, index_of, make_trace, plain, serve, token

from headway.errors import EngineError, InputError
from headway.replay.client import replay_async
from headway.replay.record import SCHEMA
from headway.replay.store import load
from headway.replay.summary import summarise
from headway.replay.targets import Targets


async def run(trace, answer, folder, *, targets=None, probe=None, models=None, **options):
    """Replay `trace` against a scripted server; return (run, server)."""
    async with serve(answer, probe=probe, models=models) as server:
        options.setdefault("prompts", "tokens")
        result = await replay_async(trace, url=server.url, targets=targets or {}, run_dir=folder / "run", **options)
    return result, server


async def test_a_good_answer_leaves_a_whole_row(tmp_path):
    """Counts, times in order, TTFT from the schedule and from the send, and the columns of the record."""
    result, _ = await run(make_trace([{"arrival_s": 0.0}], first_row=41), good, tmp_path)
    assert result.frame.schema == pl.Schema(SCHEMA)
    row = result.frame.row(0, named=True)
    assert (row["status"], row["http_status"], row["reason"]) == ("ok", 200, None)
    assert (row["trace_row"], row["prompt_tokens"], row["generated_tokens"]) == (41, 8, 2)
    assert row["scheduled_s"] == 0.0
    assert row["scheduled_s"] <= row["sent_s"] <= row["first_token_s"] <= row["last_token_s"] <= row["end_s"]
    assert row["ttft_s"] == pytest.approx(row["first_token_s"], abs=2e-6)
    assert row["service_ttft_s"] == pytest.approx(row["first_token_s"] - row["sent_s"], abs=2e-6)
    assert len(row["token_s"]) == 2
    assert result.meta["state"] == "finished"


async def test_what_is_sent(tmp_path):
    """Token ids of the exact length, the trace's output length, greedy, streamed, with usage."""
    trace = make_trace([{"arrival_s": 0.0, "input_tokens": 13, "output_tokens": 5}])
    _, server = await run(trace, good, tmp_path, extra_body={"top_k": 1}, api_key="secret")
    (request,) = server.timed
    assert request.path == "/v1/completions"
    assert len(request.body.pop("prompt")) == 13
    assert request.body == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "top_k": 1,
    }
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["accept-encoding"] == "identity"


async def test_slo_headers_follow_the_class(tmp_path):
    """Each request tells its class and targets in milliseconds; a class without targets takes the default ones."""
    trace = make_trace([{"arrival_s": 0.0, "slo_class": c} for c in ("chat", "doc", None)])
    targets = {"chat": Targets(ttft_s=1.0, tpot_s=0.12), "default": Targets(ttft_s=6.0, tbt_s=0.5)}
    _, server = await run(trace, good, tmp_path, targets=targets)
    seen = {index_of(r): {k: v for k, v in r.headers.items() if k.startswith("x-slo")} for r in server.timed}
    assert seen == {
        0: {"x-slo-class": "chat", "x-slo-ttft-ms": "1000", "x-slo-tpot-ms": "120"},
        1: {"x-slo-class": "doc", "x-slo-ttft-ms": "6000", "x-slo-tbt-ms": "500"},
        2: {"x-slo-ttft-ms": "6000", "x-slo-tbt-ms": "500"},
    }


async def test_slo_headers_can_be_left_out(tmp_path):
    """A server must be measurable without being told the targets; they are scored all the same."""
    trace = make_trace([{"arrival_s": 0.0, "slo_class": "chat"}])
    result, server = await run(trace, good, tmp_path, targets={"chat": Targets(ttft_s=60.0)}, send_slo_headers=False)
    assert not [name for name in server.timed[0].headers if name.startswith("x-slo")]
    assert result.frame["ttft_target_s"].to_list() == [60.0]
    assert result.frame["attained"].to_list() == [True]


@pytest.mark.parametrize(
    ("answer", "status", "reason", "wait"),
    [
        (plain(429, {"error": {"code": "full"}}, retry_after_ms="1500"), "refused", "full", 1.5),
        (plain(429, {"error": {"code": 429, "type": "rate"}}, Retry_After="2"), "refused", "rate", 2.0),
        (plain(503, {}), "refused", "http_503", None),
        (plain(400, {"error": {"code": "never_fits"}}), "refused", "never_fits", None),
        (plain(500, "oops"), "failed", "http_500", None),
        (plain(307, {}, Location="/elsewhere"), "failed", "http_307", None),
        (HEAD + chunk(DONE) + END, "failed", "no_tokens", None),
        (HEAD + chunk(token(used=1) + b'data: {"error": {"type": "Dead"}}\n\n') + END, "failed", "Dead", None),
        (HEAD + chunk(token(used=1)) + END, "failed", "dropped", None),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
         "failed", "content_encoding:gzip", None),
        (HEAD + b"zz\r\n", "failed", "bad_http", None),
        (HEAD + b"2\r\nabcd\r\n", "failed", "bad_http", None),
        (plain(200, {"choices": [{"text": "a"}], "usage": {"completion_tokens": 2}}), "ok", None, None),
        (HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(token(used=2, finish=True)))
         + token(used=2, finish=True), "ok", None, None),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD, "ok", None, None),
        (plain(429, {}, Retry_After="nan"), "refused", "http_429", None),
        (plain(429, {}, Retry_After="-3"), "refused", "http_429", None),
        (plain(429, {"error": {"code": "\ud800" + "x" * 300}}), "refused", "?" + "x" * 199, None),
        (HEAD + b"-5\r\nabc\r\n", "failed", "bad_http", None),
        (HEAD + b"1_0\r\n0123456789abcdef\r\n", "failed", "bad_http", None),
        (b"HTTP/1.1 200 x\r\nContent-Length: -5\r\n\r\nabc", "failed", "bad_http", None),
        (b"HTTP/2 200 x\r\nContent-Length: 0\r\n\r\n", "failed", "bad_http", None),
        (b"HTTP/1.1 20 x\r\n\r\n", "failed", "bad_http", None),
        (HEAD + b"f" * (1 << 20) + b"f", "failed", "bad_http", None),
        (HEAD + chunk(token(used=10**8)) + chunk(DONE) + END, "failed", "malformed_usage", None),
        (plain(200, {"choices": [{"text": "a"}], "usage": {"completion_tokens": "many"}}), "ok", None, None),
        (plain(200, {"choices": [{"text": "a"}], "usage": ["x"]}), "ok", None, None),
        (b"HTTP/1.1 500 x\r\nContent-Length: 99999\r\n\r\n" + b"[" * 99_999, "failed", "http_500", None),
        (b"HTTP/1.1 200 x\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>", "failed", "no_tokens", None),
    ],
)  # fmt: skip
async def test_every_ending_has_its_name(tmp_path, answer, status, reason, wait):
    """429 and 503 are refusals with their code and wait; everything else that is no whole answer has failed."""

    async def scripted(request, writer):
        writer.write(answer)

    result, _ = await run(make_trace([{"arrival_s": 0.0}]), scripted, tmp_path)
    row = result.frame.row(0, named=True)
    assert (row["status"], row["reason"], row["retry_after_s"]) == (status, reason, wait)
    assert row["attained"] is (status == "ok")
    assert row["end_s"] is not None


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"", "failed", "dropped"),
        (b"HTTP/1.1 200", "failed", "dropped"),
        (HEAD + chunk(token(used=1)), "failed", "dropped"),
        (HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + token(used=1) + DONE, "ok", None),
        (HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + token(used=1), "failed", "dropped"),
    ],
)
async def test_a_closed_connection(tmp_path, sent, status, reason):
    """A body that lasts until the close is whole when the stream said so; anything else was dropped."""

    async def scripted(request, writer):
        writer.write(sent)
        await writer.drain()
        writer.close()

    result, _ = await run(make_trace([{"arrival_s": 0.0}]), scripted, tmp_path)
    row = result.frame.row(0, named=True)
    assert (row["status"], row["reason"]) == (status, reason)


async def test_a_fast_refusal_attains_nothing(tmp_path):
    """Refused, failed and cut-off requests stay in the denominator and make the percentile over all infinite."""

    async def scripted(request, writer):
        writer.write(GOOD if index_of(request) < 9 else plain(429, {"error": {"code": "full"}}))

    trace = make_trace([{"arrival_s": 0.0}] * 10)
    result, _ = await run(trace, scripted, tmp_path, targets={"default": Targets(ttft_s=60.0)})
    total = summarise(result.frame)["total"]
    assert (total["n"], total["ok"], total["refused"]) == (10, 9, 1)
    assert total["attainment"] == 0.9
    assert (total["accepted"], total["missed"]) == (9, 0)
    assert total["ttft"]["n"] == 9
    assert total["ttft_all"]["p99_s"] is None
    assert total["ttft_all"]["p90_s"] is not None
    assert total["reasons"] == {"full": 1}


async def test_the_end_of_the_grace_period_cuts_off(tmp_path):
    """A request that never ends is cut off, keeps the tokens it got, and is an accepted one that missed."""

    async def scripted(request, writer):
        writer.write(HEAD + chunk(token(used=1)))

    trace = make_trace([{"arrival_s": 0.0}])
    result, _ = await run(trace, scripted, tmp_path, grace_s=0.1)
    row = result.frame.row(0, named=True)
    assert (row["status"], row["reason"], row["generated_tokens"]) == ("cut_off", "end_of_run", 1)
    total = summarise(result.frame)["total"]
    assert (total["accepted"], total["missed"]) == (1, 1)


async def test_a_request_over_its_time_limit_has_failed(tmp_path):
    """The time limit ends the request, not the run."""

    async def scripted(request, writer):
        if index_of(request) == 1:
            writer.write(GOOD)

    trace = make_trace([{"arrival_s": 0.0}, {"arrival_s": 0.0}])
    result, _ = await run(trace, scripted, tmp_path, timeout_s=0.05)
    assert result.frame["status"].to_list() == ["failed", "ok"]
    assert result.frame["reason"].to_list() == ["timeout", None]


async def test_connections_are_reused_and_none_is_shared(tmp_path):
    """Two requests at once take two connections; later ones reuse them."""
    together = asyncio.Event()
    writers = []

    async def scripted(request, writer):
        writers.append(writer)
        if index_of(request) == 1:
            together.set()
        await together.wait()
        writer.write(GOOD)

    trace = make_trace([{"arrival_s": at} for at in (0.0, 0.0, 0.2, 0.3, 0.4)])
    result, _ = await run(trace, scripted, tmp_path)
    assert result.frame["status"].to_list() == ["ok"] * 5
    assert writers[0] is not writers[1]
    assert len(set(writers)) == 2


async def test_open_loop_does_not_wait_for_answers(tmp_path):
    """The last request is sent though no earlier one was answered; then all are."""
    all_there = asyncio.Event()

    async def scripted(request, writer):
        if index_of(request) == 29:
            all_there.set()
        await all_there.wait()
        writer.write(GOOD)

    trace = make_trace([{"arrival_s": i * 0.002} for i in range(30)])
    result, _ = await run(trace, scripted, tmp_path, grace_s=10.0)
    assert result.frame["status"].to_list() == ["ok"] * 30
    assert result.frame["scheduled_s"].to_list() == pytest.approx([i * 0.002 for i in range(30)])


async def test_a_client_cap_does_not_hide_the_wait(tmp_path):
    """With one request in flight at a time, latency still counts from the schedule, and the send view says less."""
    open_now = most = 0

    async def scripted(request, writer):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.05)
        open_now -= 1
        writer.write(GOOD)

    trace = make_trace([{"arrival_s": 0.0}] * 6)
    result, _ = await run(trace, scripted, tmp_path, targets={"default": Targets(ttft_s=0.2)}, max_in_flight=1)
    assert most == 1
    sends = result.frame["sent_s"].to_list()
    ends = result.frame["end_s"].to_list()
    assert all(later >= earlier for earlier, later in zip(ends, sends[1:], strict=False))
    assert result.frame["ttft_s"][5] >= 6 * 0.05
    assert result.frame["attained"][5] is False


async def test_requests_held_back_to_the_end_are_not_lost(tmp_path):
    """What the cap never let go is cut off without a send, and counts."""

    async def scripted(request, writer):
        return

    result, _ = await run(make_trace([{"arrival_s": 0.0}] * 3), scripted, tmp_path, max_in_flight=1, grace_s=0.1)
    assert result.frame["status"].to_list() == ["cut_off"] * 3
    assert result.frame["sent_s"].null_count() == 2


async def test_closed_loop_waits_for_the_previous_turn(tmp_path):
    """A turn is due `think_s` after the previous one ended, whatever its recorded arrival."""
    rows = [
        {"arrival_s": 0.0, "session_id": "a", "turn": 0},
        {"arrival_s": 0.01, "session_id": "a", "turn": 1, "think_s": 0.1},
        {"arrival_s": 0.02, "session_id": "b", "turn": 0},
    ]
    result, server = await run(make_trace(rows), good, tmp_path, closed_loop=True)
    frame = result.frame
    assert [index_of(request) for request in server.timed] == [0, 2, 1]
    assert frame["scheduled_s"][1] == pytest.approx(frame["end_s"][0] + 0.1, abs=1e-5)
    assert result.meta["load"]["loop"] == "closed"


async def test_closed_loop_without_a_second_turn_is_an_error(tmp_path):
    """It would change nothing."""
    rows = [{"session_id": "a", "turn": 0}, {"session_id": "b", "turn": 0}, {}]
    with pytest.raises(InputError, match="--closed-loop: invented has no second turn"):
        await run(make_trace([{"arrival_s": 0.0, **row} for row in rows]), good, tmp_path, closed_loop=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_server_that_goes_away_makes_the_run_invalid(tmp_path, leaves):
    """The first is served; then nobody listens any more. One that fails and stays is a result."""

    async def scripted(request, writer):
        if index_of(request) == 0:
            writer.write(GOOD)
        elif leaves:
            listener.close()
            writer.close()
        else:
            writer.write(plain(500, {}))

    trace = make_trace([{"arrival_s": 0.0}, {"arrival_s": 0.1}])
    async with serve(scripted) as server:
        listener = server.listener
        result = await replay_async(trace, url=server.url, targets={}, run_dir=tmp_path / "run", prompts="tokens")
    assert result.frame["status"].to_list() == ["ok", "failed"]
    reasons = [each for each in result.meta["invalid_reasons"] if "server" in each]
    assert reasons == (["the server was gone at the end (failed requests: 1)"] if leaves else [])


async def test_cancelling_keeps_what_finished(tmp_path):
    """A cancelled replay writes its rows, marks the run, and lets the cancellation through."""
    answered = asyncio.Event()

    async def scripted(request, writer):
        if index_of(request) == 0:
            writer.write(GOOD)
        else:
            answered.set()

    trace = make_trace([{"arrival_s": 0.0}, {"arrival_s": 0.05}, {"arrival_s": 500.0}])
    async with serve(scripted) as server:
        task = asyncio.create_task(
            replay_async(trace, url=server.url, targets={}, run_dir=tmp_path / "run", prompts="tokens")
        )
        await answered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    kept = load(tmp_path / "run")
    assert kept.frame["status"].to_list() == ["ok", "cut_off"]
    assert kept.frame["reason"].to_list() == [None, "interrupted"]
    assert kept.meta["state"] == "interrupted"
    assert kept.meta["not_offered"] == 1


async def test_a_fault_of_ours_ends_the_run(tmp_path, monkeypatch):
    """An exception in the client is raised, not booked on the server."""

    def broken(self, row):
        raise OSError("disk full")

    monkeypatch.setattr("headway.replay.store.RunWriter.append", broken)
    with pytest.raises(OSError, match="disk full"):
        await run(make_trace([{"arrival_s": 0.0}]), good, tmp_path)


async def test_what_the_server_promises_is_kept(tmp_path):
    """Bound and queue time from Headway's headers, in seconds."""

    async def scripted(request, writer):
        extra = b"x-headway-ttft-bound-ms: 850.5\r\nx-headway-queue-ms: 12\r\n\r\n"
        writer.write(GOOD.replace(b"\r\n\r\n", b"\r\n" + extra, 1))

    result, _ = await run(make_trace([{"arrival_s": 0.0}]), scripted, tmp_path)
    row = result.frame.row(0, named=True)
    assert (row["ttft_bound_s"], row["queue_s"]) == (0.8505, 0.012)


async def test_fields_that_the_server_does_not_take_are_left_out(tmp_path):
    """A server that answers 400 to vLLM's fields is replayed without them, and the run says so."""

    async def strict(request, writer):
        for name in ("continuous_usage_stats", "ignore_eos"):
            if name in json.dumps(request.body):
                writer.write(plain(400, {"error": {"message": f"Unrecognized argument: {name}"}}))
                return
        writer.write(GOOD)

    result, server = await run(make_trace([{"arrival_s": 0.0}]), good, tmp_path, probe=strict)
    body = server.timed[0].body
    assert "ignore_eos" not in body
    assert body["stream_options"] == {"include_usage": True}
    assert result.meta["server"]["fields_taken"] == ["stream_options"]
    assert "server does not take ignore_eos" in result.meta["notes"]


async def test_the_run_says_what_it_was(tmp_path):
    """run.json: versions, machine, seed, trace hash, what the server reports, targets, load, honesty."""
    result, _ = await run(
        make_trace([{"arrival_s": 0.0}]),
        good,
        tmp_path,
        targets={"default": Targets(ttft_s=1.0)},
        seed=5,
        label="x",
    )
    meta = load(tmp_path / "run").meta
    assert meta == result.meta
    assert (meta["seed"], meta["label"], meta["trace"]["sha256"]) == (5, "x", "0" * 64)
    assert meta["server"]["version"] == {"version": "1"}
    assert meta["targets"] == {"default": {"ttft_s": 1.0, "tpot_s": None, "tbt_s": None}}
    assert meta["client"]["lateness"]["n"] == 1
    assert meta["clock"]["monotonic"] is True
    assert meta["tokens_counted_by"] == {"usage": 1}
    assert meta["prompt_tokens_minus_asked"] == {"n": 1, "min": 0, "max": 0}
    assert "headway" in meta["versions"]


async def test_no_server_is_an_engine_error(tmp_path):
    """Nobody there: one clear error instead of a run full of failures, and no folder."""
    with pytest.raises(EngineError, match="no server there"):
        await replay_async(
            make_trace([{"arrival_s": 0.0}]), url="http://127.0.0.1:9", targets={}, run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


async def test_an_unknown_model_names_the_served_ones(tmp_path):
    """The error lists what is served."""
    with pytest.raises(InputError, match="serves m"):
        await run(make_trace([{"arrival_s": 0.0}]), good, tmp_path, model="other")


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": "embeddings"},
        {"prompts": "lyrics"},
        {"max_in_flight": 0},
        {"timeout_s": 0.0},
        {"grace_s": float("nan")},
    ],
)
async def test_bad_options_are_input_errors(tmp_path, options):
    """Each names the option and its value."""
    with pytest.raises(InputError, match=str(next(iter(options.values()))).replace(".", r"\.")):
        await run(make_trace([{"arrival_s": 0.0}]), good, tmp_path, **options)


async def test_the_chat_endpoint_gets_messages(tmp_path):
    """`endpoint=chat` sends one user message."""
    trace = make_trace([{"arrival_s": 0.0, "input_tokens": 6}])
    _, server = await run(trace, good, tmp_path, endpoint="chat")
    (request,) = server.timed
    assert request.path == "/v1/chat/completions"
    (message,) = request.body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 6


async def test_progress_ends_with_everything(tmp_path):
    """The last progress report counts every request."""
    seen = []
    await run(make_trace([{"arrival_s": 0.0}] * 3), good, tmp_path, on_progress=seen.append)
    last = seen[-1]
    assert (last.total, last.finished, last.in_flight, last.attained) == (3, 3, 0, 3)
