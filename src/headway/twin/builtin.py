"""Profiles by name: the shipped one of the embedded model, and `estimated:DEVICE/MODEL[xN]`."""

from __future__ import annotations

import re
from pathlib import Path

from headway.core import CostCoefficients
from headway.errors import InputError
from headway.twin.noise import NoiseModel
from headway.twin.profile import Profile, TwinError, load
from headway.twin.roofline import DEVICES, MODELS, estimate

#: SmolLM2-135M in bfloat16 under vLLM 0.32 (CPU build, eager) on one core of a 2-core AMD EPYC: fit to the step log
#: of a scheduling prototype on a quiet machine.
CPU_SMOLLM2 = Profile(
    name="cpu-smollm2",
    label="measured",
    cost=CostCoefficients(g=0.031, a=0.0014, b=0.0006, k=0.0, x=0.68e-6),
    envelope_factor=1.15,
    eps=0.05,
    noise=NoiseModel(sigma=0.06, stall_share=0.01, stall_factor=1.5),
    engine={
        "token_budget": 2048,
        "max_running": 256,
        "max_model_len": 4096,
        "block_size": 128,
        "kv_blocks": 360,
        "front_s": 0.01,
    },
    provenance={
        "source": "step log of a prototype, vLLM 0.32.0 CPU build, eager, prefix cache off",
        "model": "SmolLM2-135M-Instruct bf16",
        "machine": "one core of a 2-core AMD EPYC (AVX512-BF16)",
    },
    # Against real runs that it was not fitted to: the worse of stock vLLM and Headway (n = 194, 291, 393).
    twin_error=(
        TwinError(
            load="0.5x",
            busy_max=0.964,
            errors={
                "ttft_p50": 0.5264,
                "ttft_p99": 0.1245,
                "tpot_p50": 0.1768,
                "tpot_p99": 0.0144,
                "attainment": 0.0804,
                "refused": 0.0103,
            },
        ),
        TwinError(
            load="1x",
            busy_max=0.991,
            errors={
                "ttft_p50": 0.5083,
                "ttft_p99": 0.2394,
                "tpot_p50": 0.3888,
                "tpot_p99": 0.0838,
                "attainment": 0.022,
                "refused": 0.0199,
            },
        ),
        TwinError(
            load="2x",
            busy_max=1.0,
            errors={
                "ttft_p50": 0.2715,
                "ttft_p99": 0.2071,
                "tpot_p50": 0.2936,
                "tpot_p99": 0.0862,
                "attainment": 0.0438,
                "refused": 0.0443,
            },
        ),
    ),
)

BUILTIN: dict[str, Profile] = {CPU_SMOLLM2.name: CPU_SMOLLM2}

_ESTIMATED = f"estimated:DEVICE/MODEL[xN] with DEVICE one of {', '.join(DEVICES)} and MODEL one of {', '.join(MODELS)}"


def find(name: str) -> Profile:
    """Return the profile that `name` stands for: a shipped one, an estimate, or a file.

    Raises:
        InputError: there is none.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    if name.startswith("estimated:"):
        device, _, model = name.removeprefix("estimated:").partition("/")
        count = "1"
        if model not in MODELS and (several := re.fullmatch(r"(.+)x([0-9]{1,4})", model)):
            model, count = several.groups()
        if device not in DEVICES or model not in MODELS:
            raise InputError(f"profile = {name!r}: expected {_ESTIMATED}")
        return estimate(device, model, tensor_parallel=int(count))
    if Path(name).exists():
        return load(Path(name))
    raise InputError(f"profile = {name!r}: no such file: expected a file, {', '.join(BUILTIN)}, or {_ESTIMATED}")
