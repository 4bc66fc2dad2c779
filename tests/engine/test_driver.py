"""The driver on the scripted engine: verdicts, rules of the classes, failures."""

from __future__ import annotations

import logging

import pytest
from driver_script import FULL, Scripted, accept_all, classes, engine, facts, kinds, message, refuse_all

from headway.core import Accept, Defer, EngineView, Reason, Reject, RequestState, StepPlan, Verdict
from headway.core.desk import RETRIES_PER_STEP
from headway.engine.base import RequestTag
from headway.engine.driver import Driver
from headway.engine.fake import FakeEngine

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
    assert fake.driver.desk.empty


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
    assert fake.driver.desk.empty


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


def test_only_what_was_accepted_shortens_the_steps_of_others() -> None:
    """A header's TTFT of 8 ms bounds no step while it is merely asked for, and does once it is promised."""
    seen: list[float] = []
    verdicts: list[Verdict] = [FULL, Accept(bound_s=9.0), Accept(bound_s=9.0)]

    def answer(view: EngineView, request: RequestState) -> Verdict:
        seen.append(view.blocking_s)
        return verdicts[len(seen) - 1]

    fake = engine(answer)
    for name in ("refused", "tight", "next"):
        fake.add(name, prompt_tokens=100, output_tokens=3, **({} if name == "next" else {"ttft_ms": 8.0}))
        fake.step()
    assert seen == [0.25, 0.25, 0.002]
    fake.run()
    assert fake.driver.ledger.requests == {}
    fake.add("last", prompt_tokens=100)
    verdicts.append(FULL)
    fake.step()
    assert seen[-1] == 0.25
