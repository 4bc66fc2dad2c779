"""The driver: all sequences of one HTTP request are served or refused together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driver_script import FULL, Scripted, accept_all, engine, kinds, message, refuse_all

from headway.core import Accept, EngineView, RequestState, Verdict
from headway.core.desk import GROUP_LATE_S, GROUP_WAIT_S
from headway.engine.base import RequestTag


def test_a_group_is_served_together() -> None:
    """Asked about once all are there; one message, whose bound is that of the last."""
    fake = engine(lambda view, request: Accept(bound_s=0.1 * (1 + request.seq)))
    fake.add("a0", prompt_tokens=10, group="a", size=3)
    assert fake.step() == []
    fake.add("a1", prompt_tokens=10, group="a", size=3)
    fake.add("a2", prompt_tokens=10, group="a", size=3)
    fake.run()
    assert [k for k in kinds(fake) if k[0] == "accepted"] == [("accepted", "a")]
    assert message(fake, "accepted", "a")["bound_s"] == pytest.approx(0.3)
    assert fake.driver.desk.empty


def test_a_group_with_one_unpromised_member_is_not_promised() -> None:
    """A bound that holds for some of it would say nothing."""
    fake = engine(lambda view, request: Accept(bound_s=None if request.seq else 0.5))
    fake.add("a0", prompt_tokens=10, group="a", size=2)
    fake.add("a1", prompt_tokens=10, group="a", size=2)
    fake.run()
    assert message(fake, "accepted", "a")["bound_s"] is None


def test_a_group_is_refused_together() -> None:
    """The third does not fit, so the first two are taken back; one refusal is told."""
    fake = engine(lambda view, request: FULL if len(view.ledger.pending) == 2 else Accept(bound_s=1.0))
    for i in range(3):
        fake.add(f"a{i}", prompt_tokens=10, group="a", size=3)
    assert sorted(e.request for e in fake.run() if e.kind == "refused") == ["a0", "a1", "a2"]
    assert kinds(fake) == [("refused", "a")]
    ledger = fake.driver.ledger
    ledger.check()
    assert (ledger.requests, ledger.reserved_tokens, ledger.paces) == ({}, 0, {})
    assert (fake.driver.desk.empty, fake.driver._ttfts) == (True, {})


def test_a_group_is_deferred_together() -> None:
    """Nobody of it runs before all are accepted."""
    fake = engine(
        lambda view, request: FULL if view.now_s < 0.1 and request.id == "a1" else Accept(bound_s=1.0), "defer"
    )
    fake.add("a0", prompt_tokens=10, group="a", size=2)
    fake.add("a1", prompt_tokens=10, group="a", size=2)
    assert fake.step() == []
    events = fake.run()
    assert [e.request for e in events if e.kind == "token"] == ["a0", "a1"]
    assert events[0].at_s == pytest.approx(0.14, abs=0.002)
    assert [k for k in kinds(fake) if k[0] == "accepted"] == [("accepted", "a")]


def test_a_group_does_not_wait_for_a_member_whose_client_left() -> None:
    """It is smaller by one."""
    fake = engine(accept_all)
    fake.add("a0", prompt_tokens=10, group="a", size=3)
    fake.add("a1", prompt_tokens=10, group="a", size=3)
    fake.step()
    fake.abort("a0")
    fake.add("a2", prompt_tokens=10, group="a", size=3)
    assert [e.request for e in fake.step() if e.kind == "token"] == ["a1", "a2"]
    fake.run()
    assert fake.driver.desk.empty


def test_a_group_whose_members_all_left_is_gone() -> None:
    """Nothing to decide."""
    fake = engine(accept_all)
    for i in range(2):
        fake.add(f"a{i}", prompt_tokens=10, group="a", size=2)
    fake.abort("a0")
    fake.abort("a1")
    assert fake.run() == []
    assert fake.driver.desk.empty


@pytest.mark.parametrize("answer", [accept_all, refuse_all])
def test_a_member_that_comes_late_follows_the_others(answer: Callable[[EngineView, RequestState], Verdict]) -> None:
    """The group is decided after a while without it; it gets the same verdict, without a second message."""
    fake = engine(answer)
    fake.add("a0", prompt_tokens=10, output_tokens=100, group="a", size=2)
    first = fake.run(until_s=GROUP_WAIT_S + 0.1)
    wanted = "token" if answer is accept_all else "refused"
    assert (first[0].kind, first[0].at_s) == (wanted, pytest.approx(GROUP_WAIT_S, abs=0.035))
    fake.driver.admission = Scripted(refuse_all if answer is accept_all else accept_all)
    fake.add("a1", prompt_tokens=10, group="a", size=2)
    assert ("a1", wanted) in [(e.request, e.kind) for e in fake.run()]
    assert len([k for k in kinds(fake) if k[0] in ("accepted", "refused")]) == 1
    assert fake.driver.desk.empty


def test_members_that_never_come_are_forgotten() -> None:
    """The memory of a decided group ends."""
    fake = engine(accept_all)
    fake.add("a0", prompt_tokens=10, group="a", size=2)
    fake.run(until_s=GROUP_LATE_S + 5)
    fake.add("b0", prompt_tokens=10, group="b", size=2)
    assert list(fake.driver.desk._groups) == ["b"]


def test_a_best_effort_group_keeps_the_promises_it_has() -> None:
    """The second cannot be promised and is served all the same; together they have no bound."""
    fake = engine(lambda view, request: FULL if request.seq else Accept(bound_s=0.5), "best_effort")
    fake.add("a0", prompt_tokens=10, group="a", size=2)
    fake.add("a1", prompt_tokens=10, group="a", size=2)
    events = fake.run()
    assert [e.request for e in events if e.kind == "finished"] == ["a0", "a1"]
    assert message(fake, "accepted", "a")["bound_s"] is None


def test_what_came_at_one_moment_is_due_at_one_moment() -> None:
    """Two clocks are never read at once; a sequence must not stand before its siblings for that."""
    fake = engine(accept_all)

    def due(name: str, now_s: float, unix_s: float, group: str = "a") -> float:
        tag = RequestTag(group=group, size=3, arrival_unix_s=1000.0)
        fake.driver.arrive(name, now_s=now_s, unix_s=unix_s, prompt_tokens=10, max_tokens=1, tag=tag)
        return fake.driver.ledger.requests[name].due_s

    first = due("a0", 7.500000, 1000.25)
    assert first == pytest.approx(7.25 + 1.0)
    assert due("a1", 7.500013, 1000.250900) == first
    assert due("a2", 7.500031, 1000.250004) == first
    assert due("b0", 7.500031, 1000.250900, group="b") < first
