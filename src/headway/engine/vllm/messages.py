"""How the HTTP side and the scheduler talk: through vLLM's own request and output structures.

To the engine: the request's `vllm_xargs["headway"]` holds a `RequestTag` as JSON. The middleware writes it over
whatever a client sends under that name.

From the engine: one extra `EngineCoreOutput` with the reserved request id `CARRIER_ID`, whose `kv_transfer_params`
hold the messages of a `Report`. It travels in order with the tokens, over whatever transport vLLM uses, so a verdict
is known before the first output of its request. vLLM ignores outputs of unknown requests.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

from headway.config import Config, load
from headway.engine.base import RequestTag

#: Key in `vllm_xargs`, reserved for the middleware.
XARG = "headway"

#: Request id of the output that carries messages.
CARRIER_ID = "headway:messages"

#: Stop reason of the end of a refused request, by which it is told from others; no client sees it.
REFUSED = "headway:refused"

#: Environment variables that `headway serve` sets for vLLM's processes.
ENV_CONFIG = "HEADWAY_CONFIG"
ENV_POLICY = "HEADWAY_POLICY"
ENV_ADMISSION = "HEADWAY_ADMISSION"
ENV_STEP_LOG = "HEADWAY_STEP_LOG"
ENV_EVENT_LOG = "HEADWAY_EVENT_LOG"
ENV_PROFILE = "HEADWAY_PROFILE"
ENV_TENANT_SALT = "HEADWAY_TENANT_SALT"


def encode_tag(tag: RequestTag) -> str:
    """Return the tag as compact JSON without empty fields."""
    fields = {k: v for k, v in dataclasses.asdict(tag).items() if v is not None}
    return json.dumps(fields, separators=(",", ":"))


def decode_tag(text: object) -> RequestTag | None:
    """Return the tag in `text`, None when it is not one (a request that did not pass the middleware).

    Endpoints that the middleware leaves alone hand a client's `vllm_xargs` to the engine, so anything may be in it.
    """
    if not isinstance(text, str):
        return None
    try:
        return RequestTag(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def config_from_environment(environ: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration that `headway serve` handed to a process with this environment (default: this one).

    Raises:
        InputError: the file or a name in the environment is wrong.
    """
    path = environ.get(ENV_CONFIG)
    config = load(path) if path else Config()
    update: dict[str, object] = {}
    for key, name in (("policy", ENV_POLICY), ("admission", ENV_ADMISSION)):
        value = environ.get(name)
        if value and value != getattr(config, key):
            # Parameters of the file belong to the file's choice, not to one that overrides it.
            update |= {key: value, f"{key}_parameters": {}}
    return config.model_copy(update=update)
