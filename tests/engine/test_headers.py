"""SLO headers: plain numbers in, everything else refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.vllm.headers import HeaderError, parse

KNOWN = ("chat", "document")


def one(name: str, value: bytes) -> dict[str, str | float]:
    """Parse a single header."""
    return parse([(name.encode(), value)], KNOWN)


@pytest.mark.parametrize(
    ("value", "number"), [(b"1", 1.0), (b" 250 ", 250.0), (b"0.5", 0.5), (b"007", 7.0), (b"86400000", 86_400_000.0)]
)
def test_plain_numbers_are_taken(value: bytes, number: float) -> None:
    """Milliseconds above 0, at most a day."""
    assert one("x-slo-ttft-ms", value) == {"ttft_ms": number}


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-tbt-ms"])
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" ",
        b"soon",
        b"nan",
        b"inf",
        b"-inf",
        b"-1",
        b"+1",
        b"0",
        b"0.0",
        b"1e3",
        b"0x10",
        b"1_000",
        b"1,000",
        b"1.",
        b".5",
        b"1 2",
        b"86400000.1",
        b"86400001",
        b"9" * 400,
        "\u0661\u0662".encode(),  # Arabic digits, which float() takes
        b"\xb2",  # superscript two in Latin-1
        b"1\x00",
    ],
)
def test_everything_else_is_refused_by_name(name: str, value: bytes) -> None:
    """The error names header, value (cut) and what is expected."""
    with pytest.raises(
        HeaderError, match=rf"^{name}: .*expected a number of milliseconds above 0 and at most"
    ) as found:
        one(name, value)
    assert found.value.header == name
    assert len(str(found.value)) < 250


def test_an_unknown_class_lists_the_known_ones() -> None:
    """Also an empty one; case matters."""
    for value in (b"gold", b"", b"Chat"):
        with pytest.raises(HeaderError, match=r"^x-slo-class: .*expected one of chat, document$"):
            one("x-slo-class", value)


def test_names_are_case_insensitive_and_others_are_left_alone() -> None:
    """As in HTTP."""
    headers = [(b"X-SLO-Class", b"chat"), (b"x-other", b"nan"), (b"X-Slo-Tbt-Ms", b"80")]
    assert parse(headers, KNOWN) == {"slo_class": "chat", "tbt_ms": 80.0}


@pytest.mark.parametrize("name", ["x-slo-tftf-ms", "X-SLO-Weight", "x-slo-"])
def test_a_slip_of_the_pen_is_no_silent_default(name: str) -> None:
    """There is no such header; the known ones are listed."""
    with pytest.raises(HeaderError, match=r"x-slo-class, x-slo-ttft-ms, x-slo-tpot-ms, x-slo-tbt-ms") as caught:
        one(name, b"5")
    assert caught.value.header == name.lower()


def test_a_header_that_comes_twice_is_refused() -> None:
    """Whichever wins, one of the two would be ignored in silence."""
    with pytest.raises(HeaderError, match="x-slo-ttft-ms: '2': expected the header once"):
        parse([(b"x-slo-ttft-ms", b"1"), (b"X-SLO-TTFT-MS", b"2")], KNOWN)


@given(name=st.sampled_from(["x-slo-ttft-ms", "x-slo-class"]), value=st.binary(max_size=200))
def test_any_bytes_give_a_sound_value_or_the_named_error(name: str, value: bytes) -> None:
    """No other exception, and no number outside (0, one day]."""
    try:
        found = one(name, value)
    except HeaderError:
        return
    assert found.get("slo_class") in (None, *KNOWN)
    assert 0 < found.get("ttft_ms", 1.0) <= 86_400_000  # type: ignore[operator]
