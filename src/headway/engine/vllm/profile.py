"""The learned step cost on disk, so that a restarted server makes promises from its first request.

One JSON file per model, engine settings and machine in the user's cache. Only numbers are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from headway.core import CostCoefficients, StepCost
from headway.engine.vllm.messages import ENV_PROFILE

logger = logging.getLogger("headway")


def path_for(vllm_config: Any) -> Path:
    """Return the profile's path for this engine: a hash of what the cost of a step depends on."""
    explicit = os.environ.get(ENV_PROFILE)
    if explicit:
        return Path(explicit)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    what = {
        "model": str(model.model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "eager": bool(model.enforce_eager),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "kv": str(vllm_config.cache_config.cache_dtype),
        "device": device(vllm_config),
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""),
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "headway" / "profiles" / f"{digest}.json"


def device(vllm_config: Any) -> str:
    """Return the name of the accelerator: one home may be shared by machines with different ones."""
    from vllm.platforms import current_platform

    kind = str(vllm_config.device_config.device_type)
    try:
        return f"{kind} {current_platform.get_device_name()}"
    except (NotImplementedError, RuntimeError):
        return kind


def load(path: Path, *, eps: float) -> StepCost:
    """Return the saved cost, or an unknown one when there is none or it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        values = {key: float(data[key]) for key in ("g", "a", "b", "k", "x")}
        if not all(math.isfinite(v) and v >= 0 for v in values.values()) or values["g"] + values["a"] <= 0:
            raise ValueError(f"coefficients {values}")
    except FileNotFoundError:
        return StepCost(eps=eps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("headway: ignoring the step-cost profile %s: %s", path, error)
        return StepCost(eps=eps)
    return StepCost(CostCoefficients(**values), eps=eps)


def save(path: Path, cost: StepCost) -> None:
    """Write the learned cost (atomically; a failure is only logged)."""
    mean = cost.mean
    data = {"g": mean.g, "a": mean.a, "b": mean.b, "k": mean.k, "x": mean.x, "steps": cost.steps}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("headway: cannot save the step-cost profile %s: %s", path, error)
