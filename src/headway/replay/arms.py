"""Which runs stand against which: arms, load levels, pairs of runs, and everything that must match."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from headway.errors import InputError
from headway.replay.store import Run, find, load

#: Characters of a hash that are printed.
_SHORT = 12
_SEED = re.compile(r"seed[ =]-?\d+")
_TARGETS = ("ttft_target_s", "tpot_target_s", "tbt_target_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison: a name and its runs (repeats, seeds, load levels)."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load, the same for both arms: frames by repeat in order of arrival, aligned row by row when `paired`."""

    label: str
    paired: bool
    pairing: str  # how rows were paired, or why they were not
    base: tuple[pl.DataFrame, ...]
    other: tuple[pl.DataFrame, ...]
    notes: tuple[str, ...] = ()


def load_arm(text: str, *, allow_invalid: bool = False) -> Arm:
    """Return the arm that `text` names: `A1,A2`, a glob, a folder of runs, each with an optional `name=` before it.

    Raises `InputError` for a path without a run, a run that is not whole, and a run whose client was the bottleneck
    unless `allow_invalid`.
    """
    # A folder may have an = in its own name; then what is there wins.
    named = "=" in text.split("/")[0] and not Path(text.split(",")[0]).exists()
    name, _, rest = text.partition("=") if named else ("", "", text)
    paths: list[Path] = []
    for part in rest.split(","):
        found = sorted(glob.glob(part)) if glob.has_magic(part) else [part]
        runs = [run for each in found for run in (find(Path(each)) or [Path(each)])]
        if not runs or not part:
            raise InputError(f"{part!r}: no such run: expected a run folder, a glob of them, or a folder of runs")
        paths += runs
    runs = tuple(load(path) for path in paths)
    for run in runs:
        _check(run, allow_invalid)
    labels = {run.meta.get("label") for run in runs}
    label = labels.pop() if len(labels) == 1 else None
    return Arm(name=name or label or rest.rstrip("/").split("/")[-1], runs=runs)


def distinct(arms: Sequence[Arm]) -> list[Arm]:
    """Return `arms` with names that tell them apart: a name used twice becomes that of its first run folder."""
    names = [arm.name for arm in arms]
    made = [arm if names.count(arm.name) == 1 else Arm(name=arm.runs[0].path.name, runs=arm.runs) for arm in arms]
    if len({arm.name for arm in made}) == len(made):
        return made
    return [Arm(name=str(arm.runs[0].path), runs=arm.runs) for arm in arms]


def _check(run: Run, allow_invalid: bool) -> None:
    if run.frame.is_empty():
        raise InputError(f"{run.path}: the run has no requests: expected at least one")
    if run.meta.get("valid") is False and not allow_invalid:
        why = "; ".join(run.meta.get("invalid_reasons") or ["no reason recorded"])
        raise InputError(f"{run.path}: the run is invalid ({why}): expected a valid run, or --allow-invalid")
    state = run.meta.get("state", "finished")
    if state != "finished" and not allow_invalid:
        raise InputError(f"{run.path}: state = {state!r}: expected a finished run, or --allow-invalid")


def trace_sha256(run: Run) -> str | None:
    """Return the SHA-256 of the bytes of the replayed trace, where the run tells."""
    return (run.meta.get("trace") or {}).get("sha256")


def selection(run: Run) -> str:
    """Return the slice of the trace and its speed as one canonical string."""
    return json.dumps((run.meta.get("trace") or {}).get("selection"), sort_keys=True)


def seed(run: Run) -> int | None:
    """Return the seed of prompts and classes."""
    return run.meta.get("seed")


def offered_rate(frame: pl.DataFrame) -> float:
    """Return (n - 1) / (last - first scheduled arrival) in requests a second; 0 without a span."""
    span = float(frame["scheduled_s"].max() - frame["scheduled_s"].min())  # type: ignore[operator]
    return (frame.height - 1) / span if span > 0 else 0.0


