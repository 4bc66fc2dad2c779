"""`headway check`: does any accepted request of a trace miss a promise, whatever its steps take under the envelope?

The trace runs through the twin under many courses of service times (patterns.py): every step at its envelope, at its
mean, alternating, drawn at random, in spells, and courses that a local search bends towards the tightest promise. One
miss is a counter-example; without any the result is a certificate of what was tried, under the assumptions it lists.
docs/guarantee.md proves the claim that this tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from headway import admission, policies
from headway.errors import InputError
from headway.trace.record import Trace
from headway.twin.flight import Issued
from headway.twin.patterns import Course, Edited, Scripted, alternating, constant, spells, uniform
from headway.twin.price import NONE
from headway.twin.scenario import Scenario, Value, simulate

#: Settings that docs/guarantee.md proves something about.
STRICT: dict[str, Value] = {
    "policy": "headway",
    "policy.jump": False,
    "admission": "response_time",
    "admission.strict": True,
    "admission.foresight": 0.0,
    "learn": False,
}

#: Relative excess over a target that is rounding, not lateness.
TOLERANCE = 1e-6

#: Least factor of a step: far below the mean, as after a mistaken fit.
LOW = 0.25

_TARGETS = (
    ("ttft", "ttft_s", "ttft_target_s"),
    ("tpot", "tpot_s", "tpot_target_s"),
    ("tbt", "tbt_max_s", "tbt_target_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The promise that came nearest to being broken: (target - value) / target, negative when it was."""

    index: int  # row of the run
    target: str
    value_s: float
    target_s: float
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of the trace under one course."""

    pattern: str
    offered: int
    accepted: int  # with a promise
    unpromised: int  # served, but outside the guarantee
    refused: int
    missed: int
    steps: int
    tightest: Mapping[str, Margin]  # by target

    def as_dict(self) -> dict[str, Any]:
        """Return the serialised form."""
        out = {name: getattr(self, name) for name in self.__slots__}
        out["tightest"] = {
            target: {name: getattr(margin, name) for name in margin.__slots__}
            for target, margin in self.tightest.items()
        }
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was tried and found. `counter` is None when no promise was broken."""

    trace: Mapping[str, Any]
    profile: Mapping[str, Any]
    settings: Mapping[str, Value]
    classes: Mapping[str, Mapping[str, float | None]]
    attempts: list[Attempt]
    assumptions: list[str]
    dropped: list[str]
    counter: Mapping[str, Any] | None = None
    seed: int = 0

    @property
    def holds(self) -> bool:
        """Whether no promise was broken."""
        return self.counter is None

    def as_dict(self) -> dict[str, Any]:
        """Return the serialised form."""
        return {
            "holds": self.holds,
            "trace": dict(self.trace),
            "profile": dict(self.profile),
            "settings": dict(self.settings),
            "classes": {name: dict(each) for name, each in self.classes.items()},
            "seed": self.seed,
            "runs": len(self.attempts),
            "accepted": sum(each.accepted for each in self.attempts),
            "missed": sum(each.missed for each in self.attempts),
            "patterns": [each.as_dict() for each in self.attempts],
            "assumptions": self.assumptions,
            "assumptions_dropped": self.dropped,
            "counter_example": self.counter,
        }


@dataclass(slots=True)
class _Watch:
    """Start of every step, so that the search knows which steps a request lived through."""

    starts: list[float] = field(default_factory=list)

    def __call__(self, step: Issued) -> None:
        self.starts.append(step.start_s)


def check(
    trace: Trace,
    scenario: Scenario,
    *,
    seeds: int = 4,
    searches: int = 40,
    progress: Callable[[Attempt], None] = lambda attempt: None,
) -> Certificate:
    """Run the trace under every pattern, then search; stop at the first broken promise.

    Args:
        trace: what arrives.
        scenario: profile, classes, settings (`STRICT` unless they say otherwise) and seed.
        seeds: random courses of each kind.
        searches: courses that the local search tries.
        progress: told of every run.

    Raises:
        InputError: a setting makes no sense here, or nothing is promised at all.
    """
    settings = _settings(scenario.settings)
    for key in ("noise", "grace_s"):
        if key in settings:
            raise InputError(f"setting {key}: expected none: a check chooses the service times and runs to the end")
    # The envelope is one of the line that promises are made with, and the check takes any time under it: what kinds of
    # steps differ from that line by is noise here.
    scenario = replace(scenario, settings=settings, profile=replace(scenario.profile, correction=NONE))
    if not any(slo.ttft_s is not None for slo in scenario.classes.values()):
        raise InputError("no class has a TTFT target, so nothing is promised: expected --slo or --config")
    factor = scenario.profile.envelope_factor
    attempts: list[Attempt] = []
    worst: dict[str, tuple[float, Course]] = {}  # by target
    counter: dict[str, Any] | None = None

    def run(name: str, course: Course) -> Attempt:
        nonlocal counter
        attempt = attempted(trace, scenario, name, course)
        attempts.append(attempt)
        progress(attempt)
        for target, margin in attempt.tightest.items():
            if target not in worst or margin.relative < worst[target][0]:
                worst[target] = (margin.relative, course)
        if attempt.missed:
            counter = _counter_example(trace, scenario, name, course)
        return attempt

    for name, course in patterns(factor, seeds, scenario.seed):
        if run(name, course).missed:
            break
    random = np.random.default_rng([scenario.seed, 99])
    for number in range(searches):
        if counter is not None or not worst:
            break
        target = sorted(worst)[number % len(worst)]
        run(f"search {number + 1} ({target})", _bent(trace, scenario, target, worst[target][1], random))
    if not any(each.accepted for each in attempts):
        raise InputError(
            f"none of {len(trace)} requests was promised anything in {len(attempts)} runs, so nothing was checked: "
            "expected targets that this profile can meet"
        )
    kept, dropped = assumptions(scenario)
    profile = scenario.profile
    return Certificate(
        trace=trace.facts(),
        profile={key: profile.as_dict()[key] for key in ("name", "label", "cost", "envelope")},
        settings={**settings, **{f"profile.{key}": value for key, value in profile.engine.items()}},
        classes={
            name: {key: getattr(slo, key) for key in ("ttft_s", "tpot_s", "tbt_s")}
            for name, slo in scenario.classes.items()
        },
        attempts=attempts,
        assumptions=kept,
        dropped=dropped,
        counter=counter,
        seed=scenario.seed,
    )


