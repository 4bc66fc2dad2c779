"""The HTML page and its charts: self-contained, labelled, right."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
from compare_runs import arm, frame, noisy, run

from headway.replay import gate, report
from headway.replay.compare import compare
from headway.replay.svg import Axis, Series, chart, log_axis


def test_the_page_needs_no_network_and_no_script():
    """No address, script, font or image from anywhere: one file is all."""
    found = compare(arm("A", run(noisy(1))), arm("B", run(noisy(2))), draws=300)
    judged = gate.judge(gate.parse("p99_ttft<=+5%"), found, confidence=0.95)
    page = report.page([found], judged)
    assert not re.search(r"https?:|<script|@import|url\(|<img|<link", page)
    assert "gate p99_ttft&lt;=+5%" in page
    assert page.count("<svg") == 5


def test_every_chart_is_well_formed_and_names_its_axes():
    """The charts parse as XML and carry the labels with units."""
    found = compare(arm("A", run(noisy(1))), arm("<B>", run(noisy(2))), draws=300)
    page = report.page([found])
    charts = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.S)]
    labels = {node.text for one in charts for node in one.iter("text") if node.get("class") == "label"}
    assert {
        "TTFT (log scale)",
        "TPOT (log scale)",
        "share of offered requests",
        "time since the start of the run (s)",
        "input length (tokens, log scale)",
    } <= labels
    assert "&lt;B&gt; against A" in page


def test_the_cdf_of_offered_requests_ends_at_the_served_share():
    """A quarter refused: the TTFT curve ends at 75 % of the height of the frame."""
    status = np.where(np.arange(400) % 4 == 0, "refused", "ok")
    tables = (("A", (frame(np.linspace(0.1, 1.0, 400), status=status),)),)
    svg, _ = report._cdf(tables, "ttft", "TTFT", of_all=True)
    path = next(n for n in ElementTree.fromstring(svg).iter("path"))
    frame_rect = next(n for n in ElementTree.fromstring(svg).iter("rect"))
    top, height = float(frame_rect.get("y")), float(frame_rect.get("height"))
    last = float(path.get("d").rsplit("V", 1)[1])
    assert abs(last - (top + 0.25 * height)) < 0.2
    assert path[0].text.startswith("A: n 300 of 400; P50 ")


def test_occupancy_is_the_mean_number_of_open_requests():
    """[0, 2) and [1, 3) over bins of one second: 1, 2, 1 open."""
    counts = report._occupancy(np.array([0.0, 1.0]), np.array([2.0, 3.0]), np.array([0.0, 1.0, 2.0, 3.0]))
    assert counts.tolist() == [1.0, 2.0, 1.0]


def test_axis_ticks_are_round_and_inside():
    """A log axis of 12 ms to 3 s and a linear one of 0 to 47."""
    times = Axis(label="", scale="log", unit="s", low=0.012, high=3.0)
    assert [times.name(tick) for tick in times.ticks()] == ["30 ms", "100 ms", "300 ms", "1 s", "3 s"]
    assert Axis(label="", low=0.0, high=47.0).ticks() == [0, 10, 20, 30, 40]


def test_equal_values_still_make_an_axis():
    """All values alike, or none at all, must not break a chart."""
    axis = log_axis("x", np.array([0.5, 0.5]))
    assert axis.low < 0.5 < axis.high
    assert log_axis("x", np.array([np.inf, np.nan])) is None
    series = Series(x=np.array([0.5]), y=np.array([1.0]), colour=0, about="one", kind="dots")
    assert "M" in chart("t", axis, Axis(label="y", low=0.0, high=1.0), [series])
