"""Queue time against compute time as the server counts them: its `/metrics` histograms before and after a run.

Where the server names the queue time of each answer (`x-headway-queue-ms`), the run has it by request. Other servers
only keep Prometheus histograms; their growth over the run gives the exact mean and, for a percentile, the bound of its
bucket. Everything that the server served in between is in them, requests of other clients too: `n` tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

#: What is measured -> names of the histogram, seconds: vLLM, SGLang, TensorRT-LLM, text-generation-inference.
HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "queue": (
        "vllm:request_queue_time_seconds",
        "sglang:queue_time_seconds",
        "trtllm_request_queue_time_seconds",
        "tgi_request_queue_duration",
    ),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "inference": ("vllm:request_inference_time_seconds", "tgi_request_inference_duration"),
    "ttft": (
        "vllm:time_to_first_token_seconds",
        "sglang:time_to_first_token_seconds",
        "trtllm_time_to_first_token_seconds",
    ),
}
#: What is counted -> names of the counter.
COUNTERS: dict[str, tuple[str, ...]] = {"preemptions": ("vllm:num_preemptions_total",)}

_POINTS = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
_KIND = {name: kind for kind, names in HISTOGRAMS.items() for name in names}
_COUNTER = {name: kind for kind, names in COUNTERS.items() for name in names}
_SAMPLE = re.compile(r"^([a-z][\w:]*?)(_bucket|_sum|_count)?(?:\{(.*)\})? ([^ ]+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Histogram:
    """Running totals of one histogram: `buckets` holds the count at or below each upper bound in seconds."""

    count: float = 0.0
    total_s: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """What was read of `/metrics` at one moment; series of one name are added up."""

    histograms: dict[str, Histogram] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


def parse(text: str, model: str | None = None) -> Snapshot:
    """Return the known histograms and counters of a Prometheus text; of one `model` where series name theirs.

    A line that can't be read is left out: metrics are a courtesy of the server, never a reason to fail a run.
    """
    found = Snapshot()
    for line in text.splitlines():
        # Most lines are none of ours; the look at the first letter keeps a large page cheap.
        if not line or line[0] not in "vst":
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, part, raw_labels, raw = sample.groups()
        whole = name + (part or "")
        kind = _KIND.get(name) if part else None
        if kind is None and whole not in _COUNTER:
            continue
        try:
            value = float(raw)
        except ValueError:
            continue
        labels = dict(_LABEL.findall(raw_labels or ""))
        if not math.isfinite(value) or (model is not None and labels.get("model_name", model) != model):
            continue
        if kind is None:
            found.counters[_COUNTER[whole]] = found.counters.get(_COUNTER[whole], 0.0) + value
            continue
        histogram = found.histograms.setdefault(kind, Histogram())
        if part == "_count":
            histogram.count += value
        elif part == "_sum":
            histogram.total_s += value
        else:
            bound = _bound(labels.get("le", ""))
            if bound is not None:
                histogram.buckets[bound] = histogram.buckets.get(bound, 0.0) + value
    return found


def growth(before: Snapshot, after: Snapshot) -> dict[str, dict | int]:
    """Return what a run added: histogram -> n, mean_s, p50/p90/p99_at_most_s (None: above the last bound); counts.

    A histogram that shrank (the server was started anew) or did not grow is left out.
    """
    told: dict[str, dict | int] = {}
    for kind, last in after.histograms.items():
        first = before.histograms.get(kind, Histogram())
        n = last.count - first.count
        if n <= 0 or last.total_s < first.total_s:
            continue
        grown = {bound: count - first.buckets.get(bound, 0.0) for bound, count in last.buckets.items()}
        told[kind] = {"n": round(n), "mean_s": round((last.total_s - first.total_s) / n, 6)} | {
            f"{point}_at_most_s": _at_most(grown, n, q) for point, q in _POINTS.items()
        }
    for kind, count in after.counters.items():
        if (more := count - before.counters.get(kind, 0.0)) >= 0 and told:
            told[kind] = round(more)
    return told


def in_words(told: Mapping[str, object]) -> str:
    """Return one sentence for `growth`; empty when the server told nothing."""
    parts = []
    for kind in (*HISTOGRAMS, *COUNTERS):
        value = told.get(kind)
        if value is None:
            continue
        if isinstance(value, Mapping):
            bound = value["p99_at_most_s"]
            tail = "above its last bucket" if bound is None else f"at most {bound:g} s"
            parts.append(f"{kind} mean {value['mean_s'] * 1e3:.1f} ms, P99 {tail} (n {value['n']})")
        else:
            parts.append(f"{value} {kind}")
    return "; ".join(parts)


def _at_most(grown: Mapping[float, float], n: float, q: float) -> float | None:
    """Return the upper bound of the bucket that holds the nearest rank; None for the bucket without one."""
    rank = math.ceil(q * n - 1e-9)
    return next((bound for bound in sorted(grown) if grown[bound] >= rank and math.isfinite(bound)), None)


def _bound(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
