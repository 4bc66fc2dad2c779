"""A named SLO tier: latency targets and what happens when they cannot be met."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

OnMiss = Literal["reject", "defer", "best_effort"]

#: What a class may do with a request whose targets cannot be met.
ON_MISS: tuple[str, ...] = get_args(OnMiss)

#: Longest target that makes sense, in seconds; a larger number is a unit mistake.
MAX_TARGET_S = 86_400.0


def blocking_s(ttfts: Iterable[float]) -> float:
    """Return the longest step while a request may arrive: a quarter of the tightest TTFT target, or 1 s."""
    return 0.25 * min(ttfts, default=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets of one class, in seconds; None means no target.

    `tpot_s` bounds the mean pace of the stream after its first token, so time gained early may be spent later
    (banked slack). `tbt_s` bounds every single gap (hard pace).

    Raises:
        ValueError: a target is not a positive finite number of at most one day, or the weight is not positive.
    """

    name: str = "default"
    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None
    on_miss: OnMiss = "reject"
    weight: float = 1.0  # value of one attained request of this class relative to another class

    def __post_init__(self) -> None:
        for key in ("ttft_s", "tpot_s", "tbt_s"):
            value = getattr(self, key)
            if value is not None and not 0 < value <= MAX_TARGET_S:
                raise ValueError(f"{key} = {value!r}: expected seconds in (0, {MAX_TARGET_S:.0f}]")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight = {self.weight!r}: expected a positive number")
        if self.on_miss not in ON_MISS:
            raise ValueError(f"on_miss = {self.on_miss!r}: expected one of {', '.join(ON_MISS)}")

    @property
    def pace_s(self) -> float:
        """Tightest time a decode of this class may take for a token; inf without a decode target."""
        return min(self.tpot_s or math.inf, self.tbt_s or math.inf)
