"""The driver: what it measures, by hand on the scripted engine."""

from __future__ import annotations

import pytest
from driver_script import Scripted, accept_all, classes, engine, facts, message

from headway.core import CostCoefficients, EngineView, StepPlan
from headway.engine.base import RequestTag
from headway.engine.driver import Driver
from headway.engine.fake import FakeEngine


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


@pytest.mark.parametrize(("first_s", "aborted", "missed"), [(0.5, True, []), (1.5, False, ["ttft"])])
def test_a_client_that_hangs_up_attains_nothing_and_undoes_no_miss(
    first_s: float, aborted: bool, missed: list[str]
) -> None:
    """After its first token in time it is counted apart; after one that was late it is a miss."""
    driver = Driver(classes())
    driver.arrive("a", now_s=0.0, unix_s=0.0, prompt_tokens=10, max_tokens=50, tag=RequestTag(group="a"))
    driver.begin_step(facts(FakeEngine()))
    driver.issued({"a": 10}, lambda i: 10, now_s=0.0)
    driver.completed({"a": 1}, now_s=first_s, idle=False)
    driver.finished("a", now_s=first_s + 0.1, aborted=True)
    done = driver.report.take(None)[0][-1]
    assert (done["aborted"], done["missed"]) == (aborted, missed)


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
    assert gauges["judged_mixed"] > 0
    assert (gauges["pending"], gauges["decoding"], gauges["undecided"]) == (0, 0, 0)


def test_drift_of_the_step_times_is_reported() -> None:
    """Steps that all take three times as long from one on: said once, for the HTTP side's events."""
    fake = engine(accept_all)
    for i in range(60):
        fake.add(f"r{i}", prompt_tokens=50 + i, output_tokens=2)
        fake.run()
    assert not [m for m in fake.messages if m["kind"] == "drift"]
    now = fake.coefficients
    fake.coefficients = CostCoefficients(g=3 * now.g, a=3 * now.a, b=3 * now.b)
    for i in range(60, 80):
        fake.add(f"r{i}", prompt_tokens=50 + i, output_tokens=2)
        fake.run()
    found = [m for m in fake.messages if m["kind"] == "drift"]
    # The mean is scaled at once for both kinds of steps, so the decode-only ones need no alarm of their own.
    assert [(m["state"], m["regime"]) for m in found] == [("tightened", "mixed")]
    assert found[0]["level"] == pytest.approx(3.0, rel=0.05)
    assert found[0]["exceeded"] > found[0]["limit"]
