"""`headway.toml`: SLO classes, policy and admission test. Read by the scheduler and by the HTTP middleware alike."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway import registry
from headway.core.slo import MAX_TARGET_S, Slo
from headway.errors import InputError

#: Class of the start-up sweep: always known, without targets.
CALIBRATION_CLASS = "calibration"

#: Front that deadlines leave room for until it has been measured.
FRONT_MS = 15.0

#: A class is named in a header and in a metric label, so: printable ASCII, no space at the ends.
_CLASS_NAME = re.compile(r"[!-~]([ -~]{0,62}[!-~])?")

#: Tenants without a name in the file are called by this and a digest of their API key.
KEY_PREFIX = "~"

_Milliseconds = Annotated[float, Field(gt=0, le=MAX_TARGET_S * 1e3, allow_inf_nan=False)]


class _Strict(BaseModel):
    # strict: a number in quotes or `true` for a number is a mistake, not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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


class Tenant(_Strict):
    """One `[tenant.NAME]` table: API keys that share one allowance."""

    #: SHA-256 of each API key in lower-case hexadecimal; the file holds no key.
    keys_sha256: Annotated[list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]], Field(min_length=1)]
    #: Share of a contended class relative to another tenant; 1 for keys that are not named.
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


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
    #: Time from the engine to the client (detokenise, HTTP) that deadlines leave room for; default: measured.
    front_ms: Annotated[float, Field(ge=0, le=60_000)] | None = None
    #: Age at which a request without TTFT target is ordered as if its deadline had come, so that it cannot starve.
    patience_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    #: Whether API keys get fair shares of a class that cannot serve all of them.
    fair_share: bool = True
    #: Part of slack, KV pool and slots that a key with its share must leave to the others.
    tenant_reserve: Annotated[float, Field(ge=0, lt=1)] = 0.15
    #: Whether room is kept for requests that were refused and told when to come back.
    bookings: bool = True
    class_: dict[str, SloClass] = Field(default_factory=dict, alias="class")
    tenant: dict[str, Tenant] = Field(default_factory=dict)

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
        where = f"{path}:{found.group(1) if found else max(1, len(text.splitlines()))}"
        raise InputError(f"{where}: not valid TOML: {error}") from error
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        keys = [str(part) for part in first["loc"]]
        raise InputError.at(path, _line(text, keys), ".".join(keys), first["input"], _expected(first)) from error
    _check_classes(config, path, text)
    _check_tenants(config, path, text)
    _check_names(config, path, text)
    return config


def _expected(error: Any) -> str:
    """Return what a failed check wanted, in the words of the file."""
    kind = error["type"]
    if kind == "extra_forbidden":
        model = {"class": SloClass, "tenant": Tenant}.get(error["loc"][0], Config)
        return f"one of {', '.join(sorted(field.alias or name for name, field in model.model_fields.items()))}"
    if kind in ("model_type", "dict_type"):
        return "a table"
    return registry.words(str(error["msg"]))


def _check_classes(config: Config, path: Path, text: str) -> None:
    for name in config.class_:
        keys = ["class", name]
        if name == CALIBRATION_CLASS:
            raise InputError.at(
                path, _line(text, keys), "class", name, "another name: this one is the start-up sweep's"
            )
        if not _CLASS_NAME.fullmatch(name):
            raise InputError.at(path, _line(text, keys), "class", name, "1 to 64 printable ASCII characters as a name")
    for name, each in config.class_.items():
        if each.ttft_ms is not None and config.front_ms is not None and each.ttft_ms <= config.front_ms:
            line = _line(text, ["class", name, "ttft_ms"])
            expected = f"more than front_ms = {config.front_ms:g}, which goes by outside the engine"
            raise InputError.at(path, line, f"class.{name}.ttft_ms", each.ttft_ms, expected)
    if config.default_class in config.class_:
        return
    if config.class_ or "default_class" in config.model_fields_set:
        line = _line(text, ["default_class"])
        names = ", ".join(config.class_) or "there are none"
        expected = f"one of the classes of the file: {names} (or a [class.default] table)"
        raise InputError.at(path, line, "default_class", config.default_class, expected)


def _check_tenants(config: Config, path: Path, text: str) -> None:
    owners: dict[str, str] = {}
    for name, tenant in config.tenant.items():
        if not _CLASS_NAME.fullmatch(name) or name.startswith(KEY_PREFIX):
            expected = f"1 to 64 printable ASCII characters as a name, the first no {KEY_PREFIX}"
            raise InputError.at(path, _line(text, ["tenant", name]), "tenant", name, expected)
        for digest in tenant.keys_sha256:
            if digest in owners:
                line = _line(text, ["tenant", name, "keys_sha256"])
                expected = f"a key of one tenant: it is {owners[digest]}'s already"
                raise InputError.at(path, line, f"tenant.{name}.keys_sha256", digest, expected)
            owners[digest] = name


def _check_names(config: Config, path: Path, text: str) -> None:
    """Create policy and admission test once, so that a bad name or parameter is found before a server starts."""
    from headway import admission, policies

    choices: tuple[tuple[str, str, dict[str, Any], Any], ...] = (
        ("policy", config.policy, config.policy_parameters, policies),
        ("admission", config.admission, config.admission_parameters, admission),
    )
    for key, name, parameters, package in choices:
        if name not in package.REGISTRY:
            raise InputError.at(path, _line(text, [key]), key, name, f"one of {', '.join(package.REGISTRY)}")
        for parameter, value in parameters.items():
            keys = [f"{key}_parameters", parameter]
            if (wanted := registry.expected(package.REGISTRY[name], name, parameter, value)) is not None:
                raise InputError.at(path, _line(text, keys), ".".join(keys), value, wanted)
        try:
            package.REGISTRY[name](**parameters)
        except ValueError as error:
            # The message of a range check starts with "parameter = ".
            line = _line(text, [f"{key}_parameters", str(error).partition(" ")[0]])
            where = f"{path}:{line}" if line else f"{path}"
            raise InputError(f"{where}: {key}_parameters.{error}") from error


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


#: One key of a dotted TOML key: quoted either way, or bare.
_KEY = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([\w-]+))\s*(\.)?""")


def _keys(text: str) -> tuple[list[str], str]:
    """Split a dotted TOML key off the start of `text`; return its parts and what follows."""
    parts: list[str] = []
    while match := _KEY.match(text):
        parts.append(next(group for group in match.groups()[:3] if group is not None))
        text = text[match.end() :]
        if not match.group(4):
            break
    return parts, text


def _line(text: str, keys: list[str]) -> int | None:
    """Return the 1-based line that sets a key or, when an inline table does, its longest parent; None if none does."""
    best, found = 0, None
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line.startswith("["):
            table, _ = _keys(line.lstrip("["))
            here = table
        else:
            own, rest = _keys(line)
            if not own or not rest.startswith("="):
                continue
            here = [*table, *own]
        if len(here) > best and here == keys[: len(here)]:
            best, found = len(here), number
    return found
