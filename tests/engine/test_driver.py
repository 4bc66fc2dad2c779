"""The driver: verdicts, groups, deferral, failures, and the numbers of an outcome, on the scripted engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from headway.config import Config
from headway.core import Accept, Defer, EngineView, Reason, Reject, RequestState, StepPlan, Verdict
from headway.engine.base import RequestTag
from headway.engine.driver import GROUP_LATE_S, GROUP_WAIT_S, RETRIES_PER_STEP, Driver
from headway.engine.fake import FakeEngine

FULL = Reject(reason=Reason.TTFT, retry_after_s=2.0)


class Scripted:
    """An admission test that answers by a function and remembers whom it was asked about."""

    name = "scripted"

    def __init__(self, answer: Callable[[EngineView, RequestState], Verdict]) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the scripted verdict."""
        self.asked.append(request.id)
        return self.answer(view, request)


def accept_all(view: EngineView, request: RequestState) -> Verdict:
    """Promise everybody the next second."""
    return Accept(bound_s=view.now_s + 1.0)


def refuse_all(view: EngineView, request: RequestState) -> Verdict:
    """Refuse."""
    return FULL


def classes(on_miss: str = "reject") -> Config:
    """One class, chat, with a TTFT of one second and a TPOT of 50 ms."""
    chat = {"ttft_ms": 1000, "tpot_ms": 50, "on_miss": on_miss}
    return Config.model_validate({"default_class": "chat", "front_ms": 0, "policy": "fcfs", "class": {"chat": chat}})


def engine(answer: Callable[[EngineView, RequestState], Verdict], on_miss: str = "reject", **limits: Any) -> FakeEngine:
    """Return an engine in vLLM's order with a scripted admission test."""
    return FakeEngine(classes(on_miss), admission=Scripted(answer), **limits)


def kinds(engine: FakeEngine) -> list[tuple[str, str]]:
    """Return (kind, group) of every message so far."""
    return [(m["kind"], m["group"]) for m in engine.messages if "group" in m]


def message(engine: FakeEngine, kind: str, group: str) -> dict[str, Any]:
    """Return the only message of this kind about a group."""
    (found,) = [m for m in engine.messages if m["kind"] == kind and m.get("group") == group]
    return found


# Verdicts


def test_an_accepted_request_is_reported_in_order() -> None:
    """accepted, first token, done: the HTTP side needs them in this order."""
    fake = engine(accept_all)
    fake.add("a", prompt_tokens=100, output_tokens=2)
    fake.run()
    assert kinds(fake) == [("accepted", "a"), ("first_token", "a"), ("done", "a")]
    assert message(fake, "accepted", "a")["bound_s"] == pytest.approx(1.0)


def test_a_refused_request_costs_nothing() -> None:
    """Told once with its numbers, gone from the books, no step for it."""
    fake = engine(lambda view, request: Reject(reason=Reason.TTFT, bound_s=view.now_s + 3.0, retry_after_s=2.0))
    fake.run(until_s=5.0)
    fake.add("a", prompt_tokens=100)
    assert [(e.kind, e.request) for e in fake.run()] == [("refused", "a")]
    assert fake.steps == []
    assert fake.driver.ledger.requests == {}
    refused = message(fake, "refused", "a")
    assert (refused["reason"], refused["slo_class"], refused["ttft_target_s"]) == ("ttft_unattainable", "chat", 1.0)
    assert (refused["bound_s"], refused["pace_bound_s"], refused["retry_after_s"]) == (pytest.approx(3.0), None, 2.0)


def test_the_bound_of_a_pace_is_no_time_of_a_first_token() -> None:
    """A refusal for the pace carries the time of a step, which is not counted from the arrival."""
    fake = engine(lambda view, request: Reject(reason=Reason.TBT, bound_s=0.08))
    fake.run(until_s=5.0)
    fake.add("a", prompt_tokens=100)
    fake.run()
    refused = message(fake, "refused", "a")
    assert (refused["bound_s"], refused["pace_bound_s"]) == (None, 0.08)


def test_bounds_count_from_the_arrival_and_include_the_front() -> None:
    """Promised at 6.0 on the engine's clock to a request that reached the server at 4.5, 0.1 s to the client."""
    fake = engine(lambda view, request: Accept(bound_s=6.0))
    fake.run(until_s=5.0)
    fake.add("a", prompt_tokens=100, arrival_unix_s=4.5, front_ms=100.0)
    fake.run()
    assert message(fake, "accepted", "a")["bound_s"] == pytest.approx(1.6)


