"""Headway inside the real vLLM, one server: refusals, promises, streams, metrics, events, step log."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_client import Answer, Client, wait_for

from headway.engine.vllm import calibrate
from headway.engine.vllm.guard import descendants
from headway.engine.vllm.server import Server

pytestmark = pytest.mark.engine

CONFIG = """
default_class = "chat"
blocking_ms = 150

[class.chat]
ttft_ms = 20000
tpot_ms = 2000

[class.document]
ttft_ms = 60000
tpot_ms = 4000
"""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RANDOM = random.Random(20261129)
WORDS = "one two three four five six seven eight nine ten "


class Served(NamedTuple):
    """The server and where it writes."""

    server: Server
    events: Path
    steps: Path
    profile: Path


@pytest.fixture(scope="module")
def served(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One vLLM with Headway, two classes, calibrated."""
    folder = tmp_path_factory.mktemp("headway")
    config = folder / "headway.toml"
    config.write_text(CONFIG)
    files = {name: folder / name for name in ("events.jsonl", "steps.jsonl", "profile.json")}
    environ = {
        **os.environ,
        "HEADWAY_EVENT_LOG": str(files["events.jsonl"]),
        "HEADWAY_STEP_LOG": str(files["steps.jsonl"]),
        "HEADWAY_PROFILE": str(files["profile.json"]),
    }
    server = start_server(config=config, environ=environ, extra=["--max-model-len", "2048"])
    calibrate.sweep(server.url, server.model, headway=True)
    return Served(server, *files.values())


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """One connection."""
    with Client(served.server) as client:
        yield client


def fresh(path: str, tokens: int) -> Any:
    """Return a prompt of at least so many tokens that no cache has seen."""
    ids = [RANDOM.randrange(100, 1000) for _ in range(tokens)]
    return ids if path == COMPLETIONS else " ".join(f"{i % 10}" for i in ids)


def body_for(path: str, text: Any = "Say hello.", **fields: Any) -> dict[str, Any]:
    """Return a small request for either endpoint."""
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {**prompt, "max_tokens": 4, "temperature": 0, **fields}


def text_of(answer: Answer) -> str:
    """Return the text of a streamed answer."""
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def events(served: Served, kind: str) -> list[str]:
    """Return the whole lines of the event log that tell an event of this kind; others may come at any time."""
    lines = served.events.read_text().rpartition("\n")[0].splitlines()
    return [line for line in lines if json.loads(line)["event"] == kind]


def in_parallel(server: Server, requests: list[tuple[str, dict[str, Any], dict[str, str]]]) -> list[Answer]:
    """Send all at once, each on its own connection; return the answers in order."""

    def one(request: tuple[str, dict[str, Any], dict[str, str]]) -> Answer:
        with Client(server) as client:
            return client.post(*request)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


# Impossible from the start


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_an_impossible_target_is_a_clean_400_and_the_connection_lives(client: Client, path: str, stream: bool) -> None:
    """A first token within a tenth of a millisecond: never_fits, JSON, no stream, no Retry-After, same connection."""
    sock = client.connection
    answer = client.post(path, body_for(path, stream=stream), {"x-slo-ttft-ms": "0.1"})
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert (answer.error["code"], answer.error["type"]) == ("never_fits", "invalid_request_error")
    assert answer.error["headway"]["ttft_target_ms"] == 0.1
    assert answer.error["headway"]["class"] == "chat"
    assert "retry-after" not in answer.headers
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert client.connection is sock
    before = client.connection.sock
    assert before is not None  # http.client drops it when the server says close
    assert client.post(path, body_for(path)).status == 200
    assert client.connection.sock is before


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_over_long_prompt_never_fits(client: Client, path: str) -> None:
    """vLLM's own 400 for a prompt beyond the context gets the code of all such refusals."""
    answer = client.post(path, body_for(path, WORDS * 300))
    assert answer.status == 400
    assert answer.error["code"] == "never_fits"
    assert int(answer.headers["content-length"]) == len(answer.body)


def test_other_errors_of_vllm_are_untouched(client: Client) -> None:
    """A bad parameter keeps vLLM's body."""
    answer = client.post(COMPLETIONS, body_for(COMPLETIONS, temperature=-3))
    assert answer.status == 400
    assert answer.error["code"] != "never_fits"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x-slo-ttft-ms", "soon", "a number of milliseconds"),
        ("x-slo-ttft-ms", "nan", "a number of milliseconds"),
        ("x-slo-tpot-ms", "-1", "a number of milliseconds"),
        ("x-slo-tbt-ms", "86400001", "one day"),
        ("x-slo-class", "gold", "one of chat, "),
    ],
)
def test_bad_headers_are_400_naming_the_header(client: Client, name: str, value: str, words: str) -> None:
    """The header is named as param and in words, with what was expected."""
    answer = client.post(COMPLETIONS, body_for(COMPLETIONS), {name: value})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "bad_slo_header", name)
    assert name in answer.error["message"]
    assert words in answer.error["message"]
    assert client.get("/health").status == 200


