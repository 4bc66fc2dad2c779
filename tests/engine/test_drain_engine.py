"""A real vLLM with Headway that is asked to stop while it streams: what is in flight ends, and ends well."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Callable

import pytest
from engine_client import Client, wait_for

from headway.engine.vllm.server import Server

pytestmark = pytest.mark.engine

PATH = "/v1/completions"


def begin(client: Client, tokens: int) -> tuple[http.client.HTTPResponse, bytes]:
    """Start a stream of so many tokens and return it with its first event."""
    body = {"prompt": f"Count to {tokens}:", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    client.send(PATH, body)
    response = client.connection.getresponse()
    assert response.status == 200
    return response, response.readline()


def test_a_server_that_is_asked_to_stop(start_server: Callable[..., Server]) -> None:
    """A short stream is whole, a new request is a 503, an endless stream gets an error event; then all is gone."""
    server = start_server(extra=["--shutdown-timeout", "5"])
    with Client(server) as short, Client(server) as endless, Client(server) as late:
        streams = [begin(short, 40), begin(endless, 3500)]
        server.send_signal(signal.SIGTERM)

        def refused() -> bool:
            answer = late.post(PATH, {"prompt": "x", "max_tokens": 1})
            if answer.status == 200:
                return False  # it came before the signal
            assert (answer.status, answer.error["code"]) == (503, "draining")
            assert "retry-after" not in answer.headers
            return True

        wait_for(refused, seconds=5.0)
        whole, cut = ((first + response.read()).decode().split("\n\n") for response, first in streams)
    assert whole[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in whole[:-2]]
    assert choices[-1]["finish_reason"] == "length"
    assert cut[-2:] == ["data: [DONE]", ""]
    assert json.loads(cut[-3].removeprefix("data: "))["error"]["code"] == "draining"
    assert len(cut) > len(whole)
    server.wait()
