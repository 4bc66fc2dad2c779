"""The `headway_` series: exact text of a small sequence of messages."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headway.core import Reason, Slo, Step
from headway.core.cost import REGIMES
from headway.engine.report import Message, Outcome, Report
from headway.engine.vllm.metrics import Metrics

CHAT = Slo(name="chat", ttft_s=1.0, tbt_s=0.1)


def outcome(**changes: Any) -> Outcome:
    """A served request of 0.3 s to its first token."""
    fields: dict[str, Any] = {
        "group": "g",
        "slo": CHAT,
        "promised": True,
        "aborted": False,
        "failed": False,
        "missed": (),
        "prompt_tokens": 10,
        "output_tokens": 5,
        "ttft_s": 0.3,
        "tpot_s": 0.06,
        "tbt_max_s": 0.08,
        "prefill_queue_s": 0.1,
        "prefill_compute_s": 0.2,
        "decode_queue_s": 0.0,
        "decode_compute_s": 0.25,
        "preemptions": 0,
    }
    return Outcome(**(fields | changes))


def recorded(report: Report, metrics: Metrics, *, gauges: dict[str, float] | None = None, now_s: float = 0.0) -> None:
    """Hand the messages of a report over."""
    for messages in report.take(gauges).values():
        for message in messages:
            metrics.record(message, now_s)


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of its own."""
    return CollectorRegistry()


def text(registry: CollectorRegistry, *prefixes: str) -> str:
    """The samples whose names start with one of the prefixes, without those of creation times."""
    lines = generate_latest(registry).decode().splitlines()
    chosen = [x for x in lines if not x.startswith("#") and "_created" not in x]
    return "\n".join(x for x in chosen if x.startswith(tuple(f"headway_{p}" for p in prefixes)))


def test_the_text_of_a_small_sequence(registry: CollectorRegistry) -> None:
    """One attained, one missed, one refused, one failed, one that its client gave up."""
    report, metrics = Report(), Metrics(registry)
    report.accepted(0, "g", bound_s=0.5)
    report.first_token(0, "g", queue_s=0.1, since_arrival_s=0.1)
    report.done(0, outcome())
    report.done(0, outcome(missed=("tbt",), tbt_max_s=0.2))
    report.refused(0, "h", reason=Reason.TTFT, slo=CHAT, prompt_tokens=9, detail=None, bound_s=2.0, retry_after_s=None)
    report.done(0, outcome(failed=True))
    report.done(0, outcome(aborted=True, ttft_s=None, tpot_s=None))
    recorded(report, metrics)
    assert text(registry, "requests", "slo_targets", "refusals", "misses") == "\n".join(
        [
            'headway_requests_total{result="attained",slo_class="chat"} 1.0',
            'headway_requests_total{result="missed",slo_class="chat"} 1.0',
            'headway_requests_total{result="refused",slo_class="chat"} 1.0',
            'headway_requests_total{result="failed",slo_class="chat"} 1.0',
            'headway_requests_total{result="aborted",slo_class="chat"} 1.0',
            'headway_slo_targets_total{outcome="attained",slo_class="chat",target="ttft"} 2.0',
            'headway_slo_targets_total{outcome="attained",slo_class="chat",target="tbt"} 1.0',
            'headway_slo_targets_total{outcome="missed",slo_class="chat",target="tbt"} 1.0',
            'headway_slo_targets_total{outcome="refused",slo_class="chat",target="ttft"} 1.0',
            'headway_slo_targets_total{outcome="refused",slo_class="chat",target="tbt"} 1.0',
            'headway_slo_targets_total{outcome="failed",slo_class="chat",target="ttft"} 1.0',
            'headway_slo_targets_total{outcome="failed",slo_class="chat",target="tbt"} 1.0',
            'headway_refusals_total{reason="ttft_unattainable",slo_class="chat"} 1.0',
            'headway_misses_total{slo_class="chat",target="tbt"} 1.0',
        ]
    )