def levels(base: Arm, other: Arm) -> list[Level]:
    """Return the load levels of two arms, each paired where both replayed the same rows.

    A load is (source, selection) whatever the seed. With one load in each arm that differ, rows cannot be paired and
    the level says so; with several, a load that only one arm has is an `InputError`, never a skip. The same for a
    class.
    """
    left, right = _by_load(base), _by_load(other)
    if left.keys() == right.keys():
        made = [_level(left[key], right[key], base.name, other.name) for key in left]
        return _distinct(made, list(left))
    if len(left) == len(right) == 1:
        (first,), (second,) = left.values(), right.values()
        return [_level(first, second, base.name, other.name)]
    for name, missing in ((other.name, left.keys() - right.keys()), (base.name, right.keys() - left.keys())):
        for source, chosen in sorted(missing):
            raise InputError(
                f"arm {name}: no run at the level {source}, selection {chosen}: expected every load level in every arm"
            )
    raise AssertionError("unreachable: equal keys were handled above")


def _by_load(arm: Arm) -> dict[tuple[str, str], list[Run]]:
    loads: dict[tuple[str, str], list[Run]] = {}
    for run in arm.runs:
        # A generated trace has another SHA-256 for every seed and is still the same load.
        source = (run.meta.get("trace") or {}).get("source") or trace_sha256(run) or "unknown"
        load = (_SEED.sub("seed *", source), _SEED.sub("seed *", selection(run)))
        loads.setdefault(load, []).append(run)
    return dict(sorted(loads.items(), key=lambda item: (offered_rate(item[1][0].frame), item[0])))


def _distinct(made: list[Level], keys: list[tuple[str, str]]) -> list[Level]:
    labels = [level.label for level in made]
    if len(set(labels)) == len(labels):
        return made
    return [
        Level(
            label=f"{level.label}, {source}, selection {chosen}",
            paired=level.paired,
            pairing=level.pairing,
            base=level.base,
            other=level.other,
            notes=level.notes,
        )
        for level, (source, chosen) in zip(made, keys, strict=True)
    ]


def _level(base: Sequence[Run], other: Sequence[Run], base_name: str, other_name: str) -> Level:
    reason = _why_unpaired(base, other)
    notes = _simulated_notes(base, other, base_name, other_name)
    if reason is None:
        pairs, found = _pair_runs(base, other)
        notes += found
        left, right = [], []
        for one, two in pairs:
            first, second, lost = _align(one, two)
            left.append(first)
            right.append(second)
            if lost:
                notes.append(
                    f"{lost} requests are in only one of {one.path.name} and {two.path.name} and were left out"
                )
        shas = dict.fromkeys(_short(trace_sha256(run)) for run in base)
        pairing = f"paired by request: same trace ({', '.join(shas)}), selection, row and seed"
    else:
        left = [_in_order(run.frame) for run in base]
        right = [_in_order(run.frame) for run in other]
        pairing = f"unpaired: {reason}"
    level = Level(
        label=f"{offered_rate(base[0].frame):.3g} req/s offered",
        paired=reason is None,
        pairing=pairing,
        base=tuple(left),
        other=tuple(right),
        notes=tuple(notes),
    )
    _check_strata(level, base_name, other_name)
    _check_targets(level, base_name, other_name)
    return level


def _simulated_notes(base: Sequence[Run], other: Sequence[Run], base_name: str, other_name: str) -> list[str]:
    """Return a line that names what is simulated where simulated and real runs meet; none where all are alike."""
    named, real = [], False
    for name, runs in ((base_name, base), (other_name, other)):
        simulated = [run for run in runs if run.meta.get("kind") == "simulation"]
        real = real or len(simulated) < len(runs)
        if simulated:
            whole = len(simulated) == len(runs)
            named.append(name if whole else f"{name} ({', '.join(run.path.name for run in simulated)})")
    if not named or not real:
        return []
    return [
        f"simulated by the twin, not measured: {' and '.join(named)}; the rest ran on a real server, so the change "
        "holds the error of the simulation too"
    ]


def _key(run: Run) -> tuple[str, str, str]:
    return str(trace_sha256(run)), selection(run), str(seed(run))


