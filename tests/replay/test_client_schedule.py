"""When requests are due: open loop and closed loop, with time as an argument."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from replay_wire import make_trace

from headway.replay.schedule import Schedule


def drain(schedule: Schedule, service_s: float = 0.5) -> list[tuple[float, int]]:
    """Play a server that answers each request `service_s` after it was due; return (due, index) in order of sending."""
    sent, ends = [], []
    while schedule.next_due is not None or ends:
        due = schedule.next_due
        if ends and (due is None or ends[0][0] <= due):
            end, index = ends.pop(0)
            schedule.ended(index, end)
            continue
        sent.append(schedule.pop(due))
        ends.append((due + service_s, sent[-1][1]))
        ends.sort()
    return sent


def test_open_loop_ignores_answers():
    """Every request is due at its arrival, sessions or not; ties in the order of the trace."""
    rows = [{"arrival_s": at, "session_id": "a", "turn": i} for i, at in enumerate((0.0, 0.1, 0.1, 0.2))]
    assert drain(Schedule(make_trace(rows).frame), 99.0) == [(0.0, 0), (0.1, 1), (0.1, 2), (0.2, 3)]


def test_nothing_is_due_early():
    """A request due at 1.0 is not given out at 0.999999."""
    schedule = Schedule(make_trace([{"arrival_s": 1.0}]).frame)
    assert schedule.pop(0.999999) is None
    assert schedule.pop(1.0) == (1.0, 0)
    assert schedule.pop(2.0) is None


def test_closed_loop_thinks_after_the_previous_turn():
    """Turns 0.5 s of service and 2 s of thought apart, whatever the recorded arrivals say."""
    rows = [
        {"arrival_s": 0.0, "session_id": "a", "turn": 0},
        {"arrival_s": 0.1, "session_id": "b", "turn": 0},
        {"arrival_s": 0.2, "session_id": "a", "turn": 1, "think_s": 2.0},
        {"arrival_s": 0.3, "session_id": "a", "turn": 2, "think_s": 0.0},
        {"arrival_s": 0.4},
    ]
    sent = drain(Schedule(make_trace(rows).frame, closed_loop=True))
    assert sent == [(0.0, 0), (0.1, 1), (0.4, 4), (2.5, 2), (3.0, 3)]


def test_a_turn_without_think_time_keeps_its_arrival():
    """It waits for its arrival and for the previous turn, whichever is later."""
    rows = [
        {"arrival_s": 0.0, "session_id": "a", "turn": 0},
        {"arrival_s": 0.2, "session_id": "a", "turn": 1},
        {"arrival_s": 9.0, "session_id": "a", "turn": 2},
    ]
    assert drain(Schedule(make_trace(rows).frame, closed_loop=True)) == [(0.0, 0), (0.5, 1), (9.0, 2)]


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.sampled_from([None, "a", "b"]), st.floats(0, 3)),
        min_size=1,
        max_size=30,
    )
)
def test_closed_loop_sends_everything_once_and_in_turn(rows):
    """No request is lost or doubled, and no two turns of a session overlap."""
    rows = sorted(rows, key=lambda row: row[0])
    trace = make_trace([{"arrival_s": at, "session_id": s, "think_s": think} for at, s, think in rows])
    sent = drain(Schedule(trace.frame, closed_loop=True))
    assert sorted(index for _, index in sent) == list(range(len(rows)))
    for session in ("a", "b"):
        mine = [(due, i) for due, i in sent if rows[i][1] == session]
        assert [i for _, i in mine] == sorted(i for _, i in mine)
        assert all(later >= earlier + 0.5 for (earlier, _), (later, _) in itertools.pairwise(mine))
