"""The systems that are compared: what is started, with which flags and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.replay.targets import Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One server to measure."""

    name: str  # short, for folders and columns
    title: str  # what it is, in a table
    stock: bool
    extra: tuple[str, ...] = ()  # vLLM options
    config: str | None = None  # text of headway.toml

    @property
    def flags(self) -> str:
        """The vLLM options as one would type them."""
        return " ".join(self.extra)


def stock() -> System:
    """vLLM with its defaults (chunked prefill on)."""
    return System(name="stock", title="vLLM stock", stock=True)


def tuned(token_budget: int, queued_tokens: int) -> System:
    """vLLM with the two flags that an expert sets for latency targets."""
    return System(
        name=f"tuned-{token_budget}-{queued_tokens}",
        title="vLLM tuned",
        stock=True,
        extra=(
            "--max-num-batched-tokens",
            str(token_budget),
            "--max-num-queued-tokens",
            str(queued_tokens),
            "--max-num-seqs",
            str(min(256, token_budget)),
        ),
    )


def headway(targets: Mapping[str, Targets], weights: Mapping[str, float] | None = None, **settings: object) -> System:
    """Headway with its defaults and these classes; `settings` are further top-level keys of headway.toml."""
    weights = weights or {}
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
    lines.append(f"default_class = {_toml(next(iter(targets)))}")
    for name, target in targets.items():
        lines.append(f"\n[class.{name}]")
        for key, seconds in target.as_dict().items():
            if seconds is not None:
                lines.append(f"{key.removesuffix('_s')}_ms = {seconds * 1e3:g}")
        if name in weights:
            lines.append(f"weight = {weights[name]:g}")
    return System(name="headway", title="Headway", stock=False, config="\n".join(lines) + "\n")


def no_op(targets: Mapping[str, Targets]) -> System:
    """Headway plugged in with policy fcfs and admission admit_all: must behave as stock vLLM."""
    same = headway(targets, policy="fcfs", admission="admit_all")
    return System(name="no-op", title="Headway no-op", stock=False, config=same.config)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)


def write_config(system: System, folder: Path) -> Path | None:
    """Write the system's headway.toml into `folder`; None when it has none."""
    if system.config is None:
        return None
    path = folder / f"{system.name}.toml"
    path.write_text(system.config, encoding="utf-8")
    return path
