"""`headway.toml`: SLO classes, policy and admission test. Read by the scheduler and by the HTTP middleware alike."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.core.slo import MAX_TARGET_S, Slo
from headway.errors import InputError

#: Class of the start-up sweep: always known, without targets.
CALIBRATION_CLASS = "calibration"

_Milliseconds = Annotated[float, Field(gt=0, le=MAX_TARGET_S * 1e3, allow_inf_nan=False, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SloClass(_Strict):
    """One `[class.NAME]` table."""

    ttft_ms: _Milliseconds | None = None
    tpot_ms: _Milliseconds | None = None
    tbt_ms: _Milliseconds | None = None
    on_miss: Literal["reject", "defer", "best_effort"] = "reject"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    #: Output tokens reserved for a request that names no max_tokens.
    assumed_output_tokens: Annotated[int, Field(ge=1)] = 512

    def slo(self, name: str) -> Slo:
        """Return the targets in seconds."""
        return Slo(
            name=name,
            ttft_s=_seconds(self.ttft_ms),
            tpot_s=_seconds(self.tpot_ms),
            tbt_s=_seconds(self.tbt_ms),
            on_miss=self.on_miss,
            weight=self.weight,
        )


class Config(_Strict):
    """The whole file; every key has a default, so an empty file is valid and promises nothing."""

    policy: str = "headway"
    admission: str = "response_time"
    policy_parameters: dict[str, Any] = Field(default_factory=dict)
    admission_parameters: dict[str, Any] = Field(default_factory=dict)
    default_class: str = "default"
    #: Share of steps that may exceed the envelope that promises are made with.
    eps: Annotated[float, Field(gt=0, lt=1)] = 0.05
    #: Longest step while a request may arrive; default a quarter of the tightest TTFT target in use.
    blocking_ms: _Milliseconds | None = None
    #: Time from the engine to the client (detokenise, HTTP) that deadlines leave room for.
    front_ms: Annotated[float, Field(ge=0, le=60_000)] = 15.0
    #: Age at which a request without TTFT target is ordered as if its deadline had come, so that it cannot starve.
    patience_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    class_: dict[str, SloClass] = Field(default_factory=dict, alias="class")

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @property
    def classes(self) -> dict[str, SloClass]:
        """Every class by name, the default one and that of the start-up sweep included."""
        return {self.default_class: SloClass(), CALIBRATION_CLASS: SloClass(), **self.class_}


def load(path: str | Path) -> Config:
    """Read and check a `headway.toml`.

    Raises:
        InputError: the file cannot be read, is no TOML, or holds an unknown key or a bad value; the message names
            file, line, key, value and what was expected.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the configuration: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{found.group(1)}" if found else str(path)
        raise InputError(f"{where}: not valid TOML: {error}") from error
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        keys = [str(part) for part in first["loc"]]
        expected = "a known key" if first["type"] == "extra_forbidden" else _lower(first["msg"])
        if first["type"] == "extra_forbidden":
            model = SloClass if keys[0] == "class" else Config
            known = sorted(field.alias or name for name, field in model.model_fields.items())
            expected = f"one of {', '.join(known)}"
        raise InputError.at(path, _line(text, keys), ".".join(keys), first["input"], expected) from error
    if config.class_ and config.default_class not in config.class_:
        raise InputError.at(
            path,
            _line(text, ["default_class"]),
            "default_class",
            config.default_class,
            f"one of the classes of the file: {', '.join(config.class_)} (or a [class.default] table)",
        )
    _check_names(config, path, text)
    return config


def _check_names(config: Config, path: Path, text: str) -> None:
    """Create policy and admission test once, so that a bad name or parameter is found before a server starts."""
    from headway import admission, policies

    for key, create, name, parameters in (
        ("policy", policies.create, config.policy, config.policy_parameters),
        ("admission", admission.create, config.admission, config.admission_parameters),
    ):
        try:
            create(name, **parameters)
        except (InputError, ValueError) as error:
            line = _line(text, [key])
            raise InputError(f"{path}{f':{line}' if line else ''}: {error}") from error


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _lower(message: str) -> str:
    return (message[:1].lower() + message[1:]).removeprefix("input should be ")


def _line(text: str, keys: list[str]) -> int | None:
    """Return the 1-based line of a key, following table headers; the header's line when the key is not found."""
    table, leaf = ".".join(keys[:-1]), keys[-1]
    current, header = "", None
    for number, line in enumerate(text.splitlines(), start=1):
        if opened := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            current = opened.group(1).replace('"', "").replace("'", "").replace(" ", "")
            if current in (table, ".".join(keys)):
                header = number
        elif named := re.match(r"\s*[\"']?([\w.-]+)[\"']?\s*=", line):
            full = f"{current}.{named.group(1)}" if current else named.group(1)
            if full == ".".join(keys) or (current == table and named.group(1) == leaf):
                return number
    return header
