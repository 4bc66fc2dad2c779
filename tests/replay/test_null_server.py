"""The null server: what it sends, its slots, its log; and the arithmetic of the self-test."""

from __future__ import annotations

import asyncio
import gc
import json

import polars as pl
import pytest

from headway.replay.client import replay_async
from headway.replay.nullserver import Script, serve
from headway.replay.selftest import Errors, Report, errors, expected_attained, measure, most_open, regular_trace
from headway.replay.store import Run
from headway.replay.stream import TokenStream
from headway.replay.summary import caption, summarise
from headway.replay.targets import Targets


async def ask(port: int, request: bytes) -> bytes:
    """Return the body of one answer, chunks taken apart."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"content-length" in head:
        body = await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
    else:
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
    writer.close()
    await writer.wait_closed()
    return body


def completion(tokens: int, name: str = "x-0") -> bytes:
    """Return the bytes of a completion request."""
    body = json.dumps({"max_tokens": tokens}).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nX-Request-Id: {name}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


FAST = {"ttft_s": 0.001, "tpot_s": 0.001}


@pytest.mark.parametrize("usage", ["every", "last", "none"])
@pytest.mark.parametrize("per_chunk", [1, 3])
async def test_the_stream_is_one_that_clients_read(usage, per_chunk):
    """Seven tokens, in chunks, with usage in every chunk, at the end or nowhere; role-only chunks are no tokens."""
    server, port = await serve(Script(**FAST, usage=usage, per_chunk=per_chunk, prefix_chunks=2))
    async with server:
        body = await ask(port, completion(7))
    stream = TokenStream()
    stream.feed(body, 1.0)
    stream.finish(1.0)
    assert stream.done
    assert len(stream.token_times) == (7 if usage != "none" else -(-7 // per_chunk))


async def test_slots_are_taken_in_order_and_the_script_is_kept():
    """One slot: the second request starts when the script ends the first, not when the loop got round to it."""
    server, port = await serve(Script(ttft_s=0.01, tpot_s=0.005, slots=1))
    async with server:
        await asyncio.gather(*(ask(port, completion(3, f"x-{i}")) for i in range(2)))
        log = [json.loads(line) for line in (await ask(port, b"GET /log HTTP/1.1\r\n\r\n")).splitlines()]
    first, second = log
    assert first["started"] == first["received"]
    assert second["started"] == pytest.approx(first["started"] + 0.01 + 2 * 0.005, abs=1e-9)
    for entry in log:
        scripted = [entry["started"] + 0.01 + k * 0.005 for k in range(3)]
        assert all(wrote >= due for wrote, due in zip(entry["written"], scripted, strict=True))


async def test_the_log_is_given_once():
    """Reading it forgets it."""
    server, port = await serve(Script(**FAST))
    async with server:
        await ask(port, completion(1))
        get = b"GET /log HTTP/1.1\r\n\r\n"
        assert len((await ask(port, get)).splitlines()) == 1
        assert await ask(port, get) == b""


async def test_a_replay_against_it(tmp_path):
    """All answers whole, every token counted, and the log knows each by its index."""
    server, port = await serve(Script(**FAST))
    async with server:
        run = await replay_async(
            regular_trace(n=20, rate=500.0, output_tokens=4),
            url=f"http://127.0.0.1:{port}",
            targets={},
            run_dir=tmp_path / "run",
            prompts="tokens",
        )
        log = (await ask(port, b"GET /log HTTP/1.1\r\n\r\n")).splitlines()
    assert run.frame["status"].to_list() == ["ok"] * 20
    assert run.frame["generated_tokens"].to_list() == [4] * 20
    names = {json.loads(line)["request_id"] for line in log}
    assert {f"{run.meta['run_id']}-{i}" for i in range(20)} <= names


def test_a_script_survives_the_command_line():
    """`arguments` gives what the parser reads."""
    words = Script(ttft_s=0.0125, tpot_s=0.0025, slots=4, usage="last").arguments()
    assert words == [
        "--ttft-ms=12.5", "--tpot-ms=2.5", "--per-chunk=1", "--usage=last", "--prefix-chunks=0", "--slots=4",
    ]  # fmt: skip


def test_the_case_of_four_slots_by_arithmetic():
    """4 slots of 360 ms against 22 req/s: 12 of 170 requests see their first token within 500 ms, 7 %."""
    attained = expected_attained(n=170, rate=22.0, slots=4, ttft_s=0.05, service_s=0.36, target_s=0.5)
    assert attained == 12
    assert expected_attained(n=170, rate=11.0, slots=4, ttft_s=0.05, service_s=0.36, target_s=0.5) == 170


def test_coordinated_omission_by_arithmetic():
    """One slot of 500 ms, 10 req/s, 8 requests: from the schedule the i-th waits 0.4 i s, mean 1.9 s, last 3.3 s."""
    ends = lambda target: expected_attained(  # noqa: E731
        n=8, rate=10.0, slots=1, ttft_s=0.5, service_s=0.5, target_s=target
    )
    assert [ends(0.5 + 0.4 * i + 1e-6) for i in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_errors_are_told_apart(tmp_path):
    """The script says 0.1 s, the server wrote at 0.11, the client read at 0.112: 12 ms to script, 2 ms its own."""
    frame = pl.DataFrame(
        {"index": [0], "status": ["ok"], "sent_s": [0.0], "token_s": [[0.112, 0.162]]},
    )
    run = Run(path=tmp_path, meta={"clock": {"zero_s": 100.0}}, frame=frame)
    to_script, to_writes = errors(run, {0: {"written": [100.11, 100.16]}}, Script(ttft_s=0.1, tpot_s=0.05))
    assert to_script["ttft"].max_s == pytest.approx(0.012)
    assert to_writes["ttft"].max_s == pytest.approx(0.002)
    assert to_script["tpot"].max_s == pytest.approx(0.0, abs=1e-9)
    assert to_script["e2e"].max_s == pytest.approx(0.012)


def test_the_report_fails_on_a_slow_client():
    """P99 errors over 2 ms, lateness over 5 ms, or a wrong omission case each fail the test."""
    fine = Errors(n=100, p50_s=0.0, p99_s=0.002, max_s=1.0)
    parts = {
        "to_script": {"ttft": fine}, "to_writes": {}, "streams": 200, "cpu_s_per_1000_tokens": 0.03,
        "lateness": {"n": 1, "p50_ms": 0.1, "p99_ms": 5.0, "max_ms": 9.0},
        "expected_attained": 12, "attained": 14, "attained_from_send": 170, "offered": 170,
    }  # fmt: skip
    assert Report(**parts).passed
    assert not Report(**parts | {"to_script": {"ttft": Errors(n=1, p50_s=0, p99_s=0.0021, max_s=0.1)}}).passed
    assert not Report(**parts | {"lateness": parts["lateness"] | {"p99_ms": 5.1}}).passed
    assert not Report(**parts | {"attained": 170}).passed
    json.dumps(Report(**parts).as_dict(), allow_nan=False)


def test_most_open():
    """A request that ends when another begins does not overlap it."""
    frame = pl.DataFrame({"sent_s": [0.0, 1.0, 2.0, None], "end_s": [2.0, 3.0, 4.0, 5.0]})
    assert most_open(frame.filter(pl.col("sent_s").is_not_null())) == 2


def test_a_client_cap_cannot_hide_the_queue(tmp_path):
    """4 slots, twice their load, at most 4 open at the client, played 8 times as fast: from the send every request
    is in time, from the schedule only the first few are, and the words under the table say why.
    """
    speed = 8
    script = Script(ttft_s=0.05 / speed, tpot_s=0.01 / speed, slots=4)
    target = {"default": Targets(ttft_s=0.5 / speed)}
    trace = regular_trace(n=80, rate=22.0 * speed, output_tokens=32)
    run, _ = measure(script, trace, tmp_path / "run", targets=target, max_in_flight=4)
    total = summarise(run.frame)["total"]
    expected = expected_attained(n=80, rate=22.0, slots=4, ttft_s=0.05, service_s=0.36, target_s=0.5)
    # A busy machine makes fewer of them in time, never more.
    assert total["attained"] <= expected + 2 < 20
    assert total["attainment_from_send"] > 0.75
    assert total["ttft"]["p99_s"] > 5 * total["service_ttft"]["p99_s"]
    assert "own cap of 4 in flight held requests back" in caption(run, summarise(run.frame))


def test_requests_leave_nothing_for_the_collector(tmp_path):
    """A hundred more requests make no more reference cycles: the collector may rest during a run."""

    def left(n):
        gc.collect()
        measure(Script(**FAST), regular_trace(n=n, rate=500.0, output_tokens=3), tmp_path / str(n))
        return gc.collect()

    gc.disable()
    try:
        left(5)  # what is made once
        few, many = left(10), left(110)
    finally:
        gc.enable()
    assert many < few + 50