# Refused under load


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_refused_under_load_is_a_clean_429(served: Served, client: Client, path: str, stream: bool) -> None:
    """Ten at once where three fit: some are served, the others get a 429 with numbers and keep their connection."""
    metrics = client.metrics()
    alone_s = metrics["headway_step_cost_base_seconds"] + 300 * metrics["headway_step_cost_prefill_token_seconds"]
    target_ms = 3e3 * alone_s + 50

    def one(number: int) -> Answer:
        body = body_for(path, fresh(path, 300), stream=stream, max_tokens=2)
        with Client(served.server) as own:
            answer = own.post(path, body, {"x-slo-ttft-ms": f"{target_ms:.1f}"})
            before = own.connection.sock
            assert before is not None  # http.client drops it when the server says close
            assert own.get("/health").status == 200
            assert own.connection.sock is before
        return answer

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(one, range(10)))
    assert {answer.status for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status != 429:
            continue
        error = answer.error
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert (error["type"], error["param"]) == ("slo_unattainable", None)
        assert error["code"] in ("ttft_unattainable", "tbt_unattainable")
        assert error["headway"]["ttft_target_ms"] == pytest.approx(target_ms, abs=0.1)
        assert error["headway"]["prompt_tokens"] >= 300
        assert ("retry-after" in answer.headers) == ("retry-after-ms" in answer.headers)
        assert int(answer.headers.get("retry-after", 1)) >= 1
        assert int(answer.headers.get("retry-after-ms", 1)) >= 1
    # vLLM's own series know the served ones alone: a request that no step held has no time of scheduling.
    after = client.metrics()
    for series in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_inference_time_seconds"):
        grown = {
            part: sum(
                new - metrics.get(name, 0.0) for name, new in after.items() if name.startswith(f"vllm:{series}_{part}")
            )
            for part in ("sum", "count")
        }
        assert grown["count"] == sum(answer.status == 200 for answer in answers)
        assert 0 <= grown["sum"] < 600


# Served


def test_an_accepted_request_carries_its_bound_and_its_queue_time(client: Client) -> None:
    """Both headers are numbers of milliseconds, before the body, also of a stream."""
    for stream in (False, True):
        answer = client.post(COMPLETIONS, body_for(COMPLETIONS, stream=stream))
        assert answer.status == 200
        assert 0 < int(answer.headers["x-headway-ttft-bound-ms"]) <= 20_000
        assert int(answer.headers["x-headway-queue-ms"]) >= 0


@pytest.mark.parametrize("stream", [False, True])
def test_n_and_several_prompts_are_served_together(client: Client, stream: bool) -> None:
    """Two samples of two prompts: four choices, all there."""
    body = {"prompt": ["Hello", "Good morning"], "n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 5}
    answer = client.post(COMPLETIONS, {**body, "ignore_eos": True, "stream": stream})
    assert answer.status == 200
    if stream:
        found = {choice["index"] for chunk in answer.chunks for choice in chunk["choices"]}
        assert found == {0, 1, 2, 3}
    else:
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
        assert answer.json["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [False, True])
def test_n_and_several_prompts_are_refused_together(served: Served, client: Client, stream: bool) -> None:
    """One clean refusal for all four, one line in the events, one in the counters."""
    series = 'headway_refusals_total{reason="never_fits",slo_class="chat"}'
    before = client.metrics().get(series, 0)
    body = {"prompt": ["Hello", "Good morning"], "n": 2, "temperature": 1.0, "max_tokens": 5, "stream": stream}
    answer = client.post(COMPLETIONS, body, {"x-slo-ttft-ms": "0.1"})
    assert (answer.status, answer.error["code"]) == (400, "never_fits")
    assert client.metrics()[series] == before + 1


def test_a_mixed_load_is_served_whole(served: Served) -> None:
    """Twenty chats and a document at once: every stream complete, with the tokens that were asked for."""
    chats = [
        (CHAT, body_for(CHAT, WORDS * (1 + i % 4), stream=True, max_tokens=6 + i % 5, ignore_eos=True), {})
        for i in range(20)
    ]
    document = (
        COMPLETIONS,
        body_for(COMPLETIONS, fresh(COMPLETIONS, 1000), stream=True, max_tokens=8, ignore_eos=True),
        {"x-slo-class": "document"},
    )
    options = {"stream_options": {"include_usage": True}}
    requests = [(path, {**body, **options}, headers) for path, body, headers in [document, *chats]]
    answers = in_parallel(served.server, requests)
    assert [answer.status for answer in answers] == [200] * 21
    for (_, body, _), answer in zip(requests, answers, strict=True):
        assert answer.chunks[-1]["usage"]["completion_tokens"] == body["max_tokens"]
        finishes = [c["finish_reason"] for chunk in answer.chunks for c in chunk["choices"] if c["finish_reason"]]
        assert finishes == ["length"]
        assert text_of(answer)


def test_stop_strings_end_a_request(client: Client) -> None:
    """Found outside the engine: the stream ends there, and the request counts as served."""
    answer = client.post(COMPLETIONS, body_for(COMPLETIONS, "1 2 3 4 5 6 7", max_tokens=40, stop=[" 10"]))
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" 8 9", "stop")


def test_structured_output_is_served(client: Client) -> None:
    """Its grammar is compiled while it waits, which vLLM does behind the scheduler's back."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.post(CHAT, body_for(CHAT, "Is water wet?", max_tokens=60, response_format=form))
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"])["a"], bool)


def test_a_grammar_that_fails_is_an_error_and_not_a_hang(client: Client) -> None:
    """vLLM refuses it or ends it; either way there is an answer and the next request is served."""
    answer = client.post(COMPLETIONS, body_for(COMPLETIONS, structured_outputs={"regex": "(unclosed"}))
    assert answer.status >= 400
    assert client.post(COMPLETIONS, body_for(COMPLETIONS)).status == 200


def test_logprobs_come_with_the_tokens(client: Client) -> None:
    """One entry for each token."""
    answer = client.post(COMPLETIONS, body_for(COMPLETIONS, logprobs=2, ignore_eos=True))
    assert len(answer.json["choices"][0]["logprobs"]["token_logprobs"]) == 4


def test_without_max_tokens_it_runs_to_its_end(client: Client) -> None:
    """No limit of the client: the class's assumption is reserved, the answer is not cut."""
    body = body_for(CHAT, "What is the capital of France?")
    del body["max_tokens"]
    answer = client.post(CHAT, body)
    assert answer.json["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "tag", ['{"group":"x","ttft_ms":"soon"}', '{"group":"x","ttft_ms":NaN}', "[1]", "{", '{"g":1}']
)
def test_a_forged_tag_on_another_endpoint_cannot_stop_the_engine(client: Client, tag: str) -> None:
    """/v1/responses does not pass the middleware: what a client writes there is checked again in the engine."""
    body = {"input": "hi", "max_output_tokens": 2, "temperature": 0, "store": False, "vllm_xargs": {"headway": tag}}
    answer = client.post("/v1/responses", body)
    assert answer.status == 200, answer.body
    assert client.get("/health").status == 200


# Clients that go away


def test_a_client_that_leaves_frees_its_place(served: Served) -> None:
    """Its connection closes before its answer is complete: the engine is empty long before it would have finished."""
    with Client(served.server) as watch:

        def running() -> float:
            found = watch.metrics()
            return found["headway_queue_length"] + found["headway_decoding_requests"]

        wait_for(lambda: running() == 0)
        series = 'headway_requests_total{result="aborted",slo_class="document"}'
        before = watch.metrics().get(series, 0)
        with Client(served.server) as leaving:
            body = body_for(COMPLETIONS, fresh(COMPLETIONS, 1500), max_tokens=400)
            leaving.send(COMPLETIONS, body, {"x-slo-class": "document"})
            wait_for(lambda: running() == 1)
        wait_for(lambda: watch.metrics().get(series, 0) == before + 1)
        wait_for(lambda: running() == 0)
        assert watch.metrics()["headway_queue_tokens"] == 0


# What is reported


def test_metrics_show_every_series(served: Served, client: Client) -> None:
    """All `headway_` series are on vLLM's own page, queue and compute time apart."""
    client.post(COMPLETIONS, body_for(COMPLETIONS))
    found = {name.partition("{")[0] for name in client.metrics() if name.startswith("headway_")}
    for name in (
        "requests_total",
        "slo_targets_total",
        "refusals_total",
        "prefill_queue_seconds_bucket",
        "prefill_compute_seconds_bucket",
        "decode_queue_seconds_bucket",
        "decode_compute_seconds_bucket",
        "ttft_seconds_bucket",
        "tpot_seconds_bucket",
        "decision_seconds_bucket",
        "steps_total",
        "engine_busy_seconds_total",
        "engine_busy_ratio",
        "fail_open_total",
        "queue_length",
        "queue_tokens",
        "token_budget",
        "decoding_requests",
        "undecided_requests",
        "step_envelope_factor",
        "step_envelope_eps",
        "step_envelope_exceeded_ratio",
        "step_envelope_drifting",
        "step_cost_ready",
        "step_cost_base_seconds",
        "step_cost_prefill_token_seconds",
        "step_cost_decode_seconds",
    ):
        assert f"headway_{name}" in found
    assert client.metrics()["headway_fail_open_total"] == 0
    assert client.metrics()["headway_step_cost_ready"] == 1


def test_each_refusal_is_one_event_line(served: Served, client: Client) -> None:
    """JSON with reason, class and numbers; nothing of the text of a request."""
    before = len(events(served, "headway_refused"))
    client.post(COMPLETIONS, body_for(COMPLETIONS, "a secret"), {"x-slo-ttft-ms": "0.1", "x-slo-class": "document"})
    (line,) = events(served, "headway_refused")[before:]
    event = json.loads(line)
    assert (event["reason"], event["slo_class"]) == ("never_fits", "document")
    assert event["ttft_target_s"] == pytest.approx(0.0001)
    assert "secret" not in line


def test_each_miss_is_one_event_line(served: Served, client: Client) -> None:
    """Half the time that a decode takes: an idle engine tries, the pace is missed, event and counter say so."""
    series = 'headway_misses_total{slo_class="chat",target="tbt"}'
    metrics, lines = client.metrics(), len(events(served, "headway_miss"))
    before = metrics.get(series, 0)
    gap_ms = 1e3 * (metrics["headway_step_cost_base_seconds"] + metrics["headway_step_cost_decode_seconds"])
    answer = client.post(COMPLETIONS, body_for(COMPLETIONS, ignore_eos=True), {"x-slo-tbt-ms": f"{gap_ms / 2:.3f}"})
    if answer.status != 200:  # refused as unattainable: also a clean answer
        assert answer.error["code"] in ("tbt_unattainable", "never_fits")
        return
    wait_for(lambda: client.metrics().get(series, 0) == before + 1)
    wait_for(lambda: len(events(served, "headway_miss")) > lines)
    (line,) = events(served, "headway_miss")[lines:]
    assert json.loads(line)["missed"] == ["tbt"]


def test_the_step_log_has_every_step(served: Served, client: Client) -> None:
    """q, n, K, X and seconds of each: the last request's steps can be found by hand."""
    prompt = [200 + i for i in range(37)]

    def steps() -> list[dict[str, Any]]:
        # The last line may be half written.
        lines = [json.loads(line) for line in served.steps.read_text().rpartition("\n")[0].splitlines()]
        return [line for line in lines if "event" not in line]

    def own() -> list[dict[str, Any]]:
        # The last step of the request before may be written late.
        return list(itertools.dropwhile(lambda row: row["q"] != len(prompt), steps()[before:]))

    before = len(steps())
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert client.post(COMPLETIONS, body).status == 200
    wait_for(lambda: len(own()) >= 3)
    rows = own()
    assert [(row["q"], row["n"], row["K"], row["X"]) for row in rows] == [
        (37, 0, 0, 37 * 37 / 2),
        (0, 1, 38, 0.0),
        (0, 1, 39, 0.0),
    ]
    assert all(row["seconds"] > 0 for row in rows)


def test_an_idle_engine_sleeps(served: Served, client: Client) -> None:
    """Nothing to send, nothing stepped: no decision is counted while it is idle, and its process takes no CPU time."""
    client.post(COMPLETIONS, body_for(COMPLETIONS))
    process = served.server._process
    assert process is not None
    engines = [
        pid for pid in descendants(process.pid) if "EngineCor" in Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    ]
    assert len(engines) == 1

    def ticks() -> int:
        fields = Path(f"/proc/{engines[0]}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def decisions() -> float:
        return client.metrics()["headway_decision_seconds_count"]

    seen: list[float] = []

    def settled() -> bool:
        seen.append(decisions())  # the last step of a request, which sends what is left, comes after its answer
        return seen[-3:] == seen[-1:] * 3

    wait_for(settled)
    first = ticks()
    for _ in range(200):
        assert client.get("/health").status == 200
    assert decisions() == seen[-1]
    assert ticks() - first <= 2


def test_what_was_learned_is_saved_when_idle(served: Served) -> None:
    """The profile holds the coefficients, so that a restart promises at once."""
    wait_for(served.profile.exists)
    assert json.loads(served.profile.read_text())["a"] > 0
