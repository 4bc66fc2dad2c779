"""A small HTTP client for the engine tests: one keep-alive connection, JSON in, JSON or server-sent events out."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from headway.engine.vllm.server import Server


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, lower-case headers and body of one response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream; it must have ended with [DONE]."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-3:]
        return [json.loads(line) for line in lines[:-1]]

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error in the body."""
        error: dict[str, Any] = self.json["error"]
        return error


class Client:
    """One connection to one server."""

    def __init__(self, server: Server, *, timeout_s: float = 120.0) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname is not None
        self.model = server.model
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Send a request without waiting for its response."""
        text = json.dumps({"model": self.model, **body})
        self.connection.request("POST", path, text, {"content-type": "application/json", **(headers or {})})

    def receive(self) -> Answer:
        """Read the whole response."""
        response = self.connection.getresponse()
        body = response.read()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, body)

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request and read its response."""
        self.send(path, body, headers)
        return self.receive()

    def get(self, path: str) -> Answer:
        """Read a page."""
        self.connection.request("GET", path)
        return self.receive()

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics by its name and labels as printed."""
        found = {}
        for line in self.get("/metrics").body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found


def wait_for(what: Callable[[], bool], *, seconds: float = 30.0, every_s: float = 0.05) -> None:
    """Poll until `what` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds} s"
        time.sleep(every_s)
