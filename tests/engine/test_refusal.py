"""The answer to a refused request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.core import Reason
from headway.engine.vllm.refusal import answer, error_body


def refused(**changes: Any) -> dict[str, Any]:
    """Return a message of the engine."""
    message: dict[str, Any] = {
        "kind": "refused",
        "group": "g",
        "reason": "ttft_unattainable",
        "slo_class": "chat",
        "ttft_target_s": 1.0,
        "tpot_target_s": None,
        "tbt_target_s": None,
        "prompt_tokens": 300,
        "detail": None,
        "bound_s": 1.5,
        "pace_bound_s": None,
        "retry_after_s": 0.5,
    }
    return message | changes


def test_a_refusal_is_a_429_with_the_numbers() -> None:
    """Status, both Retry-After headers and the whole body."""
    status, headers, body = answer(refused())
    assert status == 429
    assert headers == [(b"retry-after", b"1"), (b"retry-after-ms", b"500")]
    assert json.loads(body) == {
        "error": {
            "message": "the first token cannot come within the target: 1500 ms could be promised, "
            "1000 ms were asked for",
            "type": "slo_unattainable",
            "param": None,
            "code": "ttft_unattainable",
            "headway": {"class": "chat", "ttft_target_ms": 1000.0, "ttft_bound_ms": 1500.0, "prompt_tokens": 300},
        }
    }


def test_a_target_below_a_millisecond_is_told_as_it_was_asked() -> None:
    """0.001 ms is not 0 ms."""
    _, _, body = answer(refused(ttft_target_s=1e-6))
    error = json.loads(body)["error"]
    assert error["message"].endswith("1500 ms could be promised, 0.001 ms were asked for")
    assert error["headway"]["ttft_target_ms"] == 0.001


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [(0.0, b"1", b"1"), (-3.0, b"1", b"1"), (0.0004, b"1", b"1"), (1.0, b"1", b"1000"), (1.0001, b"2", b"1001")],
)
def test_retry_after_is_whole_and_at_least_one(wait_s: float, seconds: bytes, milliseconds: bytes) -> None:
    """Rounded up: a client that comes back then must not be early."""
    _, headers, _ = answer(refused(retry_after_s=wait_s))
    assert headers == [(b"retry-after", seconds), (b"retry-after-ms", milliseconds)]


@pytest.mark.parametrize("wait_s", [None, float("inf"), float("nan")])
def test_an_unknown_wait_is_not_told(wait_s: float | None) -> None:
    """No header is better than a wrong one."""
    assert answer(refused(retry_after_s=wait_s))[1] == []


@pytest.mark.parametrize("bound_s", [None, float("inf"), float("nan")])
def test_an_unknown_bound_is_left_out(bound_s: float | None) -> None:
    """The body is valid JSON without infinities."""
    error = json.loads(answer(refused(bound_s=bound_s))[2])["error"]
    assert error["headway"] == {"class": "chat", "ttft_target_ms": 1000.0, "prompt_tokens": 300}
    assert error["message"] == "the first token cannot come within the target"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ttft_unattainable", 429, "slo_unattainable"),
        ("tbt_unattainable", 429, "slo_unattainable"),
        ("kv_exhausted", 429, "slo_unattainable"),
        ("queue_full", 429, "slo_unattainable"),
        ("never_fits", 400, "invalid_request_error"),
        ("draining", 503, "service_unavailable"),
    ],
)
def test_status_and_type_follow_the_code(code: str, status: int, kind: str) -> None:
    """What can never pass is the client's mistake; a server that stops is unavailable."""
    got, _, body = answer(refused(reason=code))
    error = json.loads(body)["error"]
    assert (got, error["type"], error["code"]) == (status, kind, code)


def test_every_reason_of_the_core_is_explained() -> None:
    """No refusal without a sentence of its own."""
    texts = [json.loads(answer(refused(reason=str(r), bound_s=None))[2])["error"]["message"] for r in Reason]
    assert len(set(texts)) == len(Reason)
    assert "the request was refused" not in texts


def test_what_can_never_pass_is_not_retried() -> None:
    """No Retry-After on never_fits, whatever the engine says."""
    assert answer(refused(reason="never_fits"))[1] == []


def test_a_detail_replaces_the_comparison() -> None:
    """When the bound lies within the target, words must say what does not."""
    error = json.loads(answer(refused(detail="it would break a promise"))[2])["error"]
    assert error["message"] == "the first token cannot come within the target: it would break a promise"


def test_the_pace_has_its_own_number() -> None:
    """A refusal for the pace tells the gap that could be kept, not a time to first token."""
    message = refused(reason="tbt_unattainable", bound_s=None, tbt_target_s=0.05, pace_bound_s=0.08)
    assert json.loads(answer(message)[2])["error"]["headway"] == {
        "class": "chat",
        "ttft_target_ms": 1000.0,
        "tbt_target_ms": 50.0,
        "pace_bound_ms": 80.0,
        "prompt_tokens": 300,
    }


def test_an_error_body_names_its_parameter() -> None:
    """As OpenAI's do."""
    error = json.loads(error_body("bad", code="bad_slo_header", status=400, param="x-slo-class"))["error"]
    assert error == {
        "message": "bad",
        "type": "invalid_request_error",
        "param": "x-slo-class",
        "code": "bad_slo_header",
    }
