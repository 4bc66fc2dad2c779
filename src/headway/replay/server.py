"""What the server says about itself, and which request fields it takes, found out before the clock starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headway.errors import EngineError, InputError
from headway.replay.http1 import Reply, ask
from headway.replay.options import ENDPOINTS
from headway.replay.server_metrics import Snapshot, parse

_LISTED = 20  # names of models in a message
_METRICS_S = 5.0  # patience with /metrics

#: Fields beyond OpenAI's own, each dropped when the server answers 400 naming it (or 400 for no named reason).
EXTRAS: dict[str, dict] = {
    "continuous_usage_stats": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "ignore_eos": {"ignore_eos": True},
    "stream_options": {"stream_options": {"include_usage": True}},
}


@dataclass(slots=True, kw_only=True)
class ServerFacts:
    """Reported by the server at the start of a run."""

    url: str
    model: str
    root: str | None = None  # folder or repository of the weights, where told
    max_model_len: int | None = None
    version: object = None  # body of /version
    models: object = None  # body of /v1/models
    extras: list[str] = field(default_factory=list)  # names in EXTRAS that it takes
    notes: list[str] = field(default_factory=list)

    def fields(self) -> dict:
        """Return the accepted extra request fields."""
        merged: dict = {}
        for name in ("stream_options", "continuous_usage_stats", "ignore_eos"):
            if name in self.extras:
                merged |= EXTRAS[name]
        return merged


def base_url(url: str) -> str:
    """Return `url` without a trailing slash or `/v1`; raises `InputError` when it is no plain http(s) address."""
    url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        good = good and not (parts.query or parts.fragment) and url.isascii() and url.isprintable() and " " not in url
    except ValueError:  # a port that is no number, a broken IPv6 address
        good = False
    if not good:
        raise InputError(f"--url {url!r}: expected http://host:port or https://host")
    if parts.username is not None:
        raise InputError(f"--url {parts.scheme}://...@{parts.hostname}: expected no user in it: use --api-key")
    return url


async def inspect(
    url: str, *, model: str | None, endpoint: str, api_key: str | None = None, timeout_s: float = 60.0
) -> ServerFacts:
    """Ask the server for its version and models and send at most four tiny requests, which also warm it up.

    Raises `EngineError` when it does not answer as an OpenAI-compatible server does, and `InputError` when the model
    isn't served.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with asyncio.timeout(timeout_s):
            models = await _models(url, headers)
            facts = _facts(url, model, models)
            facts.version = await _get(url + "/version", headers)
            await _negotiate(facts, headers, endpoint)
            return facts
    except TimeoutError:
        raise EngineError(f"{url}: no answer within {timeout_s:g} s") from None


async def _models(url: str, headers: dict[str, str]) -> object:
    """Return the body of /v1/models, None where the server has no such address."""
    reply = await ask("GET", url + "/v1/models", headers)
    _check_reply(url + "/v1/models", reply)
    if reply.status != 200:
        return None
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        raise EngineError(
            f"{url}/v1/models: expected JSON, got {reply.text[:80]!r}: not an OpenAI-compatible server"
        ) from None


def _check_reply(url: str, reply: Reply) -> None:
    """Raise `EngineError` for an answer that no request would fare better with."""
    if 300 <= reply.status < 400:
        raise EngineError(
            f"{url}: HTTP {reply.status}, moved to {reply.headers.get('location', '?')}: redirects are not followed, "
            "because they would be measured: expected the server's own address"
        )
    if reply.status in (401, 403):
        raise EngineError(f"{url}: HTTP {reply.status}: expected a valid --api-key")


def _facts(url: str, model: str | None, models: object) -> ServerFacts:
    listed = models.get("data") if isinstance(models, dict) else None
    served = [
        entry
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]
    names = [entry["id"] for entry in served]
    if model is None:
        if not names:
            what = "does not tell its models" if models is None else "lists no model"
            raise InputError(f"{url}/v1/models {what}: expected --model NAME")
        model = names[0]
    elif names and model not in names:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise InputError(f"--model {model!r}: {url} serves {', '.join(names[:_LISTED])}{more}")
    entry = next((entry for entry in served if entry["id"] == model), {})
    root, longest = entry.get("root"), entry.get("max_model_len")
    return ServerFacts(
        url=url,
        model=model,
        root=root if isinstance(root, str) else None,
        max_model_len=longest if type(longest) is int else None,
        models=models,
    )


async def _negotiate(facts: ServerFacts, headers: dict[str, str], endpoint: str) -> None:
    facts.extras = list(EXTRAS)
    url = facts.url + ENDPOINTS[endpoint]
    prompt = {"prompt": [1000] * 8} if endpoint == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    while True:
        body = {
            "model": facts.model,
            **prompt,
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
            **facts.fields(),
        }
        reply = await ask("POST", url, headers | {"Content-Type": "application/json"}, json.dumps(body).encode())
        _check_reply(url, reply)
        if reply.status in (404, 405):
            raise EngineError(f"{url}: HTTP {reply.status}: the server has no such endpoint: {reply.text[:300]}")
        if reply.status not in (400, 422) or not facts.extras:
            if reply.status >= 400 and reply.status not in (429, 503):
                raise EngineError(f"{url}: HTTP {reply.status} to a tiny request: {reply.text[:300]}")
            if reply.headers.get("content-type", "").startswith("text/html"):
                raise EngineError(f"{url}: answered with a web page: not an OpenAI-compatible server")
            return
        dropped = next((name for name in facts.extras if name in reply.text), facts.extras[0])
        facts.extras.remove(dropped)
        if dropped == "stream_options" and "continuous_usage_stats" in facts.extras:
            facts.extras.remove("continuous_usage_stats")
        facts.notes.append(f"server does not take {dropped}")


async def metrics(url: str, *, model: str, api_key: str | None = None) -> Snapshot | None:
    """Return what the server's /metrics tell, None where it has none; never raises for what the server does."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with asyncio.timeout(_METRICS_S):
            reply = await ask("GET", url + "/metrics", headers)
    except (TimeoutError, EngineError):
        return None
    found = parse(reply.text, model) if reply.status == 200 else Snapshot()
    return found if found.histograms else None


async def reachable(url: str) -> bool:
    """Return whether anybody still answers at `url`, whatever the answer; one that is only slow does."""
    try:
        async with asyncio.timeout(_METRICS_S):
            await ask("GET", url + "/version", {})
    except TimeoutError:
        return True
    except EngineError:
        return False
    return True


async def _get(url: str, headers: dict[str, str]) -> object:
    reply = await ask("GET", url, headers)
    if reply.status != 200:
        return None
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        return reply.text[:200]