def _why_unpaired(base: Sequence[Run], other: Sequence[Run]) -> str | None:
    if any(trace_sha256(run) is None for run in (*base, *other)):
        return "a run does not tell the SHA-256 of its trace"
    left, right = sorted(map(_key, base)), sorted(map(_key, other))
    if left == right:
        return None
    for position, what in enumerate(("traces", "selections", "seeds")):
        one, two = (
            dict.fromkeys(key[position] if position else key[0][:_SHORT] for key in keys) for keys in (left, right)
        )
        if one.keys() != two.keys():
            return f"the {what} differ ({', '.join(one)} and {', '.join(two)})"
    return f"the repeats of a seed differ in number ({len(base)} and {len(other)} runs)"


def _pair_runs(base: Sequence[Run], other: Sequence[Run]) -> tuple[list[tuple[Run, Run]], list[str]]:
    # Repeats of one seed are paired in the order given; nothing else tells them apart.
    pairs = list(zip(sorted(base, key=_key), sorted(other, key=_key), strict=True))
    distinct_keys = {_key(one) for one, _ in pairs}
    if len(distinct_keys) < len(pairs):
        return pairs, ["repeats of the same seed were paired in the order given"]
    return pairs, []


def _align(base: Run, other: Run) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    for run in (base, other):
        if run.frame["trace_row"].n_unique() != run.frame.height:
            raise InputError(f"{run.path}: a trace_row appears twice: expected every row of the trace once")
    left = _in_order(base.frame)
    left = left.filter(pl.col("trace_row").is_in(other.frame["trace_row"].to_list()))
    right = left.select("trace_row").join(other.frame, on="trace_row", how="left", maintain_order="left")
    if left.is_empty():
        raise InputError(f"{base.path}, {other.path}: no trace_row in common: expected the same slice of the trace")
    lost = base.frame.height + other.frame.height - 2 * left.height
    return left, right.select(left.columns), lost


def _in_order(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort("scheduled_s", "index")


def classes(frames: Sequence[pl.DataFrame]) -> list[str]:
    """Return the class names in `frames`, sorted; a request without a class belongs to `default`."""
    return sorted({name or "default" for frame in frames for name in frame["slo_class"].unique()})


def _check_strata(level: Level, base_name: str, other_name: str) -> None:
    left, right = classes(level.base), classes(level.other)
    for name, mine, theirs in ((base_name, left, right), (other_name, right, left)):
        if missing := [each for each in theirs if each not in mine]:
            raise InputError(
                f"arm {name}, {level.label}: class {missing[0]!r} has no requests (classes there: "
                f"{', '.join(mine)}): expected every class in every arm"
            )


def _check_targets(level: Level, base_name: str, other_name: str) -> None:
    def targets(frames: tuple[pl.DataFrame, ...]) -> set[tuple]:
        rows = pl.concat([frame.select(pl.col("slo_class").fill_null("default"), *_TARGETS) for frame in frames])
        return set(rows.unique().iter_rows())

    left, right = targets(level.base), targets(level.other)
    if left != right:
        only = sorted(left ^ right, key=str)[0]
        raise InputError(
            f"{level.label}: {base_name} and {other_name} were scored against different targets; only one has "
            f"class {only[0]!r} with TTFT, TPOT, TBT = {only[1:]} s: expected equal targets"
        )


def _short(sha: str | None) -> str:
    return "unknown" if sha is None else sha[:_SHORT]


def configuration(run: Run) -> str:
    """Return model, server version and kind of load as one canonical string (no times, no addresses)."""
    server = run.meta.get("server") or {}
    load = run.meta.get("load") or {}
    told = {key: server.get(key) for key in ("model", "version")} | {"load": load}
    return json.dumps(told, sort_keys=True, default=str)


def machine(run: Run) -> dict:
    """Return what tells one client machine from another, without what changes by the minute."""
    facts = run.meta.get("machine") or {}
    return {key: facts.get(key) for key in ("system", "machine", "cpu", "cpus_usable")}