def test_targets_of_the_tag_override_those_of_the_class_one_by_one() -> None:
    """The TTFT of the header, the TPOT of the class."""
    fake = engine(accept_all)
    fake.add("a", prompt_tokens=10, ttft_ms=250.0)
    slo = fake.driver.ledger.requests["a"].slo
    assert (slo.name, slo.ttft_s, slo.tpot_s) == ("chat", 0.25, 0.05)


def test_an_unknown_class_falls_to_the_default() -> None:
    """The HTTP side refuses unknown names, so this comes from elsewhere and must not stop the engine."""
    fake = engine(accept_all)
    fake.add("a", prompt_tokens=10, slo_class="gold")
    assert fake.driver.ledger.requests["a"].slo.name == "chat"


def test_without_max_tokens_the_assumption_of_the_class_is_reserved() -> None:
    """At most what the model can hold."""
    fake = engine(accept_all)
    fake.add("a", prompt_tokens=10, max_tokens=4000, explicit_max_tokens=False)
    fake.add("b", prompt_tokens=10, max_tokens=200, explicit_max_tokens=False)
    fake.add("c", prompt_tokens=10, max_tokens=4000)
    assert [r.max_output_tokens for r in fake.driver.ledger.requests.values()] == [512, 200, 4000]


def test_a_request_that_skipped_the_http_side_is_never_refused() -> None:
    """Nobody would turn its refusal into an answer: it is served without a promise."""
    for reason in (Reason.TTFT, Reason.NEVER_FITS):
        driver = Driver(classes())
        driver.admission = Scripted(lambda view, request, reason=reason: Reject(reason=reason))  # type: ignore[misc]
        driver.arrive("a", now_s=0.0, unix_s=0.0, prompt_tokens=10, max_tokens=5)
        fake = FakeEngine()
        plan, refused = driver.begin_step(facts(fake))
        assert (plan is not None, refused) == (True, [])
        (state,) = driver.ledger.pending
        assert (state.promised, state.has_target) == (False, False)


def facts(fake: FakeEngine) -> Any:
    """Return the facts that a fake engine would give."""
    from headway.engine.base import EngineFacts

    return EngineFacts(now_s=fake.now_s, kv=fake.kv, max_step_tokens=512, max_running=64, max_model_len=4096)


# Rules of the class


def test_best_effort_is_served_without_binding_anybody() -> None:
    """No target of its own any more, but its outcome is still judged by what was asked for."""
    fake = engine(refuse_all, "best_effort")
    fake.add("a", prompt_tokens=500, output_tokens=2, ttft_ms=100.0)
    fake.run()
    assert kinds(fake) == [("accepted", "a"), ("first_token", "a"), ("done", "a")]
    assert message(fake, "accepted", "a")["bound_s"] is None
    done = message(fake, "done", "a")
    assert (done["promised"], done["missed"], done["ttft_target_s"]) == (False, ["ttft"], 0.1)


@pytest.mark.parametrize("on_miss", ["reject", "defer", "best_effort"])
def test_what_can_never_fit_is_refused_by_every_rule(on_miss: str) -> None:
    """At once: waiting cannot help it."""
    fake = engine(lambda view, request: Reject(reason=Reason.NEVER_FITS), on_miss)
    fake.add("a", prompt_tokens=10)
    assert [e.kind for e in fake.step()] == ["refused"]


def test_a_deferred_class_waits_until_its_deadline() -> None:
    """Asked again at every step; refused when its first token is due, not before."""
    fake = engine(refuse_all, "defer")
    fake.add("a", prompt_tokens=10)
    (event,) = fake.run()
    assert event.kind == "refused"
    assert event.at_s == pytest.approx(1.0, abs=0.002)


def test_a_deferred_request_is_served_when_its_turn_comes() -> None:
    """The test says yes at 0.3 s."""
    fake = engine(lambda view, request: Accept(bound_s=1.0) if view.now_s >= 0.3 else FULL, "defer")
    fake.add("a", prompt_tokens=10)
    token, _ = fake.run()
    assert token.at_s == pytest.approx(0.33, abs=0.002)


def test_a_hesitating_test_sets_the_time_itself() -> None:
    """Defer(until): asked again until then, then its `otherwise` counts."""
    fake = engine(lambda view, request: Defer(until_s=0.1, otherwise=FULL))
    fake.add("a", prompt_tokens=10)
    (event,) = fake.run()
    assert (event.kind, event.at_s) == ("refused", pytest.approx(0.1, abs=0.002))


