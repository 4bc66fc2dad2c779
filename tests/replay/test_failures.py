"""Why requests failed is told, with the server's words, and a run in which all failed is not valid."""

from __future__ import annotations

import io

import pytest
from replay_wire import END, GOOD, HEAD, chunk, index_of, make_trace, plain, serve
from rich.console import Console

from headway.replay import honesty
from headway.replay.client import replay_async
from headway.replay.failures import Failures, from_frame, in_words
from headway.replay.summary import table


async def run(answers, folder):
    """Replay one request an answer and return the run."""

    async def scripted(request, writer):
        writer.write(answers[index_of(request)])

    trace = make_trace([{"arrival_s": 0.0}] * len(answers))
    async with serve(scripted) as server:
        return await replay_async(trace, url=server.url, targets={}, run_dir=folder / "run", prompts="tokens")


async def test_reasons_are_counted_and_hostile_words_are_only_shown(tmp_path):
    """Two of one kind come first; markup, control codes and line breaks of the server stay text; 120 characters."""
    hostile = "[red]no\x1b[2J\nINVALID: x " + "y" * 200
    asked = [plain(400, {"error": {"type": "BadRequestError", "message": f"{n} tokens too many"}}) for n in (7, 12)]
    inside = HEAD + chunk(b'data: {"error": {"code": "Dead", "message": "engine is gone"}}\n\n') + END
    answers = [plain(500, {"detail": hostile}), *asked, inside, GOOD]
    made = await run(answers, tmp_path)
    facts = made.meta["failures"]
    assert [(each["n"], each["http_status"], each["reason"]) for each in facts] == [
        (2, 400, "BadRequestError"), (1, 200, "Dead"), (1, 500, "http_500"),
    ]  # fmt: skip
    assert [each["message"] for each in facts[:2]] == [facts[0]["message"], "engine is gone"]
    assert facts[0]["message"] in ("7 tokens too many", "12 tokens too many")
    assert len(facts[2]["message"]) == 120
    out = io.StringIO()
    Console(file=out, width=500).print(table(made))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("Failed: ")]
    assert "Failed: 2 x HTTP 400 BadRequestError, " in line
    assert r'1 x HTTP 500, "[red]no\x1b[2J INVALID: x yyy' in line
    assert not any(line.startswith("INVALID: x") for line in out.getvalue().splitlines())
    assert "no request was served" not in " ".join(made.meta["invalid_reasons"])


async def test_a_run_in_which_all_failed_is_invalid(tmp_path):
    """Nothing was served or refused: the run says why it must not be believed."""
    made = await run([plain(500, "oops"), plain(500, "oops")], tmp_path)
    assert not made.valid
    assert "no request was served or refused: 2 failed, 0 cut off" in made.meta["invalid_reasons"]
    assert made.meta["failures"] == [{"http_status": 500, "reason": "http_500", "message": "oops", "n": 2}]


@pytest.mark.parametrize(
    ("counts", "tokens", "invalid"),
    [
        ({"failed": 2}, 0, True),
        ({"failed": 1, "cut_off": 1}, 5, True),
        ({"cut_off": 2}, 0, True),
        ({"cut_off": 2}, 5, False),
        ({"refused": 1, "failed": 2}, 0, False),
        ({"ok": 1, "failed": 2}, 2, False),
        ({}, 0, False),
    ],
)
def test_what_counts_as_nothing_served(counts, tokens, invalid):
    """One answer or refusal is enough, tokens of an answer that was cut off too; an empty run has no verdict."""
    full = dict.fromkeys(("ok", "refused", "failed", "cut_off"), 0) | counts
    assert bool(honesty.nothing_served(full, tokens)) is invalid


async def test_a_killed_run_still_names_its_reasons(tmp_path):
    """The table of requests holds status and reason, not the message."""
    made = await run([plain(500, "oops"), GOOD], tmp_path)
    assert in_words(from_frame(made.frame)) == "1 x HTTP 500"


def test_three_kinds_are_named_and_the_rest_summed():
    """5 + 4 + 3 + 2 + 1 failures: the last three are one number; a flood of kinds is kept to about a hundred."""
    found = Failures()
    for n, reason in enumerate("edcba", start=1):
        found.add(None, reason, None, n)
    assert in_words(found.facts()) == "5 x a; 4 x b; 3 x c; 3 x other reasons (--json)"
    for each in range(500):
        found.add(500, f"kind {each}", "words")
    assert len(found.facts()) == 101
    assert sum(each["n"] for each in found.facts()) == 515
