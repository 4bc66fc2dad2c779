"""What is offered: a generated or a real trace, cut to a rate and a window, with its SLO classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.errors import InputError
from headway.replay.targets import DEFAULT_CLASS, Targets
from headway.trace import Trace, read, select
from headway.trace.synthetic import demo_trace

#: Targets of the generated traffic.
MIXED = {"chat": Targets(ttft_s=1.0, tpot_s=0.15), "document": Targets(ttft_s=6.0, tpot_s=0.15)}
SINGLE = {"default": Targets(ttft_s=3.0, tpot_s=0.15)}

#: A document is worth this many chats when demand exceeds capacity. It costs about 12 of them (docs/log.md).
WEIGHTS = {"chat": 1.0, "document": 16.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A source of requests at any rate.

    `kind` is a generated one (`mixed`: chat and documents, `single`: one heavy-tailed class); with `source` the
    requests of that trace are taken instead, in their order, `offset` of them skipped for each seed.
    """

    kind: str = "mixed"
    source: Trace | None = None
    targets: Mapping[str, Targets] = field(default_factory=lambda: MIXED)
    weights: Mapping[str, float] = field(default_factory=lambda: WEIGHTS)

    def offered(self, *, rate: float, seed: int, duration_s: float | None = None, n: int | None = None) -> Trace:
        """Return requests offered at `rate` per second, for a duration or a number of them."""
        if self.source is None:
            return demo_trace(rate=rate, seed=seed, duration_s=duration_s, n=n, kind=self.kind)
        wanted = n if n is not None else max(2, round(rate * (duration_s or 0.0)))
        total = len(self.source)
        if wanted > total:
            raise InputError(f"{self.source.source}: {total} requests: expected at least {wanted} for this rate")
        first = (seed * wanted) % (total - wanted + 1)
        start = float(self.source.frame["arrival_s"][first])
        return select(self.source, start_s=start, limit=wanted, rate=rate)

    @property
    def slack_s(self) -> float:
        """Time after the last arrival within which a request may still attain its targets."""
        ttft = max((t.ttft_s or 0.0 for t in self.targets.values()), default=0.0)
        tpot = max((t.tpot_s or t.tbt_s or 0.0 for t in self.targets.values()), default=0.0)
        return ttft + 100 * tpot


def from_file(
    path: Path,
    targets: Mapping[str, Targets],
    *,
    max_input: int,
    max_output: int,
    input_scale: float,
    output_scale: float,
) -> Workload:
    """Return the workload of a real trace with its lengths scaled and cut to what the model can hold."""
    names = list(targets)
    trace = select(
        read(path),
        max_input=max_input,
        max_output=max_output,
        input_scale=input_scale,
        output_scale=output_scale,
        classes=[(names[0], None)] if len(names) == 1 else None,
    )
    found = {name or DEFAULT_CLASS for name in trace.frame["slo_class"].unique().to_list()}
    if unknown := sorted(found - set(targets)):
        raise InputError(
            f"{path}: requests of class {', '.join(unknown)}: expected targets for every class (--slo), or one --slo "
            f"for all; targets are given for {', '.join(names)}"
        )
    return Workload(kind="trace", source=trace, targets=targets, weights={})