def test_attainment_counts_the_refused_as_not_attained(registry: CollectorRegistry) -> None:
    """attained / all outcomes of a target: 1 of 4 offered, though nobody who was served missed it."""
    report, metrics = Report(), Metrics(registry)
    report.done(0, outcome())
    for _ in range(3):
        report.refused(
            0, "h", reason=Reason.KV, slo=CHAT, prompt_tokens=9, detail=None, bound_s=None, retry_after_s=None
        )
    recorded(report, metrics)
    shares: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == "headway_slo_targets_total" and sample.labels["target"] == "ttft":
                shares[sample.labels["outcome"]] = sample.value
    assert shares == {"attained": 1, "refused": 3}


def test_queue_and_compute_time_are_apart(registry: CollectorRegistry) -> None:
    """Two histograms for the prefill, two for the decode, by class."""
    report, metrics = Report(), Metrics(registry)
    report.done(0, outcome())
    recorded(report, metrics)
    assert text(registry, "prefill_queue_seconds_sum", "prefill_compute_seconds_sum") == (
        'headway_prefill_queue_seconds_sum{slo_class="chat"} 0.1\n'
        'headway_prefill_compute_seconds_sum{slo_class="chat"} 0.2'
    )
    assert text(registry, "decode_queue_seconds_sum", "decode_compute_seconds_sum") == (
        'headway_decode_queue_seconds_sum{slo_class="chat"} 0.0\n'
        'headway_decode_compute_seconds_sum{slo_class="chat"} 0.25'
    )


def gauges(**changes: float) -> dict[str, float]:
    """The state that a driver reports."""
    keys = [
        "decoding",
        "pending",
        "undecided",
        "pending_tokens",
        "bookings",
        "tenants",
        "exceeded_stretch",
        "judged_stretch",
        *(f"{key}_{regime}" for key in ("exceeded", "judged", "factor", "drifting") for regime in REGIMES),
        "eps",
        "ready",
        "cost_g",
        "cost_a",
        "cost_b",
    ]
    return dict.fromkeys(keys, 0.0) | {"judged_mixed": 4, "exceeded_mixed": 1} | changes


def test_the_engine_message_sets_gauges_and_counts_steps(registry: CollectorRegistry) -> None:
    """Queue, envelope, steps, busy time; the busy share is that since the message before."""
    report, metrics = Report(), Metrics(registry)
    report.decision(0.0004, 96)
    recorded(report, metrics, gauges=gauges(pending=3, pending_tokens=700), now_s=10.0)
    report.decision(0.0002, 64)
    report.step(Step(q=10, n=1, K=5, X=0, seconds=0.5))
    report.failed_open()
    recorded(report, metrics, gauges=gauges(pending=2, pending_tokens=600), now_s=12.0)
    assert text(registry, "queue_", "token_budget", "steps", "engine_busy", "fail_open") == "\n".join(
        [
            "headway_steps_total 1.0",
            "headway_engine_busy_seconds_total 0.5",
            "headway_fail_open_total 1.0",
            "headway_queue_length 2.0",
            "headway_queue_tokens 600.0",
            "headway_token_budget 64.0",
            "headway_engine_busy_ratio 0.25",
        ]
    )
    assert text(registry, "step_envelope_exceeded", "decision_seconds_sum", "decision_seconds_count") == "\n".join(
        [
            "headway_decision_seconds_count 2.0",
            "headway_decision_seconds_sum 0.0006000000000000001",
            'headway_step_envelope_exceeded_ratio{regime="mixed"} 0.25',
        ]
    )


def test_the_envelope_is_measured_by_regime(registry: CollectorRegistry) -> None:
    """Decode-only and mixed steps err differently, so exceedance, factor and drift are told apart."""
    metrics = Metrics(registry)
    state = gauges(judged_decode_only=10, exceeded_decode_only=5, factor_decode_only=1.5, drifting_decode_only=1)
    recorded(Report(), metrics, gauges=state)
    assert text(registry, "step_envelope_exceeded", "step_envelope_factor", "step_envelope_drifting") == "\n".join(
        [
            'headway_step_envelope_exceeded_ratio{regime="decode_only"} 0.5',
            'headway_step_envelope_exceeded_ratio{regime="mixed"} 0.25',
            'headway_step_envelope_factor{regime="decode_only"} 1.5',
            'headway_step_envelope_factor{regime="mixed"} 0.0',
            'headway_step_envelope_drifting{regime="decode_only"} 1.0',
            'headway_step_envelope_drifting{regime="mixed"} 0.0',
        ]
    )