def test_retries_in_a_step_are_bounded_and_take_turns() -> None:
    """A crowd of deferred requests cannot slow the steps down, and each is asked in its turn."""
    fake = engine(refuse_all, "defer")
    for i in range(10):
        fake.add(f"r{i}", prompt_tokens=10)
    fake.step()
    admission = fake.driver.admission
    assert isinstance(admission, Scripted)
    for turn in (range(4), range(4, 8), (8, 9, 0, 1)):
        admission.asked.clear()
        fake.step()
        assert admission.asked == [f"r{i}" for i in turn]
        assert len(admission.asked) == RETRIES_PER_STEP


def test_a_deferred_request_does_not_run_in_vllms_order() -> None:
    """Also under a policy that leaves the queue to the engine, nobody is served before the verdict."""
    fake = engine(lambda view, request: FULL if request.id == "a" else Accept(), "defer")
    fake.add("a", prompt_tokens=10)
    fake.add("b", prompt_tokens=10)
    assert [e.request for e in fake.step() if e.kind == "token"] == ["b"]


def test_a_deferred_request_whose_client_leaves_is_forgotten() -> None:
    """No verdict, no refusal, nothing left."""
    fake = engine(refuse_all, "defer")
    fake.add("a", prompt_tokens=10)
    fake.step()
    fake.abort("a")
    fake.step()
    assert kinds(fake) == [("done", "a")]
    assert message(fake, "done", "a")["aborted"] is True
    assert fake.driver._deferred == {}


# Groups


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
    assert fake.driver._groups == {}


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
    assert (fake.driver._groups, fake.driver._ttfts) == ({}, {})


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
    assert fake.driver._groups == {}


def test_a_group_whose_members_all_left_is_gone() -> None:
    """Nothing to decide."""
    fake = engine(accept_all)
    for i in range(2):
        fake.add(f"a{i}", prompt_tokens=10, group="a", size=2)
    fake.abort("a0")
    fake.abort("a1")
    assert fake.run() == []
    assert fake.driver._groups == {}


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
    assert fake.driver._groups == {}


def test_members_that_never_come_are_forgotten() -> None:
    """The memory of a decided group ends."""
    fake = engine(accept_all)
    fake.add("a0", prompt_tokens=10, group="a", size=2)
    fake.run(until_s=GROUP_LATE_S + 5)
    fake.add("b0", prompt_tokens=10, group="b", size=2)
    assert list(fake.driver._groups) == ["b"]


def test_a_best_effort_group_keeps_the_promises_it_has() -> None:
    """The second cannot be promised and is served all the same; together they have no bound."""
    fake = engine(lambda view, request: FULL if request.seq else Accept(bound_s=0.5), "best_effort")
    fake.add("a0", prompt_tokens=10, group="a", size=2)
    fake.add("a1", prompt_tokens=10, group="a", size=2)
    events = fake.run()
    assert [e.request for e in events if e.kind == "finished"] == ["a0", "a1"]
    assert message(fake, "accepted", "a")["bound_s"] is None


# Failures


class Broken:
    """A policy and an admission test that raise."""

    name = "broken"

    def plan(self, view: EngineView) -> StepPlan:
        """Raise."""
        raise ZeroDivisionError("plan")

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Raise."""
        raise ZeroDivisionError("decide")


@pytest.mark.parametrize("what", ["policy", "admission"])
def test_a_decision_that_raises_never_stops_the_engine(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Everything is served, every failure counted, one logged."""
    fake = FakeEngine(classes(), **{what: Broken()})
    for i in range(3):
        fake.add(f"r{i}", prompt_tokens=10, output_tokens=2)
        fake.add(f"g{i}", prompt_tokens=10, output_tokens=2, group="g", size=3)
    with caplog.at_level(logging.ERROR, logger="headway"):
        events = fake.run()
        fake.add("later", prompt_tokens=10)
        events += fake.run()
    assert [e.kind for e in events].count("finished") == 7
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text
    failures = fake.driver.report.take({})[0][0]["failures"]
    assert failures == (len(fake.steps) if what == "policy" else 2)
    assert fake.driver._groups == {}


def test_what_was_refused_before_a_failure_stays_refused() -> None:
    """The first is told no, the second breaks the test: the engine must still drop the first."""

    def answer(view: EngineView, request: RequestState) -> Verdict:
        if request.id == "b":
            raise ZeroDivisionError
        return FULL

    fake = engine(answer)
    fake.add("a", prompt_tokens=10)
    fake.add("b", prompt_tokens=10)
    events = fake.run()
    assert [(e.kind, e.request) for e in events] == [("refused", "a"), ("token", "b"), ("finished", "b")]


