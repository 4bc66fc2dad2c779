"""A profile: what the twin knows of one engine on one machine, and where that comes from.

A TOML or JSON file (`docs/twin.md`); every number in seconds, tokens or shares. `label` is `measured` when the step
cost was fitted to a step log, `estimated` when it comes from datasheets.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headway.core import CostCoefficients, Line
from headway.errors import InputError
from headway.twin.noise import NoiseModel
from headway.twin.price import NONE, Correction, Price, as_tables, edges

FORMAT = 1
LABELS = ("measured", "estimated")

_COST = {"g_s": "g", "a_s": "a", "b_s": "b", "k_s": "k", "x_s": "x"}

#: Engine settings that a profile may fix; `--set` overrides them.
ENGINE_KEYS: dict[str, type] = {
    "token_budget": int,
    "max_running": int,
    "max_model_len": int,
    "block_size": int,
    "kv_blocks": int,
    "prefix_cache": bool,
    "async_lag": bool,
    "front_s": float,
}


def is_engine_fact(key: str, value: object) -> bool:
    """Whether a value is one that this engine setting may have."""
    kind = ENGINE_KEYS[key]
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and value >= 1
    return isinstance(value, int | float) and 0 <= value < math.inf


def engine_words(key: str) -> str:
    """Return what is expected of an engine setting, in words."""
    words = {bool: "true or false", int: "a whole number of at least 1", float: "0 or more seconds"}
    return words[ENGINE_KEYS[key]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinError:
    """Error of the twin against a real run, as fractions of the real value (attainment and refusals: absolute).

    `busy_max` is the largest share of time with a step in flight up to which this entry speaks; `load` names it.
    """

    load: str
    busy_max: float
    errors: Mapping[str, float]  # metric -> error, ttft_p50 for instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Step cost, envelope, noise and settings of one engine."""

    name: str
    label: str
    cost: CostCoefficients
    correction: Correction = NONE  # of the price of a step; what the engine believes is linear
    envelope_factor: float = 1.2
    eps: float = 0.05
    lines: tuple[Line, ...] = ()  # envelopes of steps in a row
    noise: NoiseModel = field(default_factory=NoiseModel)
    engine: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    fit_error: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # regime -> statistic -> value
    twin_error: tuple[TwinError, ...] = ()

    def error_for(self, busy_share: float) -> TwinError | None:
        """Return the recorded error that speaks for a run of this utilisation, None when there is none."""
        for entry in sorted(self.twin_error, key=lambda each: each.busy_max):
            if busy_share <= entry.busy_max:
                return entry
        return None

    @property
    def price(self) -> Price:
        """What steps take, without noise."""
        return Price(cost=self.cost, correction=self.correction)

    def as_dict(self) -> dict[str, Any]:
        """Return the serialised form."""
        return {
            "format": FORMAT,
            "name": self.name,
            "label": self.label,
            "cost": {key: getattr(self.cost, name) for key, name in _COST.items()},
            "envelope": {
                "eps": self.eps,
                "factor": self.envelope_factor,
                **({"stretches": [line._asdict() for line in self.lines]} if self.lines else {}),
            },
            "noise": {
                key: getattr(self.noise, key)
                for key in ("sigma", "stall_share", "stall_factor", "cap", "drift", "drift_steps", "keep", "ref_s")
                if getattr(self.noise, key) is not None
                and (self.noise.drift or not key.startswith("drift"))
                and (self.noise.keep < 1 or key not in ("keep", "ref_s"))
            },
            "correction": as_tables(self.correction) if self.correction is not NONE else {},
            "engine": dict(self.engine),
            "provenance": dict(self.provenance),
            "fit_error": {regime: dict(values) for regime, values in self.fit_error.items()},
            "twin_error": [
                {"load": entry.load, "busy_max": entry.busy_max, **entry.errors} for entry in self.twin_error
            ],
        }

    def save(self, path: Path) -> None:
        """Write the profile; `.json` gives JSON, anything else TOML. `InputError` where that can't be done."""
        data = self.as_dict()
        text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else _toml(data)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def load(path: Path) -> Profile:
    """Return the profile in a TOML or JSON file; `InputError` names file, key, value and what was expected."""
    try:
        raw = path.read_bytes()
        data = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: not a profile: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a table of settings")
    if {"g", "a", "b", "k", "x"} <= data.keys() and "cost" not in data:
        # The step cost that a server keeps between starts (engine/vllm/profile.py).
        data = {
            "format": FORMAT,
            "label": "measured",
            "cost": {key: data[name] for key, name in _COST.items()},
            "provenance": {"source": "step cost learned by a server", "steps": data.get("steps", 0)},
        }
    return _Reader(path).profile(data)


