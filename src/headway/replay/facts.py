"""What `run.json` says from the start: command, machine, trace, server, load, targets."""

from __future__ import annotations

from collections.abc import Mapping

from headway.errors import InputError
from headway.replay import machine
from headway.replay.options import Options
from headway.replay.schedule import Schedule
from headway.replay.server import ServerFacts
from headway.replay.targets import DEFAULT_CLASS, Targets
from headway.trace.record import Trace


def _classes(trace: Trace) -> set[str]:
    return set(trace.frame["slo_class"].fill_null(DEFAULT_CLASS).unique())


def check_targets(trace: Trace, targets: Mapping[str, Targets]) -> None:
    """Raise `InputError` when there are targets, but for nobody in the trace: every answer would attain them."""
    named = _classes(trace)
    if targets and not named & set(targets) and DEFAULT_CLASS not in targets:
        raise InputError(
            f"targets for class {', '.join(sorted(targets))}, requests of class {', '.join(sorted(named))}: expected "
            "targets for one of these (--slo ttft=... without a class is for all; --class-rule gives classes)"
        )


def check_loop(trace: Trace, schedule: Schedule, options: Options) -> None:
    """Raise `InputError` when a closed loop would change nothing."""
    if options.closed_loop and not schedule.waiting_turns:
        raise InputError(
            f"--closed-loop: {trace.source} has no second turn of a session among the requests chosen: expected "
            "session_id and turn in the trace, or no --closed-loop"
        )


def at_start(
    *,
    trace: Trace,
    options: Options,
    targets: Mapping[str, Targets],
    told: ServerFacts,
    prompts: Mapping[str, object],
    event_loop: str,
) -> dict:
    """Return the content of `run.json` while the run is going on."""
    clock = machine.clock()
    run_id = f"hw{int(clock['started_unix_s'] * 1e3):x}"
    notes = list(told.notes)
    if told.max_model_len is not None:
        total = trace.frame["input_tokens"] + trace.frame["output_tokens"]
        if long := int((total > told.max_model_len).sum()):
            notes.append(f"{long} requests exceed the model length of {told.max_model_len} tokens")
    named = _classes(trace)
    if unused := sorted(set(targets) - named - {DEFAULT_CLASS}):
        notes.append(f"no request of class {', '.join(unused)} in the trace")
    if DEFAULT_CLASS not in targets and (untold := sorted(named - set(targets))):
        notes.append(f"no targets for class {', '.join(untold)}: every answer attains them")
    return {
        "format": 1,
        "kind": "replay",
        "state": "running",
        "run_id": run_id,
        "label": options.label,
        "command": machine.command(),
        "versions": dict(machine.versions()),
        "machine": machine.machine(),
        "clock": clock | {"event_loop": event_loop},
        "seed": options.seed,
        "trace": trace.facts(),
        "server": {
            "url": told.url,
            "model": told.model,
            "version": told.version,
            "models": told.models,
            "fields_taken": told.extras,
        },
        "prompts": dict(prompts),
        "load": {
            "loop": "closed" if options.closed_loop else "open",
            "max_in_flight": options.max_in_flight,
            "endpoint": options.endpoint,
            "slo_headers": options.send_slo_headers,
            "extra_body": dict(options.extra_body or {}),
            "timeout_s": options.timeout_s,
            "grace_s": options.grace_s,
        },
        "targets": {name: one.as_dict() for name, one in targets.items()},
        "notes": notes,
    }