def test_after_a_failure_of_the_books_decisions_go_on_with_new_requests(caplog: pytest.LogCaptureFixture) -> None:
    """The engine serves the ones it has alone; the driver knows nothing of them and does not mind."""
    driver = Driver(classes())
    fake = FakeEngine()
    driver.arrive("a", now_s=0.0, unix_s=0.0, prompt_tokens=10, max_tokens=5, tag=RequestTag(group="a", size=2))
    driver.begin_step(facts(fake))
    driver.issued({"a": 10}, lambda i: 10, now_s=0.0)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        driver.start_over()
    driver.completed({"a": 1}, now_s=0.1, idle=False)
    driver.preempted("a")
    driver.finished("a", now_s=0.2)
    driver.arrive("b", now_s=0.3, unix_s=0.3, prompt_tokens=10, max_tokens=5, tag=RequestTag(group="b"))
    plan, refused = driver.begin_step(facts(fake))
    assert (plan is None, refused, list(driver.ledger.requests)) == (False, [], ["b"])
    assert "the books failed" in caplog.text


def test_unknown_requests_are_ignored() -> None:
    """The engine has some that the driver was never told of."""
    driver = Driver(classes())
    driver.issued({"x": 5}, lambda i: 5, now_s=0.0)
    driver.completed({"x": 1}, now_s=0.1, idle=False)
    driver.preempted("x")
    driver.finished("x", now_s=0.2)
    assert driver.report.take(None) == {}


# What is measured


def test_the_numbers_of_an_outcome_by_hand() -> None:
    """Budget 64, 20 ms a step, 1 ms a token. b waits for a's prompt, then decodes beside a.

    Steps: a 64 (84 ms); a 36, b 28 (168); a decode, b 22 (211); both decode (233); b decode (254).
    """
    fake = engine(accept_all, max_step_tokens=64)
    fake.add("a", prompt_tokens=100, output_tokens=3)
    fake.add("b", prompt_tokens=50, output_tokens=3)
    fake.run()
    assert [round(s * 1e3) for _, _, s in fake.steps] == [84, 84, 43, 22, 21]
    a, b = message(fake, "done", "a"), message(fake, "done", "b")
    assert (a["ttft_s"], b["ttft_s"]) == (pytest.approx(0.168), pytest.approx(0.211))
    assert (a["tpot_s"], b["tpot_s"]) == (pytest.approx(0.0325), pytest.approx(0.0215))
    assert (a["tbt_max_s"], b["tbt_max_s"]) == (pytest.approx(0.043), pytest.approx(0.022))
    assert (a["prefill_queue_s"], a["prefill_compute_s"]) == (pytest.approx(0.0), pytest.approx(0.168))
    assert (b["prefill_queue_s"], b["prefill_compute_s"]) == (pytest.approx(0.084), pytest.approx(0.127))
    assert (a["decode_queue_s"], a["decode_compute_s"]) == (pytest.approx(0.0), pytest.approx(0.065))
    assert message(fake, "first_token", "b")["queue_s"] == pytest.approx(0.084)
    assert (a["missed"], b["missed"]) == ([], [])


def test_a_decode_that_is_held_queues() -> None:
    """Held for one step: its time in that step is queue time, and its gap is longer."""

    class HoldOnce:
        name = "hold_once"
        steps = 0

        def plan(self, view: EngineView) -> StepPlan:
            self.steps += 1
            pending = {r.id: r.remaining_tokens for r in view.ledger.pending}
            held = frozenset({"a"}) if self.steps == 2 else frozenset()
            return StepPlan(token_budget=512, chunks=pending, starts=tuple(pending), held=held)

    fake = FakeEngine(classes(), policy=HoldOnce(), admission=Scripted(accept_all))
    fake.add("a", prompt_tokens=80, output_tokens=2)
    fake.step()
    fake.add("b", prompt_tokens=180)
    fake.run()
    done = message(fake, "done", "a")
    assert (done["decode_queue_s"], done["decode_compute_s"]) == (pytest.approx(0.2), pytest.approx(0.021))
    assert (done["tpot_s"], done["missed"]) == (pytest.approx(0.221), ["tpot"])


def test_the_front_counts_for_the_first_token() -> None:
    """What the client sees is later than the engine."""
    fake = engine(accept_all)
    fake.add("a", prompt_tokens=100, front_ms=30.0, arrival_unix_s=0.0)
    fake.run()
    assert message(fake, "done", "a")["ttft_s"] == pytest.approx(0.15)


def test_one_token_has_no_pace() -> None:
    """Neither attained by luck nor missed."""
    fake = engine(accept_all)
    fake.add("a", prompt_tokens=100)
    fake.run()
    done = message(fake, "done", "a")
    assert (done["tpot_s"], done["tbt_max_s"], done["missed"]) == (None, None, [])