class _Reader:
    """Reads the tables of a profile and refuses what it does not know."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def profile(self, data: dict[str, Any]) -> Profile:
        known = {"format", "name", "label", "cost", "envelope", "noise", "correction", "engine", "provenance"}
        self.keys("", data, known | {"fit_error", "twin_error"})
        if data.get("format") != FORMAT:
            raise InputError.at(self.path, None, "format", data.get("format"), f"{FORMAT}")
        label = data.get("label")
        if label not in LABELS:
            raise InputError.at(self.path, None, "label", label, " or ".join(LABELS))
        cost = self.table(data, "cost")
        self.keys("cost.", cost, set(_COST))
        values = {
            name: self.number("cost", cost, key, 0.0 if key in ("k_s", "x_s") else None) for key, name in _COST.items()
        }
        if values["g"] + values["a"] + values["b"] <= 0:
            raise InputError.at(self.path, None, "cost", cost, "a step that takes time")
        envelope, noise = self.table(data, "envelope"), self.table(data, "noise")
        self.keys("envelope.", envelope, {"eps", "factor", "stretches"})
        self.keys("noise.", noise, {item.name for item in fields(NoiseModel)})
        factor = self.number("envelope", envelope, "factor", 1.2)
        if factor < 1:
            raise InputError.at(self.path, None, "envelope.factor", factor, "a number of at least 1")
        engine = self.table(data, "engine")
        self.keys("engine.", engine, set(ENGINE_KEYS))
        for key, value in engine.items():
            if not is_engine_fact(key, value):
                raise InputError.at(self.path, None, f"engine.{key}", value, ENGINE_KEYS[key].__name__)
        return Profile(
            name=str(data.get("name", self.path.stem)),
            label=label,
            cost=CostCoefficients(**values),
            correction=self.correction(self.table(data, "correction")),
            envelope_factor=factor,
            eps=self.number("envelope", envelope, "eps", 0.05),
            lines=self.lines(envelope.get("stretches", [])),
            noise=NoiseModel(**{key: self.number("noise", noise, key, None) for key in noise}),
            engine=engine,
            provenance=self.table(data, "provenance"),
            fit_error=self.table(data, "fit_error"),
            twin_error=tuple(self.error(entry) for entry in data.get("twin_error", ())),
        )

    def lines(self, rows: Any) -> tuple[Line, ...]:
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError.at(self.path, None, "envelope.stretches", rows, "tables with rate and burst_s")
        out = []
        for row in rows:
            self.keys("envelope.stretches.", row, {"rate", "burst_s"})
            rate, burst = (self.number("envelope.stretches", row, key, None) for key in ("rate", "burst_s"))
            if rate < 1:
                raise InputError.at(self.path, None, "envelope.stretches.rate", rate, "a number of at least 1")
            out.append(Line(rate, burst))
        return tuple(out)

    def correction(self, rows: dict[str, Any]) -> Correction:
        if not rows:
            return NONE
        q_up_to = edges(list(rows), "q_")
        if q_up_to is None:
            raise InputError.at(self.path, None, "correction", list(rows), "tables q_0, q_32, ... q_more in this order")
        table, first = [], list(self.table(rows, next(iter(rows))))
        n_up_to = edges(first, "n_") if first else None
        for name in rows:
            row = self.table(rows, name)
            if n_up_to is None or list(row) != first:
                wanted = "keys n_0, n_2, ... n_more in this order, the same in each table"
                raise InputError.at(self.path, None, f"correction.{name}", list(row), wanted)
            table.append(tuple(self.number(f"correction.{name}", row, key, None) for key in row))
            if not all(table[-1]):
                raise InputError.at(self.path, None, f"correction.{name}", row, "factors above 0")
        return Correction(q_up_to=q_up_to, n_up_to=n_up_to or (), factors=tuple(table))

    def error(self, entry: Any) -> TwinError:
        if not isinstance(entry, dict):
            raise InputError.at(self.path, None, "twin_error", entry, "a table")
        errors = {key: self.number("twin_error", entry, key, None) for key in entry if key not in ("load", "busy_max")}
        return TwinError(
            load=str(entry.get("load", "")), busy_max=self.number("twin_error", entry, "busy_max", None), errors=errors
        )

    def table(self, data: dict[str, Any], key: str) -> dict[str, Any]:
        value = data.get(key, {})
        if not isinstance(value, dict):
            raise InputError.at(self.path, None, key, value, "a table")
        return value

    def keys(self, prefix: str, table: dict[str, Any], known: set[str]) -> None:
        for key in table:
            if key not in known:
                raise InputError.at(self.path, None, prefix + key, table[key], f"one of {', '.join(sorted(known))}")

    def number(self, prefix: str, table: dict[str, Any], key: str, default: float | None) -> float:
        value = table.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise InputError.at(self.path, None, f"{prefix}.{key}", value, "a finite number of at least 0")
        return float(value)


def _toml(data: Mapping[str, Any]) -> str:
    """Return `data` as TOML (strings, numbers, booleans, tables of those, arrays of tables)."""
    lines: list[str] = []
    _write_table(lines, "", data)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(lines: list[str], path: str, table: Mapping[str, Any]) -> None:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    arrays = {key: value for key, value in table.items() if isinstance(value, (list, tuple))}
    for key, value in table.items():
        if key not in nested and key not in arrays and value is not None:
            lines.append(f"{_key(key)} = {json.dumps(value)}")
    for key, value in nested.items():
        if value:
            name = f"{path}{_key(key)}"
            lines += ["", f"[{name}]"]
            _write_table(lines, f"{name}.", value)
    for key, value in arrays.items():
        for entry in value:
            lines += ["", f"[[{path}{_key(key)}]]"]
            _write_table(lines, f"{path}{_key(key)}.", entry)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)
