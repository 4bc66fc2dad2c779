"""A short sweep of requests at start-up: it warms the server up and teaches the step cost what a step takes.

Sent through the public API in the reserved class `calibration`, which has no targets. Prompts of growing length with
nothing else running give the cost of a prefill token and of its attention; a handful of streams at once gives the
cost of a decode; a prompt among streams gives a mixed step.
"""

from __future__ import annotations

import json
import random
import ssl
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from headway.config import CALIBRATION_CLASS
from headway.errors import EngineError

#: Prompt lengths of the sweep; those that the model cannot hold are left out.
LENGTHS = (8, 24, 48, 96, 160, 256, 384, 640, 1024, 96, 48, 24)

#: Streams of the decode part and tokens of each.
STREAMS = (4, 12)
STREAM_TOKENS = 12


def sweep(
    url: str,
    model: str,
    *,
    headway: bool,
    api_key: str | None = None,
    timeout_s: float = 120.0,
    seed: int = 20261129,
) -> int:
    """Send the sweep to the server at `url` and return the number of requests.

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
    draw = random.Random(seed)
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    if headway:
        headers["x-slo-class"] = CALIBRATION_CLASS
    # The address is this machine's own server, whose certificate names another host.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    limit = _max_model_len(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout_s, context)

    def send(tokens: int, output: int) -> None:
        # Ids that every vocabulary has; random, so that no prefix cache shortens the work.
        prompt = [draw.randrange(100, 1000) for _ in range(tokens)]
        body = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=context) as response:
                response.read()
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):  # a valve of the server: part of what it does under load
                raise EngineError(f"calibration: {url} answered {error.code} to {tokens} tokens") from error
        except OSError as error:
            raise EngineError(f"calibration: {url} did not serve a prompt of {tokens} tokens: {error}") from error

    sent = 0
    for tokens in LENGTHS:
        if tokens + 2 < limit:
            send(tokens, 2)
            sent += 1
    for streams in STREAMS:
        with ThreadPoolExecutor(streams + 2) as pool:
            work = [pool.submit(send, 16 + 8 * i, STREAM_TOKENS) for i in range(streams)]
            work += [pool.submit(send, tokens, 2) for tokens in (64, 200) if tokens + 2 < limit]
            for each in work:
                each.result()
            sent += len(work)
    return sent


def _max_model_len(models: urllib.request.Request, timeout_s: float, context: ssl.SSLContext | None) -> int:
    try:
        with urllib.request.urlopen(models, timeout=timeout_s, context=context) as response:
            return int(json.load(response)["data"][0]["max_model_len"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"calibration: {models.full_url} does not tell max_model_len: {error}") from error
