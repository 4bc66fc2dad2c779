"""SLO targets of a class, as a client states them, and the judgement of one request against them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headway.errors import InputError

#: The class of a request whose trace names none, and of targets given without a class.
DEFAULT_CLASS = "default"

_DAY_S = 86400.0
_KEYS = {"ttft": "ttft_s", "tpot": "tpot_s", "tbt": "tbt_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Latency targets of one SLO class in seconds; None means that this quantity has no target.

    Raises `InputError` on a target that is not a finite number in (0, 86400].
    """

    ttft_s: float | None = None  # scheduled arrival to first token
    tpot_s: float | None = None  # mean pace: (last token - first token) / (tokens - 1)
    tbt_s: float | None = None  # widest gap between two tokens

    def __post_init__(self) -> None:
        for key in _KEYS.values():
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and 0 < value <= _DAY_S):
                raise InputError(f"targets: {key} = {value!r}: expected seconds in (0, {_DAY_S:g}]")

    def met(self, *, ttft_s: float | None, tpot_s: float | None, tbt_max_s: float | None) -> bool:
        """Return whether a request that ended well kept every target.

        A TPOT or TBT of None (an answer of fewer than two tokens has none) cannot break its target; a TTFT of None
        does.
        """
        if self.ttft_s is not None and (ttft_s is None or ttft_s > self.ttft_s):
            return False
        if self.tpot_s is not None and tpot_s is not None and tpot_s > self.tpot_s:
            return False
        return not (self.tbt_s is not None and tbt_max_s is not None and tbt_max_s > self.tbt_s)

    def as_dict(self) -> dict[str, float | None]:
        """Return the targets with their serialised names."""
        return {key: getattr(self, key) for key in _KEYS.values()}

    @classmethod
    def from_dict(cls, values: dict[str, float | None]) -> Targets:
        """Return the targets that `as_dict` gave."""
        return cls(**values)


def parse_slo(values: Iterable[str]) -> dict[str, Targets]:
    """Return class -> targets from `chat:ttft=1,tpot=0.12` texts (seconds, or with a unit: `500ms`, `1.5s`).

    Without `class:` the targets are those of class `default`. Raises `InputError` naming the text, key and value.
    """
    classes: dict[str, Targets] = {}
    for text in values:
        name, colon, rest = text.partition(":")
        if not colon:
            name, rest = DEFAULT_CLASS, text
        name = name.strip()
        if not name:
            raise InputError(f"--slo {text!r}: expected a class name before the colon")
        if name in classes:
            raise InputError(f"--slo {text!r}: class {name!r} is given twice")
        targets: dict[str, float] = {}
        for part in rest.split(","):
            key, equals, raw = (piece.strip() for piece in part.partition("="))
            if not equals or key not in _KEYS:
                raise InputError(f"--slo {text!r}: {part!r}: expected KEY=SECONDS with KEY one of {', '.join(_KEYS)}")
            if _KEYS[key] in targets:
                raise InputError(f"--slo {text!r}: {key} is given twice")
            targets[_KEYS[key]] = _seconds(text, key, raw)
        classes[name] = Targets(**targets)
    return classes


def _seconds(text: str, key: str, raw: str) -> float:
    number, scale = (raw[:-2], 1e-3) if raw.endswith("ms") else (raw.removesuffix("s"), 1.0)
    try:
        value = float(number) * scale
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 < value <= _DAY_S):
        raise InputError(
            f"--slo {text!r}: {key} = {raw!r}: expected seconds in (0, {_DAY_S:g}], or with a unit ms or s"
        )
    return value
