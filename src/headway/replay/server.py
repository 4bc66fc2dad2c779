"""What the server says about itself, and which request fields it takes, found out before the clock starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import aiohttp

from headway.errors import EngineError, InputError

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
    """Return `url` without a trailing slash or `/v1`; raises `InputError` when it is no http(s) address."""
    url = url.strip().rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url!r}: expected http://host:port or https://host")
    return url


async def inspect(
    url: str, *, model: str | None, endpoint: str, api_key: str | None = None, timeout_s: float = 60.0
) -> ServerFacts:
    """Ask the server for its version and models and send at most four tiny requests, which also warm it up.

    Raises `EngineError` when it does not answer, and `InputError` when the model isn't served.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession(headers=headers) as session:
            models = await _get(session, url + "/v1/models")
            facts = _facts(url, model, models)
            facts.version = await _get(session, url + "/version")
            await _negotiate(session, facts, endpoint)
            return facts
    except TimeoutError:
        raise EngineError(f"{url}: no answer within {timeout_s:g} s") from None
    except aiohttp.ClientError as error:
        raise EngineError(f"{url}: no server there: {error}") from error


def _facts(url: str, model: str | None, models: object) -> ServerFacts:
    served = [m for m in (models.get("data") or []) if "id" in m] if isinstance(models, dict) else []
    names = [m["id"] for m in served]
    if model is None:
        if not names:
            raise InputError(f"{url}: /v1/models lists no model: expected --model NAME")
        model = names[0]
    elif names and model not in names:
        raise InputError(f"--model {model!r}: {url} serves {', '.join(names)}")
    entry = next((m for m in served if m["id"] == model), {})
    return ServerFacts(
        url=url, model=model, root=entry.get("root"), max_model_len=entry.get("max_model_len"), models=models
    )


async def _negotiate(session: aiohttp.ClientSession, facts: ServerFacts, endpoint: str) -> None:
    facts.extras = list(EXTRAS)
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
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
        async with session.post(facts.url + path, json=body) as response:
            answer = await response.text()
        if response.status in (404, 405):
            raise EngineError(f"{facts.url}{path}: HTTP {response.status}: the server has no such endpoint")
        if response.status not in (400, 422) or not facts.extras:
            if response.status >= 400 and response.status not in (429, 503):
                raise EngineError(f"{facts.url}{path}: HTTP {response.status} to a tiny request: {answer[:300]}")
            return
        dropped = next((name for name in facts.extras if name in answer), facts.extras[0])
        facts.extras.remove(dropped)
        if dropped == "stream_options" and "continuous_usage_stats" in facts.extras:
            facts.extras.remove("continuous_usage_stats")
        facts.notes.append(f"server does not take {dropped}")


async def _get(session: aiohttp.ClientSession, url: str) -> object:
    async with session.get(url) as response:
        if response.status != 200:
            return None
        text = await response.text()
    try:
        return json.loads(text)
    except ValueError:
        return text[:200]
