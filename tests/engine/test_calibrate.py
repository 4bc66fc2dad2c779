"""The start-up sweep against a scripted server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headway.engine.vllm.calibrate import LENGTHS, STREAMS, sweep
from headway.errors import EngineError


class Scripted(http.server.ThreadingHTTPServer):
    """Answers /v1/models and completions; `status` is what completions get, `key` what every request must bring."""

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.max_model_len = 4096
        self.status = 200
        self.key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Scripted

    def do_GET(self) -> None:
        """Tell the model."""
        self.answer(200, {"data": [{"max_model_len": self.server.max_model_len}]})

    def do_POST(self) -> None:
        """Take a completion."""
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.answer(self.server.status, {})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Send JSON, or 401."""
        if self.server.key is not None and self.headers["authorization"] != f"Bearer {self.server.key}":
            status = 401
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    """A running server."""
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_sweep_has_every_length_and_the_streams(server: Scripted) -> None:
    """Alone in turn, then together; all in the reserved class, no prompt twice."""
    sent = sweep(server.url, "m", headway=True)
    assert sent == len(server.bodies) == len(LENGTHS) + sum(STREAMS) + 2 * len(STREAMS)
    assert [len(body["prompt"]) for body in server.bodies[: len(LENGTHS)]] == list(LENGTHS)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == sent
    assert {headers["x-slo-class"] for headers in server.headers} == {"calibration"}


def test_stock_vllm_gets_no_class(server: Scripted) -> None:
    """It would ignore it."""
    sweep(server.url, "m", headway=False)
    assert all("x-slo-class" not in headers for headers in server.headers)


def test_prompts_that_the_model_cannot_hold_are_left_out(server: Scripted) -> None:
    """A short context."""
    server.max_model_len = 128
    sweep(server.url, "m", headway=True)
    assert max(len(body["prompt"]) for body in server.bodies) < 126


def test_a_server_with_a_key_is_asked_with_it(server: Scripted) -> None:
    """And says so without."""
    server.key = "secret"
    sweep(server.url, "m", headway=True, api_key="secret")
    with pytest.raises(EngineError, match=r"/v1/models does not tell max_model_len.*401"):
        sweep(server.url, "m", headway=True)


@pytest.mark.parametrize("status", [429, 503])
def test_a_valve_is_no_failure(server: Scripted, status: int) -> None:
    """A tuned server may refuse part of the sweep."""
    server.status = status
    assert sweep(server.url, "m", headway=True) > 0


def test_a_failure_is_named(server: Scripted) -> None:
    """URL, status and length."""
    server.status = 500
    with pytest.raises(EngineError, match=r"calibration: http://127\.0\.0\.1:\d+ answered 500 to 8 tokens"):
        sweep(server.url, "m", headway=True)


def test_no_server_is_named() -> None:
    """Nobody listens there."""
    with pytest.raises(EngineError, match="does not tell max_model_len"):
        sweep("http://127.0.0.1:1", "m", headway=True, timeout_s=2)
