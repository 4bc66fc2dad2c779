"""Blocks that sequences of one request have in common."""

from __future__ import annotations

from headway.engine.vllm.siblings import MOST, Siblings


def test_who_has_the_deepest_common_block() -> None:
    """The second shares two blocks with the first, the third three of which the last is the second's."""
    siblings = Siblings()
    found = [
        siblings.shared(name, hashes, group="g", size=4)
        for name, hashes in (("a", "xyz"), ("b", "xyuv"), ("c", "xyuw"), ("d", "qr"))
    ]
    assert found == [(0, None), (2, "a"), (3, "b"), (0, None)]


def test_requests_do_not_share() -> None:
    """Another group, and the same name once more after the first was whole."""
    siblings = Siblings()
    assert siblings.shared("a", "xy", group="g", size=2) == (0, None)
    assert siblings.shared("b", "xy", group="h", size=2) == (0, None)
    assert siblings.shared("c", "xy", group="g", size=2) == (2, "a")
    assert siblings.shared("d", "xy", group="g", size=2) == (0, None)


def test_what_never_comes_whole_is_forgotten() -> None:
    """The oldest go first."""
    siblings = Siblings()
    for number in range(MOST + 1):
        siblings.shared("first", "x", group=f"g{number}", size=2)
    assert siblings.shared("second", "x", group="g0", size=2) == (0, None)
    assert siblings.shared("second", "x", group=f"g{MOST}", size=2) == (1, "first")
