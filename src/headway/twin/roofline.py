"""Estimated profiles for hardware that is not at hand: a roofline from datasheets.

    g = weights / memory bandwidth + overhead + all-reduce latency
    a = 2 P / FLOP/s + all-reduce bytes a token / link          (P: parameters)
    b = a                       (a decode computes one token; its share of the weights is in g)
    k = KV bytes a token / memory bandwidth
    x = 4 * layers * hidden / FLOP/s                            (scores and values of one token pair)

The sum of a memory term and a compute term overstates a step near the knee, by at most a factor of two: a real step
takes nearer to the larger of the two. FLOP/s and bandwidth are multiplied by the efficiencies below. Such a profile
is labelled `estimated`; calibrate on the machine to get numbers to rely on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core import CostCoefficients
from headway.errors import InputError
from headway.twin.noise import NoiseModel
from headway.twin.profile import Profile

#: Shares of the datasheet's peak that dense layers and memory reads reach in practice (stated, not measured here).
COMPUTE_EFFICIENCY = 0.55
MEMORY_EFFICIENCY = 0.75

#: Fixed cost of a step beside the weights: launches, sampling, scheduling.
OVERHEAD_S = 0.002

#: Of the device's memory: what vLLM takes by default, and what activations need beside the weights.
MEMORY_SHARE = 0.90
ACTIVATION_BYTES = 2e9

_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Datasheet numbers: dense bfloat16 FLOP/s, memory bytes/s and bytes, link bytes/s in one direction."""

    flops: float
    bandwidth: float
    memory: float
    link: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of a decoder: parameters, layers, hidden size, KV heads, head size, longest context."""

    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_size: int
    context: int


#: Datasheets of the vendors, dense rates without sparsity. Link: NVLink or PCIe in one direction.
DEVICES: dict[str, Device] = {
    "a100-80g": Device(flops=312e12, bandwidth=2.039e12, memory=80e9, link=300e9),
    "h100-sxm": Device(flops=989e12, bandwidth=3.35e12, memory=80e9, link=450e9),
    "h200-sxm": Device(flops=989e12, bandwidth=4.8e12, memory=141e9, link=450e9),
    "l4": Device(flops=121e12, bandwidth=0.3e12, memory=24e9, link=32e9),
    "l40s": Device(flops=362e12, bandwidth=0.864e12, memory=48e9, link=32e9),
    "rtx4090": Device(flops=165e12, bandwidth=1.008e12, memory=24e9, link=32e9),
    "mi300x": Device(flops=1307e12, bandwidth=5.3e12, memory=192e9, link=448e9),
}

#: Published configurations.
MODELS: dict[str, Model] = {
    "smollm2-135m": Model(parameters=0.1345e9, layers=30, hidden=576, kv_heads=3, head_size=64, context=8192),
    "qwen2.5-7b": Model(parameters=7.62e9, layers=28, hidden=3584, kv_heads=4, head_size=128, context=32768),
    "llama-3.1-8b": Model(parameters=8.03e9, layers=32, hidden=4096, kv_heads=8, head_size=128, context=131072),
    "qwen2.5-32b": Model(parameters=32.8e9, layers=64, hidden=5120, kv_heads=8, head_size=128, context=32768),
    "llama-3.1-70b": Model(parameters=70.6e9, layers=80, hidden=8192, kv_heads=8, head_size=128, context=131072),
}


def estimate(device: str, model: str, *, tensor_parallel: int = 1) -> Profile:
    """Return the estimated profile of `model` on `tensor_parallel` devices.

    Raises:
        InputError: an unknown name, or a model that does not fit the memory.
    """
    for key, name, table in (("device", device, DEVICES), ("model", model, MODELS)):
        if name not in table:
            raise InputError(f"{key} = {name!r}: expected one of {', '.join(table)}")
    if tensor_parallel not in (1, 2, 4, 8):
        raise InputError(f"tensor_parallel = {tensor_parallel!r}: expected 1, 2, 4 or 8")
    chip, shape, n = DEVICES[device], MODELS[model], tensor_parallel
    flops = chip.flops * COMPUTE_EFFICIENCY * n
    bandwidth = chip.bandwidth * MEMORY_EFFICIENCY * n
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * _BYTES
    weights = shape.parameters * _BYTES
    reduce_s = 0.0
    if n > 1:  # two all-reduces a layer; a ring moves 2 (n - 1) / n of the bytes over each link
        reduce_s = 2 * shape.layers * shape.hidden * _BYTES * 2 * (n - 1) / n / chip.link
    token_s = 2 * shape.parameters / flops + reduce_s
    pool = chip.memory * MEMORY_SHARE * n - weights - ACTIVATION_BYTES * n
    blocks = math.floor(pool / kv_bytes / 16)
    if blocks < 64:
        raise InputError(
            f"{model} on {n} x {device}: {weights / 1e9:.0f} GB of weights leave {max(blocks, 0)} KV blocks of "
            "16 tokens: expected at least 64 (more devices, or a smaller model)"
        )
    return Profile(
        name=f"{model} on {n} x {device}",
        label="estimated",
        cost=CostCoefficients(
            g=weights / bandwidth + OVERHEAD_S + (2 * shape.layers * 10e-6 if n > 1 else 0.0),
            a=token_s,
            b=token_s,
            k=kv_bytes / bandwidth,
            x=4 * shape.layers * shape.hidden / flops,
        ),
        envelope_factor=1.2,
        noise=NoiseModel(sigma=0.03),
        engine={
            "token_budget": 8192,
            "max_running": 256,
            "max_model_len": min(shape.context, blocks * 16),
            "block_size": 16,
            "kv_blocks": blocks,
            "async_lag": True,
            "front_s": 0.005,
        },
        provenance={
            "source": "roofline from datasheets",
            "compute_efficiency": COMPUTE_EFFICIENCY,
            "memory_efficiency": MEMORY_EFFICIENCY,
            "overhead_s": OVERHEAD_S,
            "flops": chip.flops,
            "bandwidth_bytes_s": chip.bandwidth,
            "memory_bytes": chip.memory,
            "link_bytes_s": chip.link,
            "tensor_parallel": n,
        },
    )
