"""What a replay makes of servers that are none, or not the one that was meant, before the clock starts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from replay_wire import good, make_trace, plain, serve

from headway.errors import EngineError, InputError
from headway.replay.client import replay_async
from headway.replay.options import Options, check_header_values
from headway.replay.server import base_url, inspect


@contextlib.asynccontextmanager
async def answering(data: bytes, *, close: bool = False):
    """Serve `data` to every request, whatever it asks; yields the address."""
    connections = []

    async def connection(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(data)
                if close:
                    writer.close()
                    return

    listener = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for writer in connections:
            writer.close()


def web_page(status: int = 200) -> bytes:
    """Return the answer of a web server."""
    return b"HTTP/1.1 %d x\r\nContent-Type: text/html\r\nContent-Length: 15\r\n\r\n<html>Hi</html>" % status


@pytest.mark.parametrize(
    ("data", "close", "message"),
    [
        (web_page(), False, "expected JSON, got '<html>Hi</html>'"),
        (
            b"HTTP/1.1 302 x\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n",
            False,
            "moved to http://elsewhere",
        ),
        (b"HTTP/1.1 401 x\r\nContent-Length: 0\r\n\r\n", False, "expected a valid --api-key"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", False, r"does not speak HTTP/1\.1"),
        (b"HTTP/1.1 200 x\r\nContent-Length: 9\r\n\r\n{", True, "closed the connection"),
        (b"", True, "closed the connection"),
        (b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", False, r"does not speak HTTP/1\.1"),
    ],
)
async def test_what_is_no_openai_server_is_named(data, close, message):
    """A web page, a redirect, a refused key, another protocol, a dropped connection: exit code 3, in words."""
    async with answering(data, close=close) as url:
        with pytest.raises(EngineError, match=message):
            await inspect(url, model=None, endpoint="completions")


async def test_a_server_that_hangs_is_given_up():
    """No answer within the time allowed."""
    async with answering(b"") as url:
        with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
            await inspect(url, model=None, endpoint="completions", timeout_s=0.05)


async def test_an_endless_answer_is_given_up(monkeypatch):
    """More than the limit is not kept."""
    monkeypatch.setattr("headway.replay.http1.REPLY_BYTES", 8)
    async with answering(web_page()) as url:
        with pytest.raises(EngineError, match="answered more than"):
            await inspect(url, model=None, endpoint="completions")


@pytest.mark.parametrize("models", [[], {"data": None}, {"data": "x"}, {"data": [3, {"id": 4}, {}]}, "text"])
async def test_a_list_without_models_needs_a_name(models):
    """Whatever /v1/models holds instead of models, the user is asked for the name; with it, the run goes on."""
    async with serve(good, models=models) as server:
        with pytest.raises(InputError, match="expected --model NAME"):
            await inspect(server.url, model=None, endpoint="completions")
        facts = await inspect(server.url, model="mine", endpoint="completions")
    assert facts.model == "mine"


async def test_odd_facts_of_a_model_are_left_out():
    """A length that is no number and a root that is no text are not believed."""
    models = {"data": [{"id": "m", "max_model_len": "long", "root": 7}]}
    async with serve(good, models=models) as server:
        facts = await inspect(server.url, model=None, endpoint="completions")
    assert (facts.max_model_len, facts.root) == (None, None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (plain(404, {}), "no such endpoint"),
        (plain(500, {"error": "out of memory"}), "HTTP 500 to a tiny request.*out of memory"),
        (web_page(), "answered with a web page"),
        (plain(307, {}, Location="/elsewhere"), "redirects are not followed"),
    ],
)
async def test_a_tiny_request_finds_out_before_the_run(answer, message):
    """A run full of failures says nothing; the reason comes first."""

    async def probe(request, writer):
        writer.write(answer)

    async with serve(good, probe=probe) as server:
        with pytest.raises(EngineError, match=message):
            await inspect(server.url, model=None, endpoint="completions")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://h",
        "http://",
        "http://h:port",
        "http://h:99999",
        "http://h/?a=1",
        "http://h/#a",
        "http://hö",
        "http://a b",
    ],
)
def test_an_address_is_plain_http(url):
    """Anything else is refused with what was expected."""
    with pytest.raises(InputError, match="expected http://host:port"):
        base_url(url)


def test_a_user_in_the_address_is_refused_and_not_repeated():
    """It would not be sent, and a password does not belong on a screen."""
    with pytest.raises(InputError, match="use --api-key") as caught:
        base_url("http://me:secret@host:8000")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"), [("http://h:8000/v1/", "http://h:8000"), ("https://h/api/v1", "https://h/api")]
)
def test_the_version_in_the_path_is_ours_to_add(url, base):
    """With or without /v1, with a path before it."""
    assert base_url(url) == base


@pytest.mark.parametrize("key", ["two\r\nlines", "schlüssel", "tab\there"])
def test_a_key_that_is_no_header_value_is_refused(key):
    """And not repeated."""
    with pytest.raises(InputError, match="visible ASCII") as caught:
        Options(url="http://h", api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("name", ["größe", "a\nb", " a"])
async def test_a_class_that_is_no_header_value_is_refused_before_the_run(name, tmp_path):
    """Unless the class is not sent."""
    with pytest.raises(InputError, match="--no-slo-headers"):
        check_header_values([name])
    async with serve(good) as server:
        run = await replay_async(
            make_trace([{"arrival_s": 0.0, "slo_class": name}]),
            url=server.url,
            targets={},
            run_dir=tmp_path / "run",
            prompts="tokens",
            send_slo_headers=False,
        )
    assert run.frame["slo_class"].to_list() == [name]
