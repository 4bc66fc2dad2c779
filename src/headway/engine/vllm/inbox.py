"""Receives the engine's messages in the API process.

vLLM hands every engine output to `OutputProcessor.process_outputs`. `install` wraps that method: outputs with the
reserved id are taken out and their messages delivered before vLLM sees the tokens and ends of the same batch. So a
verdict is always known when the first byte of its response appears.

Ends of refused requests are processed apart, with statistics that nobody reads: a request that no step ever held has
no time of scheduling, so vLLM would count the machine's uptime as its queue time, with the sign reversed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from headway.engine.vllm.messages import CARRIER_ID, REFUSED

logger = logging.getLogger("headway")

Deliver = Callable[[dict[str, Any]], None]

_receivers: list[Deliver] = []

#: What vLLM's method is told beside the outputs.
_CONTEXT = ("engine_core_timestamp", "iteration_stats")


def install(receiver: Deliver) -> None:
    """Deliver every message to `receiver` from now on; the wrapping happens once a process."""
    from vllm.v1.engine.output_processor import OutputProcessor

    _receivers.append(receiver)
    original = OutputProcessor.process_outputs
    if getattr(original, "_headway", False):
        return

    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        carriers = [out for out in engine_core_outputs if out.request_id == CARRIER_ID]
        refused = [out for out in engine_core_outputs if out.stop_reason == REFUSED]
        if carriers or refused:
            engine_core_outputs = [
                out for out in engine_core_outputs if out.request_id != CARRIER_ID and out.stop_reason != REFUSED
            ]
        for carrier in carriers:
            deliver((carrier.kv_transfer_params or {}).get("messages", ()))
        if refused:
            given = dict(zip(_CONTEXT, args, strict=False)) | kwargs
            stats = given.get("iteration_stats")
            if stats is not None:
                given["iteration_stats"] = type(stats)()
            original(self, refused, **{key: given[key] for key in _CONTEXT if key in given})
        return original(self, engine_core_outputs, *args, **kwargs)

    process_outputs._headway = True  # type: ignore[attr-defined]
    OutputProcessor.process_outputs = process_outputs  # type: ignore[method-assign]


def deliver(messages: Any) -> None:
    """Hand messages to the receivers; one that raises must not stop vLLM's output loop."""
    for message in messages:
        for receiver in _receivers:
            try:
                receiver(message)
            except Exception:
                logger.exception("headway: a message could not be handled: %r", message)
