"""SLO targets: their command-line form and the judgement of a request."""

from __future__ import annotations

import pytest

from headway.errors import InputError
from headway.replay.targets import Targets, parse_slo


def test_targets_by_class():
    """Seconds, or a number with its unit; without a class they are the default ones."""
    assert parse_slo(["chat:ttft=1,tpot=120ms", "ttft=6s,tbt=0.5"]) == {
        "chat": Targets(ttft_s=1.0, tpot_s=0.12),
        "default": Targets(ttft_s=6.0, tbt_s=0.5),
    }
    assert parse_slo([]) == {}


@pytest.mark.parametrize(
    "text",
    ["chat:ttft", "chat:", ":ttft=1", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "ttft=86401", "ttft=1,ttft=2",
     "latency=1", "ttft=1h", "ttft="],
)  # fmt: skip
def test_bad_targets_name_the_text(text):
    """Every broken text is an input error that quotes it."""
    with pytest.raises(InputError, match="--slo"):
        parse_slo([text])


def test_a_class_given_twice_is_an_error():
    """Two lines for one class would silently lose one."""
    with pytest.raises(InputError, match="twice"):
        parse_slo(["chat:ttft=1", "chat:tpot=1"])


@pytest.mark.parametrize(
    ("ttft", "tpot", "tbt", "met"),
    [
        (1.0, 0.1, 0.2, True),
        (1.000001, 0.1, 0.2, False),
        (1.0, 0.100001, 0.2, False),
        (1.0, 0.1, 0.200001, False),
        (1.0, None, None, True),
        (None, 0.1, 0.2, False),
    ],
)
def test_all_targets_must_be_met(ttft, tpot, tbt, met):
    """On the target is met; a one-token answer has no pace to break; no first token breaks TTFT."""
    targets = Targets(ttft_s=1.0, tpot_s=0.1, tbt_s=0.2)
    assert targets.met(ttft_s=ttft, tpot_s=tpot, tbt_max_s=tbt) is met


def test_targets_survive_run_json():
    """as_dict and from_dict are inverse."""
    targets = Targets(ttft_s=1.0, tbt_s=0.2)
    assert Targets.from_dict(targets.as_dict()) == targets
