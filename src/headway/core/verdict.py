"""What an admission test answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headway.core.request import RequestState
    from headway.core.view import EngineView


class Reason(enum.StrEnum):
    """Why a request is refused; the value is the `code` of the error body."""

    TTFT = "ttft_unattainable"
    TBT = "tbt_unattainable"
    KV = "kv_exhausted"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    TENANT_SHARE = "tenant_share"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The request is served; `bound_s` is the promised time of its first token (engine clock), None = no promise."""

    bound_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The request is refused now.

    `bound_s` is the first-token time that could have been promised (engine clock), for a TBT the longest gap (seconds);
    `retry_after_s` the wait after which the same request would be expected to pass; each None when unknown. `detail`
    says in words what a bound that lies within the target does not.
    """

    reason: Reason
    detail: str | None = None
    bound_s: float | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Defer:
    """No answer yet: ask again at every step, and refuse at `until_s` (engine clock) with `otherwise`."""

    until_s: float
    otherwise: Reject


Verdict = Accept | Reject | Defer


class Admission(Protocol):
    """Decides whether a request is served. Pure: same view and request, same verdict."""

    name: str

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the verdict for `request`, which is not part of the view's queues yet."""
        ...
