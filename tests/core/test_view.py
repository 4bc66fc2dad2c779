"""What a decision may look at."""

from __future__ import annotations

import math

import pytest

from _build import decoding, request, view
from headway.core import CostCoefficients, KvView, Ledger

#: A decode-only step takes 20 ms whatever it holds.
FLAT = CostCoefficients(g=0.020, a=0.001, b=0.0)


def test_slack_is_that_of_the_most_urgent_decode() -> None:
    """From now to the earliest due token; behind a step in flight, from its end to the token after its own."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1), request(1, tpot=0.3), first_s=1.0)
    assert view(ledger, FLAT, now=1.02).slack_s == pytest.approx(0.08)
    assert view(ledger, FLAT, now=1.02, residual_s=0.03).slack_s == pytest.approx(0.15)


def test_nothing_decoding_is_no_limit() -> None:
    """Also decodes without a pace set none."""
    ledger = Ledger()
    assert view(ledger, FLAT).slack_s == math.inf
    decoding(ledger, request(0))
    assert view(ledger, FLAT).slack_s == math.inf


def test_a_late_decode_that_can_catch_up_still_counts() -> None:
    """20 ms steps against a pace of 100 ms win 80 ms a token back; with 9 tokens to come 50 ms late is no loss."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1, output=10), first_s=1.0)
    assert view(ledger, FLAT, now=1.15).slack_s == pytest.approx(-0.05)


def test_a_decode_that_is_lost_slows_nobody() -> None:
    """With its last token to come and 50 ms late nothing saves it: the others' slack rules."""
    ledger = Ledger()
    decoding(ledger, request(0, tpot=0.1, output=2), request(1, tpot=0.5, output=10), first_s=1.0)
    assert view(ledger, FLAT, now=1.15).slack_s == pytest.approx(0.35)


def test_slack_agrees_with_its_definition_over_many_decodes() -> None:
    """The least due among the decodes that are in time, or whose last token still can be in decode-only steps."""
    ledger = Ledger()
    for seq in range(40):
        decoding(ledger, request(seq, tpot=0.0313 + 0.0071 * (seq % 11), output=2 + seq % 5), first_s=0.002 * seq)
    for now in (0.0537, 0.1019, 0.1333, 0.2071):
        end, alone = now, 0.020
        savable = [
            r.next_due_s
            for r in ledger.decoding.values()
            if r.next_due_s - end >= alone
            or r.next_due_s + (r.remaining_output - 1) * r.slo.pace_s >= end + r.remaining_output * alone
        ]
        assert view(ledger, FLAT, now=now).slack_s == pytest.approx(min(savable, default=math.inf) - end)


def test_blocks_are_rounded_up() -> None:
    """The last block of a request may be mostly empty."""
    kv = KvView(block_size=16, total_blocks=10, free_blocks=10)
    assert [kv.blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_under_a_hard_pace_the_token_in_flight_starts_the_next_gap() -> None:
    """Nothing is banked with `tbt`: behind a step in flight there is one gap from its end."""
    ledger = Ledger()
    decoding(ledger, request(0, tbt=0.1), first_s=1.0)
    assert view(ledger, FLAT, now=1.01, residual_s=0.02).slack_s == pytest.approx(0.1)
