"""Headway's Prometheus metrics, on vLLM's own /metrics (the default registry of the API process)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakSet

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from headway.core.cost import REGIMES
from headway.core.stretch import RATES
from headway.engine.vllm.messages import ENV_STEP_LOG

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160, 640)
_FAST = (5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)

#: Registries that hold the series already.
_claimed: WeakSet[CollectorRegistry] = WeakSet()


class Metrics:
    """All `headway_` series; fed with the engine's messages.

    Attainment counts every offered request: refused and failed ones are not attained. Requests that their client gave
    up before a target was missed are counted apart (`aborted`) and are in no target's series.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        by_class = ["slo_class"]

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"headway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"headway_{name}", text, labels, registry=registry, multiprocess_mode="mostrecent")

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"headway_{name}", text, by_class, registry=registry, buckets=buckets)

        self.requests = counter("requests_total", "Requests by what became of them", [*by_class, "result"])
        self.targets = counter(
            "slo_targets_total", "Targets of served requests by outcome", [*by_class, "target", "outcome"]
        )
        self.refusals = counter("refusals_total", "Refused requests by reason", [*by_class, "reason"])
        self.misses = counter(
            "misses_total", "Accepted requests that broke a target, by first broken one", [*by_class, "target"]
        )
        self.preempted = counter("preemptions_total", "Requests that lost their KV while running", ["promised"])
        self.lost_tokens = counter("preempted_tokens_total", "Computed tokens lost to preemption", [])
        self.prefill_queue = histogram("prefill_queue_seconds", "Time before the first token in no engine step")
        self.prefill_compute = histogram("prefill_compute_seconds", "Time before the first token inside steps")
        self.decode_queue = histogram("decode_queue_seconds", "Time after the first token in no engine step")
        self.decode_compute = histogram("decode_compute_seconds", "Time after the first token inside steps")
        self.ttft = histogram("ttft_seconds", "Arrival to first token, seen from the engine plus the front")
        self.tpot = histogram("tpot_seconds", "Mean time per output token after the first, per request")
        self.decision = Histogram(
            "headway_decision_seconds", "Time of plan and admission per step", registry=registry, buckets=_FAST
        )
        self.steps = counter("steps_total", "Engine steps", [])
        self.busy = counter("engine_busy_seconds_total", "Time inside engine steps", [])
        self.fail_open = counter("fail_open_total", "Steps that ran without a decision because it raised", [])
        self.gauges = {
            key: gauge(name, text)
            for key, name, text in (
                ("decoding", "decoding_requests", "Requests that produce tokens"),
                ("pending", "queue_length", "Accepted requests whose prompt is not computed"),
                ("undecided", "undecided_requests", "Requests without a verdict"),
                ("pending_tokens", "queue_tokens", "Prompt tokens still to compute of accepted requests"),
                ("bookings", "bookings", "Refused requests that were told when to come back and may still do"),
                ("tenants", "tenants", "API keys that are told apart, each class counted apart"),
                ("token_budget", "token_budget", "Token budget of the last step"),
                ("eps", "step_envelope_eps", "Share of steps that may exceed the envelope"),
                ("ready", "step_cost_ready", "1 when the step cost is known well enough for promises"),
                ("cost_g", "step_cost_base_seconds", "Learned cost of a step"),
                ("cost_a", "step_cost_prefill_token_seconds", "Learned cost of a prefill token"),
                ("cost_b", "step_cost_decode_seconds", "Learned cost of a decode"),
            )
        }
        self.envelopes = {
            key: gauge(name, text, ["regime"])
            for key, name, text in (
                ("exceeded", "step_envelope_exceeded_ratio", "Share of recent steps that took longer than envelope"),
                ("factor", "step_envelope_factor", "Envelope over mean of a step"),
                ("drifting", "step_envelope_drifting", "1 while promises are tightened because steps exceed too often"),
            )
        }
        self.stretch_exceeded = gauge(
            "stretch_exceeded_ratio", "Share of recent steps that ended a stretch longer than its envelope"
        )
        self.bursts = gauge(
            "stretch_burst_seconds", "What steps in a row take beyond the rate times their mean", ["rate"]
        )
        self.busy_ratio = gauge("engine_busy_ratio", "Share of time inside steps since the last report; 0 while idle")
        self._told: set[float] = set()
        self._last_s: float | None = None
        if log := os.environ.get(ENV_STEP_LOG):
            named = Gauge(
                "headway_step_log",
                "1 for the file that the engine logs its steps in",
                ["file"],
                registry=registry,
                multiprocess_mode="mostrecent",
            )
            named.labels(os.path.abspath(log)).set(1)

    @classmethod
    def claim(cls, registry: CollectorRegistry = REGISTRY) -> Self | None:
        """Return the metrics of a registry to the first who asks, and None to all others in the process."""
        if registry in _claimed:
            return None
        _claimed.add(registry)
        return cls(registry)

    def record(self, message: dict[str, Any], now_s: float) -> None:
        """Count one message of the engine; `now_s` is any monotonic clock."""
        kind = message["kind"]
        if kind == "engine":
            self._engine(message, now_s)
        elif kind == "refused":
            name = message["slo_class"]
            self.requests.labels(name, "refused").inc()
            self.refusals.labels(name, message["reason"]).inc()
            for target in ("ttft", "tpot", "tbt"):
                if message[f"{target}_target_s"] is not None:
                    self.targets.labels(name, target, "refused").inc()
        elif kind == "done":
            self._done(message)
        elif kind == "preempted":
            self.preempted.labels(str(message["promised"]).lower()).inc()
            self.lost_tokens.inc(message["lost_tokens"])

    def _done(self, m: dict[str, Any]) -> None:
        name = m["slo_class"]
        if m["aborted"]:
            self.requests.labels(name, "aborted").inc()
            return
        self.requests.labels(name, "failed" if m["failed"] else "missed" if m["missed"] else "attained").inc()
        if m["missed"]:
            self.misses.labels(name, m["missed"][0]).inc()
        for target in ("ttft", "tpot", "tbt"):
            if m[f"{target}_target_s"] is not None:
                outcome = "missed" if target in m["missed"] else "failed" if m["failed"] else "attained"
                self.targets.labels(name, target, outcome).inc()
        for histogram, key in (
            (self.ttft, "ttft_s"),
            (self.tpot, "tpot_s"),
            (self.prefill_queue, "prefill_queue_s"),
            (self.prefill_compute, "prefill_compute_s"),
            (self.decode_queue, "decode_queue_s"),
            (self.decode_compute, "decode_compute_s"),
        ):
            if m[key] is not None:
                histogram.labels(name).observe(m[key])

    def _engine(self, m: dict[str, Any], now_s: float) -> None:
        for key, gauge in self.gauges.items():
            if m[key] is not None:
                gauge.set(m[key])
        for regime in REGIMES:
            if m[f"judged_{regime}"]:
                ratio = m[f"exceeded_{regime}"] / m[f"judged_{regime}"]
                self.envelopes["exceeded"].labels(regime).set(ratio)
            for key in ("factor", "drifting"):
                self.envelopes[key].labels(regime).set(m[f"{key}_{regime}"])
        if m["judged_stretch"]:
            self.stretch_exceeded.set(m["exceeded_stretch"] / m["judged_stretch"])
        for rate in RATES:
            burst = m.get(f"burst_{rate:g}")
            if burst is not None or rate in self._told:  # forgotten when the mean is scaled
                self._told.add(rate)
                self.bursts.labels(f"{rate:g}").set(math.nan if burst is None else burst)
        self.steps.inc(m["steps"])
        self.busy.inc(m["busy_s"])
        self.fail_open.inc(m["failures"])
        if not (m["pending"] or m["decoding"] or m["undecided"]):
            self.busy_ratio.set(0.0)  # no report comes before there is work again
        elif self._last_s is not None and now_s > self._last_s:
            self.busy_ratio.set(min(1.0, m["busy_s"] / (now_s - self._last_s)))
        self._last_s = now_s
        for seconds in m["decisions_s"]:
            self.decision.observe(seconds)
