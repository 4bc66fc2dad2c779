"""What stands against what: pairing in words, missing strata as errors, invalid runs refused."""

import numpy as np
import pytest
from compare_runs import arm, frame, noisy, run

from headway.errors import InputError
from headway.replay import arms
from headway.replay.store import save


def test_the_same_rows_are_paired_and_it_is_said():
    """Same trace, selection and seed: rows align by trace_row even when the second arm finished in another order."""
    table = noisy(1, 50)
    (level,) = arms.levels(arm("A", run(table)), arm("B", run(table.reverse())))
    assert level.paired
    assert level.pairing.startswith("paired by request: same trace (aaaaaaaaaaaa)")
    assert level.other[0]["trace_row"].to_list() == level.base[0]["trace_row"].to_list()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha": "b" * 64}, "the traces differ (aaaaaaaaaaaa and bbbbbbbbbbbb)"),
        ({"selection": "half"}, 'the selections differ ("all" and "half")'),
        ({"seed": 4}, "the seeds differ (0 and 4)"),
        ({"seed": 0, "repeats": 2}, "the repeats of a seed differ in number (1 and 2 runs)"),
        ({"sha": None}, "a run does not tell the SHA-256 of its trace"),
    ],
)
def test_other_rows_are_unpaired_and_it_is_said_why(change, words):
    """One load an arm that differs in trace, selection or seed: compared unpaired, with the reason in words."""
    change = dict(change)
    repeats = change.pop("repeats", 1)
    (level,) = arms.levels(arm("A", run(noisy(1, 50))), arm("B", *[run(noisy(2, 60), **change)] * repeats))
    assert not level.paired
    assert level.pairing == f"unpaired: {words}"


def test_rows_of_only_one_run_are_counted():
    """B lost 7 of 50 rows: both sides keep the 43 common ones and a note says 7."""
    (level,) = arms.levels(arm("A", run(noisy(1, 50))), arm("B", run(noisy(2, 50).head(43))))
    assert [level.base[0].height, level.other[0].height] == [43, 43]
    assert "7 requests are in only one of" in level.notes[0]


def test_seeds_are_paired_with_their_own():
    """Runs given in another order are matched by seed, not by position."""
    first, second = noisy(1, 30), noisy(2, 30)
    base = arm("A", run(first, seed=1), run(second, seed=2))
    other = arm("B", run(second, seed=2), run(first, seed=1))
    (level,) = arms.levels(base, other)
    assert all(a.equals(b) for a, b in zip(level.base, level.other, strict=True))


def test_seeds_of_a_generated_trace_are_repeats_of_one_load():
    """Each seed generates other rows under another hash: one level, three repeats, each paired with its own."""

    def seeded(offset):
        return [
            run(
                noisy(seed + offset, 30),
                seed=seed,
                trace={
                    "sha256": f"{seed}" * 64,
                    "source": f"demo-seed={seed}",
                    "selection": [f"rate 2, seed {seed}"],
                },
            )
            for seed in (1, 2, 3)
        ]

    (level,) = arms.levels(arm("A", *seeded(0)), arm("B", *reversed(seeded(50))))
    assert level.paired
    assert len(level.base) == 3


def test_a_level_that_one_arm_lacks_is_an_error():
    """A was run at two loads, B at one: never a silent skip."""
    base = arm("A", run(noisy(1, 30), selection="1x"), run(noisy(1, 30, gap_s=0.05), selection="2x"))
    with pytest.raises(InputError, match=r'arm B: no run at the level a+, selection "2x"'):
        arms.levels(base, arm("B", run(noisy(2, 30), selection="1x")))


def test_levels_come_in_order_of_rate():
    """Two loads in both arms make two levels, the slower first, named by the offered rate."""

    def both(seed):
        return run(noisy(seed, 41, gap_s=0.05), selection="2x"), run(noisy(seed, 41), selection="1x")

    found = arms.levels(arm("A", *both(1)), arm("B", *both(2)))
    assert [level.label for level in found] == ["10 req/s offered", "20 req/s offered"]


def test_a_class_that_one_arm_lacks_is_an_error():
    """B has no `doc` request: an error that lists what it has."""
    classes = ["chat"] * 20 + ["doc"] * 10
    base, other = run(noisy(1, 30, classes=classes)), run(noisy(2, 30), sha="b" * 64)
    with pytest.raises(
        InputError, match=r"arm B, 10 req/s offered: class 'doc' has no requests \(classes there: chat\)"
    ):
        arms.levels(arm("A", base), arm("B", other))


def test_different_targets_are_an_error():
    """Attainment against 1 s and against 2 s are different questions."""
    with pytest.raises(InputError, match="scored against different targets"):
        arms.levels(arm("A", run(noisy(1, 30))), arm("B", run(noisy(2, 30, target_s=2.0))))


def test_invalid_and_unfinished_runs_are_refused(tmp_path):
    """A run whose client was the bottleneck, or that was cut short, needs --allow-invalid."""
    table = frame(np.full(5, 0.1))
    save(tmp_path / "bad", {"state": "finished", "valid": False, "invalid_reasons": ["client late"]}, table)
    save(tmp_path / "cut", {"state": "interrupted", "valid": True}, table)
    with pytest.raises(InputError, match=r"bad: the run is invalid \(client late\)"):
        arms.load_arm(str(tmp_path / "bad"))
    with pytest.raises(InputError, match="cut: state = 'interrupted'"):
        arms.load_arm(str(tmp_path / "cut"))
    assert len(arms.load_arm(str(tmp_path / "bad"), allow_invalid=True).runs) == 1


def test_an_arm_is_a_list_a_glob_or_a_folder_of_runs(tmp_path, monkeypatch):
    """The three ways to name several runs give the same arm; a name in front names it."""
    for number in range(3):
        save(tmp_path / f"r{number}", {"state": "finished", "valid": True}, frame([0.1, 0.2]))
    listed = arms.load_arm(",".join(str(tmp_path / f"r{number}") for number in range(3)))
    globbed = arms.load_arm(f"stock={tmp_path}/r*")
    folder = arms.load_arm(str(tmp_path))
    assert [run.path for run in listed.runs] == [run.path for run in globbed.runs] == [r.path for r in folder.runs]
    assert globbed.name == "stock"
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "rate=2", {"state": "finished", "valid": True}, frame([0.1, 0.2]))
    assert arms.load_arm("rate=2").name == "rate=2"
    with pytest.raises(InputError, match="no such run"):
        arms.load_arm(f"{tmp_path}/x*")


def test_a_simulated_run_against_a_real_one_is_named():
    """The note names the simulated arm, or its runs where only some are; arms of one kind need none."""
    table = noisy(1, 50)
    real, twin = run(table, "r", kind="replay"), run(table, "t", kind="simulation")
    (level,) = arms.levels(arm("A", real), arm("B", twin))
    assert level.notes[0].startswith("simulated by the twin, not measured: B; ")
    (level,) = arms.levels(arm("A", real, twin), arm("B", real, real))
    assert "not measured: A (t); " in level.notes[0]
    for alike in (real, twin):
        (level,) = arms.levels(arm("A", alike), arm("B", alike))
        assert not level.notes
