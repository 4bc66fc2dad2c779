"""Sweeps of requests that show what a step costs: a short one at start-up, a long one for a profile of the twin.

Sent through the public API in the reserved class `calibration`, which has no targets. Prompts of growing length with
nothing else running give the cost of a prefill token and of its attention; a handful of streams at once gives the
cost of a decode; a prompt among streams gives a mixed step. The long sweep does so for many lengths, numbers of streams
and contexts, in rounds that each cover everything, so that the steps that the fit is judged by are like those before.
"""

from __future__ import annotations

import json
import random
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headway.config import CALIBRATION_CLASS
from headway.engine.vllm.messages import ENV_STEP_LOG
from headway.errors import EngineError

#: Prompt lengths of the sweep; those that the model cannot hold are left out.
LENGTHS = (8, 24, 48, 96, 160, 256, 384, 640, 1024, 96, 48, 24)

#: Streams of the decode part and tokens of each.
STREAMS = (4, 12)
STREAM_TOKENS = 12


#: Streams and prompt lengths of the long sweep: decodes alone with short contexts, with long ones, and among prompts.
SURVEY_STREAMS = (1, 2, 4, 8, 16, 32)
SURVEY_CONTEXTS = ((4, 256), (12, 256), (8, 768))
SURVEY_MIXED = ((2, 512), (6, 256), (16, 128), (16, 640))
SURVEY_TOKENS = 24


def sweep(
    url: str,
    model: str,
    *,
    headway: bool,
    api_key: str | None = None,
    timeout_s: float = 120.0,
    seed: int = 20261129,
) -> int:
    """Send the short sweep to the server at `url` and return the number of requests.

    Args:
        url: base URL without `/v1`.
        model: served model name.
        headway: whether the server knows the class header (stock vLLM ignores it, so it is left out there).
        api_key: what the server asks for (vLLM's --api-key), None when it asks for nothing.
        timeout_s: limit for each request.
        seed: seed of the token ids.

    Raises:
        EngineError: the server refused or failed one of the requests.
    """
    client = _Client(url, model, headway=headway, api_key=api_key, timeout_s=timeout_s, seed=seed)
    for tokens in LENGTHS:
        if client.holds(tokens + 2):
            client.send(tokens, 2)
    for streams in STREAMS:
        prompts = [(16 + 8 * i, STREAM_TOKENS) for i in range(streams)]
        client.together(prompts + [(tokens, 2) for tokens in (64, 200) if client.holds(tokens + 2)])
    return client.sent


def survey(
    url: str,
    model: str,
    *,
    headway: bool,
    rounds: int = 3,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    seed: int = 20261129,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Send the long sweep in `rounds` rounds and return the number of requests; arguments and errors as in `sweep`.

    `progress` is called with (parts done, parts in all).
    """
    client = _Client(url, model, headway=headway, api_key=api_key, timeout_s=timeout_s, seed=seed)
    lengths = [tokens for power in range(3, 16) for tokens in (2**power, 3 * 2 ** (power - 1)) if tokens <= 4096]
    parts: list[Callable[[], None]] = [
        partial(client.send, tokens, 2) for tokens in lengths if client.holds(tokens + 2)
    ]
    parts += [partial(client.together, [(16, SURVEY_TOKENS)] * streams) for streams in SURVEY_STREAMS]
    parts += [
        partial(client.together, [(context, SURVEY_TOKENS)] * streams)
        for streams, context in SURVEY_CONTEXTS
        if client.holds(context + SURVEY_TOKENS)
    ]
    parts += [
        partial(client.together, [(32, SURVEY_TOKENS)] * streams + [(tokens, 2)] * 3)
        for streams, tokens in SURVEY_MIXED
        if client.holds(tokens + 2)
    ]
    order = random.Random(seed)
    for number in range(rounds):
        for done, part in enumerate(order.sample(parts, len(parts))):
            part()
            progress(number * len(parts) + done + 1, rounds * len(parts))
    return client.sent


class _Client:
    """Sends prompts of random token ids to one server; `sent` counts them."""

    def __init__(
        self, url: str, model: str, *, headway: bool, api_key: str | None, timeout_s: float, seed: int
    ) -> None:
        self.sent = 0
        self._url = url
        self._model = model
        self._timeout_s = timeout_s
        self._draw = random.Random(seed)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        if headway:
            self._headers["x-slo-class"] = CALIBRATION_CLASS
        self._context = _trusting(url)
        try:
            models = json.loads(_get(f"{url}/v1/models", api_key, timeout_s))
            self._limit = int(models["data"][0]["max_model_len"])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(f"calibration: {url}/v1/models does not tell max_model_len: {error}") from error

    def holds(self, tokens: int) -> bool:
        """Whether the model can hold a prompt with its answer."""
        return tokens < self._limit

    def send(self, tokens: int, output: int) -> None:
        """Send one request and wait for its end."""
        self._post(tokens, output)
        self.sent += 1

    def together(self, prompts: Sequence[tuple[int, int]]) -> None:
        """Send (prompt, output) requests at once and wait for all."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            for each in [pool.submit(self._post, tokens, output) for tokens, output in prompts]:
                each.result()
        self.sent += len(prompts)

    def _post(self, tokens: int, output: int) -> None:
        # Ids that every vocabulary has; random, so that no prefix cache shortens the work.
        prompt = [self._draw.randrange(100, 1000) for _ in range(tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s, context=self._context) as response:
                response.read()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in (429, 503):  # a valve of the server: part of what it does under load
                raise EngineError(f"calibration: {self._url} answered {error.code} to {tokens} tokens") from error
        except OSError as error:
            raise EngineError(f"calibration: {self._url} did not serve a prompt of {tokens} tokens: {error}") from error


def step_log_of(url: str, *, api_key: str | None = None, timeout_s: float = 10.0) -> str:
    """Return the path of the step log that the server at `url` names in its metrics.

    Raises:
        EngineError: nothing answers there, or it keeps no step log.
    """
    try:
        text = _get(f"{url}/metrics", api_key, timeout_s).decode()
    except (OSError, ValueError) as error:
        raise EngineError(f"{url}/metrics: {error}: expected a running `headway serve`") from error
    found = re.search(r'^headway_step_log\{file="((?:[^"\\]|\\.)*)"', text, re.MULTILINE)
    if found:
        return re.sub(r"\\(.)", r"\1", found[1])
    if "headway_steps_total" in text:
        raise EngineError(
            f"{url} keeps no step log: start it with {ENV_STEP_LOG}=FILE in its environment, or let "
            "`headway calibrate -- [MODEL] [OPTIONS]` start a server of its own"
        )
    raise EngineError(f"{url}/metrics has no headway_ series: expected a running `headway serve`")


def served_model(url: str, *, api_key: str | None = None, timeout_s: float = 10.0) -> str:
    """Return the name of the first model that the server at `url` lists; `EngineError` when it does not answer."""
    try:
        return str(json.loads(_get(f"{url}/v1/models", api_key, timeout_s))["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"{url}/v1/models: {error}: expected a running `headway serve`") from error


def _get(url: str, api_key: str | None, timeout_s: float) -> bytes:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=_trusting(url)) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _trusting(url: str) -> ssl.SSLContext | None:
    """The address is this machine's own server, whose certificate names another host."""
    return ssl._create_unverified_context() if url.startswith("https:") else None