def test_an_abort_before_the_first_token_is_apart_from_the_judged() -> None:
    """Its client gave it up: no target was missed, no time to first token exists."""
    fake = engine(accept_all)
    fake.add("a", prompt_tokens=600, output_tokens=5)
    fake.step()
    fake.abort("a")
    fake.step()
    done = message(fake, "done", "a")
    assert (done["aborted"], done["failed"], done["ttft_s"], done["missed"]) == (True, False, None, [])
    assert fake.driver.ledger.requests == {}


def test_an_end_after_the_first_token_is_judged_by_what_came() -> None:
    """A stop string found outside the engine ends the request there."""
    driver = Driver(classes())
    driver.arrive("a", now_s=0.0, unix_s=0.0, prompt_tokens=10, max_tokens=50, tag=RequestTag(group="a"))
    driver.begin_step(facts(FakeEngine()))
    driver.issued({"a": 10}, lambda i: 10, now_s=0.0)
    driver.completed({"a": 1}, now_s=1.5, idle=False)
    driver.finished("a", now_s=1.6)
    done = driver.report.take(None)[0][-1]
    assert (done["aborted"], done["missed"], done["ttft_s"]) == (False, ["ttft"], pytest.approx(1.5))


def test_a_failure_is_not_an_abort() -> None:
    """The engine gave it up: offered and not attained."""
    driver = Driver(classes())
    driver.arrive("a", now_s=0.0, unix_s=0.0, prompt_tokens=10, max_tokens=5, tag=RequestTag(group="a"))
    driver.begin_step(facts(FakeEngine()))
    driver.finished("a", now_s=1.0, failed=True)
    done = driver.report.take(None)[0][-1]
    assert (done["kind"], done["failed"], done["aborted"]) == ("done", True, False)


def test_a_preemption_tells_what_is_lost_and_is_recovered_from() -> None:
    """Prompt and outputs so far are computed again; the stream goes on where it was."""
    fake = engine(accept_all, blocks=6)
    fake.add("a", prompt_tokens=48, output_tokens=4)
    fake.add("b", prompt_tokens=48, output_tokens=4)
    events = fake.run()
    fake.driver.ledger.check()
    (lost,) = [m for m in fake.messages if m["kind"] == "preempted"]
    assert (lost["request"], lost["lost_tokens"], lost["promised"]) == ("b", 49, True)
    done = message(fake, "done", "b")
    assert (done["preemptions"], done["output_tokens"]) == (1, 4)
    assert [e.request for e in events if e.kind == "finished"] == ["a", "b"]


def test_output_in_flight_at_a_preemption_is_the_clients() -> None:
    """Asynchronous scheduling: the token comes after its request lost its KV, and the request still waits."""
    driver = Driver(classes())
    driver.arrive("a", now_s=0.0, unix_s=0.0, prompt_tokens=10, max_tokens=5, tag=RequestTag(group="a"))
    driver.begin_step(facts(FakeEngine()))
    driver.issued({"a": 10}, lambda i: 10, now_s=0.0)
    driver.issued({"a": 1}, lambda i: 11, now_s=0.01)
    driver.completed({"a": 1}, now_s=0.1, idle=False)
    driver.preempted("a")
    driver.completed({"a": 1}, now_s=0.2, idle=False)
    (state,) = driver.ledger.pending
    assert (state.output_tokens, state.remaining_tokens, len(driver.ledger.decoding)) == (2, 12, 0)
    driver.ledger.check()


def test_a_step_is_recorded_as_it_was() -> None:
    """q, n, K and X of a mixed step: a chunk of 28 after 22, beside a decode that reads 101 tokens."""
    fake = engine(accept_all, max_step_tokens=50)
    fake.add("a", prompt_tokens=100, output_tokens=3)
    fake.step()
    fake.step()
    fake.add("b", prompt_tokens=60)
    steps = []
    for _ in range(2):
        fake.step()
        steps.append(fake.steps[-1][:2])
    assert steps == [(49, 1), (11, 1)]


def test_the_step_cost_learns_from_every_step() -> None:
    """And the judged share of the envelope is in the gauges."""
    fake = engine(accept_all)
    for i in range(40):
        fake.add(f"r{i}", prompt_tokens=50 + i, output_tokens=2)
        fake.run()
    gauges = fake.driver.gauges()
    assert gauges["ready"] == 1
    assert gauges["cost_a"] == pytest.approx(0.001, rel=0.05)
    assert gauges["judged"] > 0
    assert (gauges["pending"], gauges["decoding"], gauges["undecided"]) == (0, 0, 0)
