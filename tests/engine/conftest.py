"""Real vLLM servers for the tests marked `engine`, and the processes of a tree."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headway.engine.vllm.launch import command
from headway.engine.vllm.server import Server

StartServer = Callable[..., Server]
AssertEnds = Callable[[int], None]


@pytest.fixture(scope="session")
def assert_ends() -> AssertEnds:
    """Return a function that waits until a process has ended, and fails after 40 s."""

    def wait(pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            assert select.select([handle], [], [], 40)[0], f"process {pid} is still there"
        finally:
            os.close(handle)

    return wait


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Return a function that starts vLLM with the options of `launch.command` and waits until it is ready.

    Without `model` it serves the embedded one; the port is a free one unless given. Every server is stopped at
    the end of the module; `server.log` is the file with its output.
    """
    with ExitStack() as stack:

        def start(**options: Any) -> Server:
            log = tmp_path_factory.mktemp("vllm") / "server.log"
            return stack.enter_context(Server(command(**{"port": 0} | options), log=log))

        yield start