def test_the_envelopes_of_stretches_are_told_once_they_are_known(registry: CollectorRegistry) -> None:
    """Before enough steps were seen there is no burst, and nothing was judged; the ratio is that of what was."""
    metrics = Metrics(registry)
    recorded(Report(), metrics, gauges=gauges())
    assert "headway_stretch_burst" not in text(registry, "stretch")
    recorded(Report(), metrics, gauges=gauges(judged_stretch=8, exceeded_stretch=2) | {"burst_1.1": 0.04})
    assert text(registry, "stretch") == "\n".join(
        ["headway_stretch_exceeded_ratio 0.25", 'headway_stretch_burst_seconds{rate="1.1"} 0.04']
    )
    recorded(Report(), metrics, gauges=gauges())
    assert 'headway_stretch_burst_seconds{rate="1.1"} NaN' in text(registry, "stretch")


def test_an_idle_engine_is_not_busy(registry: CollectorRegistry) -> None:
    """Its last report says that nothing is left, and no other comes until there is work."""
    report, metrics = Report(), Metrics(registry)
    recorded(report, metrics, gauges=gauges(decoding=1), now_s=10.0)
    report.step(Step(q=10, n=1, K=5, X=0, seconds=0.5))
    recorded(report, metrics, gauges=gauges(decoding=1), now_s=11.0)
    assert text(registry, "engine_busy_ratio") == "headway_engine_busy_ratio 0.5"
    recorded(report, metrics, gauges=gauges(), now_s=12.0)
    assert text(registry, "engine_busy_ratio") == "headway_engine_busy_ratio 0.0"


def test_preemptions_are_counted_with_what_they_cost(registry: CollectorRegistry) -> None:
    """Promised and unpromised apart."""
    report, metrics = Report(), Metrics(registry)
    report.preempted("a", 120, True)
    report.preempted("b", 30, False)
    recorded(report, metrics)
    assert text(registry, "preempt") == "\n".join(
        [
            'headway_preemptions_total{promised="true"} 1.0',
            'headway_preemptions_total{promised="false"} 1.0',
            "headway_preempted_tokens_total 150.0",
        ]
    )


def test_a_registry_is_claimed_once(registry: CollectorRegistry) -> None:
    """A second instance in the process neither clashes nor counts twice; another registry is its own."""
    assert Metrics.claim(registry) is not None
    assert Metrics.claim(registry) is None
    assert Metrics.claim(CollectorRegistry()) is not None


# The report behind it


def test_messages_go_to_their_client() -> None:
    """Each API process gets its own; gauges go to the first."""
    report = Report()
    assert not report
    report.first_token(0, "a", queue_s=0.0, since_arrival_s=0.1)
    report.first_token(1, "b", queue_s=0.0, since_arrival_s=0.1)
    assert report
    taken = report.take({"pending": 1.0})
    assert [m["group"] for m in taken[1]] == ["b"]
    assert [m["kind"] for m in taken[0]] == ["first_token", "engine"]
    assert not report


def test_what_a_report_measured_is_told_once() -> None:
    """Counters since the last gauges; without gauges they are kept for the next time."""
    report = Report()
    report.decision(0.001, 5)
    report.step(Step(q=1, n=0, K=0, X=0, seconds=0.25))
    assert report.take(None) == {}
    first: Message = report.take({})[0][0]
    assert (first["steps"], first["busy_s"], first["decisions_s"]) == (1, 0.25, [0.001])
    second: Message = report.take({})[0][0]
    assert (second["steps"], second["busy_s"], second["decisions_s"]) == (0, 0.0, [])


def test_messages_are_plain_values() -> None:
    """Any transport can carry them."""
    import json

    report = Report()
    report.done(0, outcome(missed=("ttft",)))
    report.refused(0, "h", reason=Reason.KV, slo=CHAT, prompt_tokens=9, detail="x", bound_s=None, retry_after_s=1.0)
    messages = report.take({"pending": 1.0})
    assert json.loads(json.dumps(messages)) == {"0": messages[0]}