def patterns(factor: float, seeds: int, seed: int) -> Iterator[tuple[str, Course]]:
    """Yield the fixed and the random courses under an envelope of `factor` times the mean."""
    yield "every step at its envelope", constant(factor)
    yield "every step at its mean", constant(1.0)
    yield f"every step at {LOW:g} of its mean", constant(LOW)
    yield "alternating envelope and mean", alternating(1.0, factor)
    yield f"8 steps at the envelope, 8 at {LOW:g}", alternating(LOW, factor, 8)
    # Long enough quiet for every burst to be there again when it gets slow.
    yield f"64 steps at the envelope, 64 at {LOW:g}", alternating(LOW, factor, 64)
    for number in range(seeds):
        yield f"random {number + 1}", uniform(LOW, factor, seed + number)
        yield f"spells {number + 1}", spells(LOW, factor, seed + number)


def attempted(trace: Trace, scenario: Scenario, name: str, course: Course) -> Attempt:
    """Run the trace under one course and judge every promise."""
    outcome = simulate(trace, scenario, noise=_scripted(scenario, course))
    frame = outcome.frame
    promised = _promised(frame, scenario)
    refused = frame.filter(pl.col("status") == "refused").height
    missed, tightest = judge(promised)
    return Attempt(
        pattern=name,
        offered=frame.height,
        accepted=promised.height,
        unpromised=frame.height - promised.height - refused,
        refused=refused,
        missed=missed,
        steps=outcome.facts["steps"],
        tightest=tightest,
    )


def _scripted(scenario: Scenario, course: Course) -> Callable[[int], Scripted]:
    """Return the service times of a course, made less where steps in a row would take more than is counted on."""
    lines = scenario.profile.lines if _counts_stretches(scenario) else ()
    return lambda replica: Scripted(course, lines)


def _counts_stretches(scenario: Scenario) -> bool:
    settings = scenario.settings
    return bool(settings.get("admission.strict") and settings.get("admission.stretches", True))


