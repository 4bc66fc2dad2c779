"""A what-if: profile, settings, targets and seed; run on a trace it gives the folder of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from headway import admission, policies
from headway.core import Slo, StepCost
from headway.core.slo import blocking_s
from headway.errors import InputError
from headway.replay import machine, store
from headway.replay.targets import Targets
from headway.trace.record import Trace
from headway.twin import router
from headway.twin.config import EngineConfig
from headway.twin.engine import Engine
from headway.twin.flight import StepListener
from headway.twin.noise import Noise, NoiseModel
from headway.twin.price import NONE
from headway.twin.profile import Profile
from headway.twin.recorder import Recorder
from headway.twin.simulation import Simulation
from headway.twin.source import DEFAULT_CLASS, arrivals

#: Times of single tokens are kept up to so many output tokens of the trace (8 bytes each).
KEEP_TOKENS = 5_000_000

Value = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One what-if.

    Attributes:
        profile: the engine and what a step costs.
        targets: SLO class -> latency targets.
        slos: the classes in full (weight, rule on a miss) in place of `targets`.
        settings: what differs from the profile, by the keys of `known_settings`.
        seed: of the step noise.
        label: name of the run in tables.
    """

    profile: Profile
    targets: Mapping[str, Targets] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)
    seed: int = 0
    label: str = ""
    slos: Mapping[str, Slo] | None = None

    @property
    def classes(self) -> Mapping[str, Slo]:
        """The SLO classes that the decisions see."""
        if self.slos is not None:
            return self.slos
        return {name: Slo(name=name, **each.as_dict()) for name, each in self.targets.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulation gave: the table of requests, facts about the engine, seconds of real time it took."""

    frame: pl.DataFrame
    facts: Mapping[str, Any]
    wall_s: float


def known_settings() -> dict[str, str]:
    """Return setting -> what it is, for help and errors."""
    named = {item.name: f"engine setting ({item.type})" for item in fields(EngineConfig)}
    return named | {
        "policy": f"one of {', '.join(policies.REGISTRY)}",
        "admission": f"one of {', '.join(admission.REGISTRY)}",
        "policy.PARAMETER": "parameter of the policy",
        "admission.PARAMETER": "parameter of the admission test",
        "replicas": "engines behind the router",
        "router": f"one of {', '.join(router.ROUTERS)}",
        "grace_s": "seconds after the last arrival until open requests are cut off (none: run to the end)",
        "noise": "true; false: every step takes exactly its price; bounded: no step exceeds its envelope, without the "
        "factors for kinds of steps",
    }


def parse_settings(texts: list[str] | tuple[str, ...]) -> dict[str, Value]:
    """Return the settings of `KEY=VALUE` texts; `InputError` for a bad one or one given twice."""
    settings: dict[str, Value] = {}
    for text in texts:
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or not key or not raw:
            raise InputError(f"--set {text!r}: expected KEY=VALUE")
        if key in settings:
            raise InputError(f"--set {text!r}: {key} is given twice")
        check_key(key)
        settings[key] = parse_value(raw)
    return settings


def check_key(key: str) -> None:
    """Raise `InputError` when no setting has this name."""
    head, dot, _ = key.partition(".")
    if not (key in known_settings() or (dot and head in ("policy", "admission"))):
        raise InputError(f"setting {key!r}: expected one of {', '.join(known_settings())}")


def merged(settings: Mapping[str, Value], over: Mapping[str, Value], optional: Collection[str]) -> dict[str, Value]:
    """Return settings under others; a policy or test that these replace takes its `optional` ones along."""
    gone = {key for key in optional if (kind := key.partition(".")[0]) in over and over[kind] != settings.get(kind)}
    return {**{key: value for key, value in settings.items() if key not in gone}, **over}


def parse_value(raw: str) -> Value:
    """Return a whole number, a number, true or false, or the text itself."""
    if raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    for kind in (int, float):
        try:
            return kind(raw)
        except ValueError:
            continue
    return raw


def simulate(
    trace: Trace,
    scenario: Scenario,
    *,
    on_step: StepListener | None = None,
    noise: Callable[[int], Noise] | None = None,
) -> Outcome:
    """Run `trace` through the scenario. Same trace, scenario and seed give the same table, byte for byte.

    `on_step` is told of every step; `noise` gives the step factors of a replica in place of the profile's.

    Raises:
        InputError: a setting is unknown or has a value that makes no sense.
    """
    settings = dict(scenario.settings)
    for key in settings:
        check_key(key)
    replicas = _whole(settings.pop("replicas", 1), "replicas")
    route = router.create(str(settings.pop("router", "round_robin")))
    grace = settings.pop("grace_s", None)
    grace_s = None if grace in (None, "none") else _number(grace, "grace_s")
    noisy = settings.pop("noise", True)
    policy_of = _factory(policies, "policy", settings, "headway")
    admission_of = _factory(admission, "admission", settings, "response_time")
    config = _config(scenario.profile, settings)
    slos = scenario.classes
    tokens = int(trace.frame["output_tokens"].sum() or 0)
    recorder = Recorder(front_s=config.front_s, keep_tokens=tokens <= KEEP_TOKENS)
    profile = scenario.profile
    if noisy == "bounded":
        profile = replace(profile, correction=NONE)  # the envelope is one of the line that decisions believe in
    model = _noise(profile, noisy)
    lines = profile.lines if noisy == "bounded" else ()
    engines = [
        Engine(
            config=config,
            truth=profile.price,
            noise=noise(index) if noise else Noise(model, np.random.default_rng([scenario.seed, index]), lines),
            policy=policy_of(),
            admission=admission_of(),
            belief=_belief(profile, config),
            recorder=recorder,
            blocking_s=config.blocking_s
            or blocking_s(each.ttft_s for each in slos.values() if each.ttft_s is not None),
            on_step=on_step,
        )
        for index in range(replicas)
    ]
    started = time.perf_counter()
    simulation = Simulation(
        engines=engines,
        router=route,
        source=arrivals(trace, slos, hashes=config.prefix_cache),
        recorder=recorder,
        grace_s=grace_s,
    )
    end = simulation.run()
    wall = time.perf_counter() - started
    steps = sum(engine.step for engine in engines)
    over, judged = (sum(pair) for pair in zip(*(engine.belief.exceeded() for engine in engines), strict=True))
    facts = {
        "end_s": end,
        "steps": steps,
        "steps_with_prefill": sum(engine.steps_with_prefill for engine in engines),
        "busy_share": sum(engine.busy_s for engine in engines) / (end * replicas) if end else 0.0,
        "preemptions": sum(engine.batcher.preemptions for engine in engines),
        "preempted_requests": recorder.preempted_requests,
        "cached_prompt_tokens": recorder.cached_tokens,
        "envelope_exceeded": over / judged if judged else None,
        "token_times_kept": recorder.keep_tokens,
        "replicas": replicas,
        "policy": engines[0].policy.name,
        "admission": engines[0].admission.name,
        "config": {item.name: getattr(config, item.name) for item in fields(config)},
    }
    return Outcome(frame=recorder.frame(trace.frame, trace.first_row), facts=facts, wall_s=wall)


def save(path: Path, trace: Trace, scenario: Scenario, outcome: Outcome) -> store.Run:
    """Write the folder of a run, in the same layout as a replay's."""
    check_new(path)
    return store.save(path, meta_of(trace, scenario, outcome), outcome.frame)


def check_new(path: Path) -> None:
    """Raise `InputError` when the folder holds a run."""
    if (path / store.META).exists():
        raise InputError(f"{path}: holds a run already: expected a new folder")


def meta_of(trace: Trace, scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """Return `run.json`: a replay's keys, with the twin in the place of client and server."""
    profile = scenario.profile
    notes = [] if outcome.facts["token_times_kept"] else ["token times not kept: gap percentiles are missing"]
    if profile.label == "estimated":
        notes.append("estimated profile: roofline from datasheets, not measured")
    return {
        "format": 1,
        "kind": "simulation",
        "state": "finished",
        "valid": True,
        "invalid_reasons": [],
        "label": scenario.label,
        "command": machine.command(),
        "versions": machine.versions(),
        "machine": machine.machine(),
        "clock": machine.clock(),
        "seed": scenario.seed,
        "trace": trace.facts(),
        "server": {"model": profile.name, "version": f"twin ({profile.label} profile)"},
        "load": {"loop": "open", "max_in_flight": None, "endpoint": "twin"},
        "targets": {
            name: {key: getattr(slo, key) for key in ("ttft_s", "tpot_s", "tbt_s")}
            for name, slo in scenario.classes.items()
        },
        "settings": dict(scenario.settings),
        "profile": profile.as_dict(),
        "engine": dict(outcome.facts),
        "not_offered": 0,
        "notes": notes,
        "wall_s": round(outcome.wall_s, 3),
    }


def _noise(profile: Profile, setting: Value) -> NoiseModel:
    if setting is True:
        return profile.noise
    if setting is False:
        return replace(profile.noise, sigma=0.0, stall_share=0.0, drift=0.0)
    if setting == "bounded":
        return replace(profile.noise, cap=profile.envelope_factor)
    raise InputError(f"noise = {setting!r}: expected true, false or bounded")


def _belief(profile: Profile, config: EngineConfig) -> StepCost:
    if config.learn:
        return StepCost(profile.cost, eps=config.eps)
    return StepCost.fixed(profile.cost, factor=profile.envelope_factor, eps=config.eps, lines=profile.lines)


def _config(profile: Profile, settings: dict[str, Value]) -> EngineConfig:
    values: dict[str, Any] = {**profile.engine, **settings}
    defaults = EngineConfig()
    for key, value in list(values.items()):
        default = getattr(defaults, key)
        if value == "none" and default is None:
            values[key] = None
            continue
        kind = type(default)
        if kind is bool:
            if not isinstance(value, bool):
                raise InputError(f"{key} = {value!r}: expected true or false")
        elif kind is int or key in ("max_queued_tokens", "output_cap"):
            values[key] = _whole(value, key)
        else:
            values[key] = _number(value, key)
    return EngineConfig(**values)


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key} = {value!r}: expected a whole number of at least 1")
    return value


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise InputError(f"{key} = {value!r}: expected a number of at least 0")
    return float(value)


def _factory(registry: Any, kind: str, settings: dict[str, Value], default: str) -> Any:
    """Take `kind` and `kind.*` out of the settings; return a function that makes a new object."""
    name = str(settings.pop(kind, default))
    prefix = f"{kind}."
    parameters = {key.removeprefix(prefix): settings.pop(key) for key in list(settings) if key.startswith(prefix)}

    def create() -> Any:
        try:
            return registry.create(name, **parameters)
        except ValueError as error:
            raise InputError(f"{kind} {name}: {error}") from error

    create()
    return create


__all__ = ["DEFAULT_CLASS", "Outcome", "Scenario", "meta_of", "parse_settings", "save", "simulate"]