def as_served(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings of a server's file with the server's defaults where it leaves out what is strict."""
    settings = dict(given)
    for key in STRICT:
        kind, _, parameter = key.partition(".")
        if parameter:
            registry = policies.REGISTRY if kind == "policy" else admission.REGISTRY
            known = inspect.signature(registry[str(given[kind])]).parameters
            if parameter in known:
                settings.setdefault(key, known[parameter].default)
    return settings


def _settings(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings: strict ones where none are given; parameters of a policy or test that was replaced go."""
    kept = {
        key: value
        for key, value in STRICT.items()
        if "." not in key
        or given.get(key.partition(".")[0], STRICT[key.partition(".")[0]]) == STRICT[key.partition(".")[0]]
    }
    return {**kept, **given}


def _promised(frame: pl.DataFrame, scenario: Scenario) -> pl.DataFrame:
    """Return the requests that were promised something: with a bound, or served by a test that gives none."""
    if scenario.settings["admission"] == STRICT["admission"]:
        return frame.filter(pl.col("ttft_bound_s").is_not_null())
    return frame.filter(pl.col("status") == "ok")


def judge(promised: pl.DataFrame) -> tuple[int, dict[str, Margin]]:
    """Return how many promised requests broke a target, and by target the tightest margin (the most broken one)."""
    late = np.zeros(promised.height, dtype=bool)
    best: dict[str, Margin] = {}
    for name, value, target in _TARGETS:
        values, targets = promised[value].to_numpy(), promised[target].to_numpy()
        relative = (targets - values) / targets  # NaN: no target, or a single token has no pace
        late |= relative < -TOLERANCE
        if np.isnan(relative).all():
            continue
        at = int(np.nanargmin(relative))
        best[name] = Margin(
            index=int(promised["index"][at]),
            target=name,
            value_s=float(values[at]),
            target_s=float(targets[at]),
            relative=float(relative[at]),
        )
    return int(late.sum()), best


def _bent(trace: Trace, scenario: Scenario, target: str, course: Course, random: np.random.Generator) -> Course:
    """Return the course with stretches of steps changed around the request whose promise was tightest."""
    watch = _Watch()
    outcome = simulate(trace, scenario, on_step=watch, noise=_scripted(scenario, course))
    frame = outcome.frame
    tightest = judge(_promised(frame, scenario))[1][target]
    row = frame.row(by_predicate=pl.col("index") == tightest.index, named=True)
    span = row["last_token_s"] - row["scheduled_s"]
    first = int(np.searchsorted(watch.starts, row["scheduled_s"] - span))
    last = max(first + 1, int(np.searchsorted(watch.starts, row["last_token_s"])))
    edited = course if isinstance(course, Edited) else Edited(course)
    factor = scenario.profile.envelope_factor
    for _ in range(int(random.integers(1, 4))):
        start = int(random.integers(first, last))
        length = int(random.integers(1, max(2, min(64, last - start) + 1)))
        edited = edited.change(start, length, float(random.choice([factor, factor, LOW, 1.0])))
    return edited


def _counter_example(trace: Trace, scenario: Scenario, name: str, course: Course) -> dict[str, Any]:
    """Return the most broken promise of a course with the steps between its arrival and its last token."""
    steps: list[dict[str, Any]] = []

    def listen(issued: Issued) -> None:
        steps.append(
            {
                "step": issued.number,
                "start_s": issued.start_s,
                "end_s": issued.end_s,
                "prefill_tokens": issued.step.q,
                "decodes": issued.step.n,
                "context_tokens": issued.step.K,
                "times_mean": issued.step.seconds
                / scenario.profile.cost.seconds(issued.step.q, issued.step.n, issued.step.K, issued.step.X),
                "chunks": {chunk.job.state.id: chunk.tokens for chunk in issued.batch.chunks},
                "held": [job.state.id for job in issued.batch.held],
            }
        )

    outcome = simulate(trace, scenario, on_step=listen, noise=_scripted(scenario, course))
    broken = min(judge(_promised(outcome.frame, scenario))[1].values(), key=lambda margin: margin.relative)
    row = outcome.frame.row(by_predicate=pl.col("index") == broken.index, named=True)
    keys = ("index", "slo_class", "prompt_tokens", "max_tokens", "generated_tokens", "scheduled_s", "ttft_s", "tpot_s",
            "tbt_max_s", "ttft_target_s", "tpot_target_s", "tbt_target_s", "ttft_bound_s")  # fmt: skip
    during = [s for s in steps if s["end_s"] > row["scheduled_s"] and s["start_s"] < row["last_token_s"]]
    return {
        "pattern": name,
        "target": broken.target,
        "late_s": broken.value_s - broken.target_s,
        "request": {key: row[key] for key in keys},
        "schedule": during,
    }


def assumptions(scenario: Scenario) -> tuple[list[str], list[str]]:
    """Return the assumptions of docs/guarantee.md that the twin keeps, and those that the settings drop."""
    settings = scenario.settings
    kept = [
        "A1 no step takes longer than its envelope (the check chooses every time under it)",
        "A2 the cost of a step is the profile's and does not change",
        "A3 an answer is no longer than its declared maximum",
        "A4 the engine executes the plan",
        "A5 the blocking allowance does not change",
        "A6 every promise is that of the strict test",
        "A8 the time outside the engine is front_s",
    ]
    if settings.get("prefix_cache", scenario.profile.engine.get("prefix_cache")):
        kept.insert(6, "A7 a prefix-cache hit known at arrival is still there at the start")
    if _counts_stretches(scenario):
        lines = [f"{rate:g} times their mean and {burst:g} s" for rate, burst in scenario.profile.lines]
        measured = f"steps in a row take at most {', at most '.join(lines)} (nor does the check choose more)"
        kept.insert(1, f"A1' {measured if lines else 'no promise counts on steps in a row: the profile does not tell'}")
    dropped = []
    if settings["policy"] != "headway":
        dropped.append(f"policy headway sizes and orders the steps: policy = {settings['policy']}")
    if settings.get("policy.jump"):
        dropped.append("policy headway serves in deadline order: policy.jump = true lets shorter ones overtake")
    if settings["admission"] != "response_time":
        dropped.append(f"A6 every promise is that of the strict test: admission = {settings['admission']}")
    elif not settings.get("admission.strict"):
        dropped.append(
            "A6 every promise is that of the strict test: admission.strict = false takes the expected course"
        )
    if settings.get("policy.min_chunk", 16) != settings.get("admission.min_chunk", 16):
        dropped.append("policy.min_chunk = admission.min_chunk: they differ")
    if settings.get("learn"):
        dropped.append("A2 learn = true: the decisions fit the cost to what they see, and their envelope may be lower")
    names = {text[:2] for text in dropped}
    return [text for text in kept if text[:2] not in names], dropped
