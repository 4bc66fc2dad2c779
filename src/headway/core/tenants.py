"""Fair shares of the tenants of a class (a tenant: one API key, or a name that the configuration gives to some).

Work is counted in seconds of engine time, prefill of the prompt plus decode of the most tokens it may produce, and
forgotten exponentially. The share of a tenant is weighted max-min fair (water filling; Bertsekas and Gallager 1992,
section 6.5.2): with o_i the work it offered and w_i its weight, min(o_i, w_i L), and the level L is such that the
shares add up to what the class admitted. Counting the work of tokens instead of requests is what VTC does for the order
of service (Sheng et al. 2024); here it decides who may be refused.

A tenant below its share meets the admission test as it is. One that has its share is asked as if a part of everything
were taken and it brought a typical request of the others along (`reserved`): it may fill the engine only up to there,
so that the room which the others need in their bursts is there when they come. That is trunk reservation of loss
networks (Kelly 1991, section 3.1): it protects the small streams whatever the large one offers, needs no estimate of
the capacity, and leaves none idle, because the large stream is accepted again as soon as the engine has emptied to
there.

Nobody is limited while there is one tenant in the class, nor when the class refused nobody for `CALM_S`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.core.cost import CostCoefficients
from headway.core.demand import DemandWindow
from headway.core.request import RequestState
from headway.core.view import EngineView, KvView

#: Time constant of forgetting.
MEMORY_S = 30.0

#: A tenant that offered nothing for this long is no tenant of the class any more.
GONE_S = 60.0

#: Seconds without a refusal after which a class is not contended any more.
CALM_S = 10.0

#: A tenant this close to its share has it.
NEARLY = 0.95

#: The level is worked out again after this time at the latest.
LEVEL_EVERY_S = 0.1

#: Most tenants of a class that are told apart; beyond it the one that was silent the longest is forgotten.
MOST_TENANTS = 256

#: Exponent of the time scale at which the sums are brought back to 1.
_RESCALE = 50.0


@dataclass(slots=True)
class _Tenant:
    """Work in seconds, scaled up by exp((time - origin) / MEMORY_S), so that older work weighs less."""

    offered: float = 0.0
    admitted: float = 0.0
    requests: float = 0.0  # how many were offered,
    prefill: float = 0.0  # and their prefill work
    seen_s: float = -math.inf


class _Class:
    """The tenants of one SLO class."""

    __slots__ = ("contended_s", "level", "level_at_s", "origin_s", "tenants", "typical_s")

    def __init__(self, now_s: float) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.contended_s = -math.inf  # when the class refused somebody last
        self.origin_s = now_s
        self.level = math.inf
        self.level_at_s = -math.inf
        self.typical_s = 0.0  # mean prefill of a request of those below their share


class FairShares:
    """What each tenant offered and was admitted, by class.

    Args:
        weights: tenant -> weight; 1 for those not named.
        reserve: part of slack, KV pool and slots that a tenant with its share must leave to the others.
    """

    __slots__ = ("_classes", "_weights", "demand", "reserve")

    def __init__(self, weights: Mapping[str, float] | None = None, *, reserve: float = 0.15) -> None:
        if not 0 <= reserve < 1:
            raise ValueError(f"reserve = {reserve!r}: expected a share in [0, 1)")
        self.reserve = reserve
        self.demand = DemandWindow()  # what tenants offered while they were below their share
        self._weights = dict(weights or {})
        self._classes: dict[str, _Class] = {}

    def offered(self, request: RequestState, cost: CostCoefficients, now_s: float) -> None:
        """A request came."""
        cls = self._classes.setdefault(request.slo.name, _Class(now_s))
        tenant = cls.tenants.get(request.tenant)
        if tenant is None:
            self._forget(cls, now_s)
            if len(cls.tenants) >= MOST_TENANTS:
                del cls.tenants[min(cls.tenants, key=lambda name: cls.tenants[name].seen_s)]
            tenant = cls.tenants[request.tenant] = _Tenant()
        scale, prefill_s = self._scale(cls, now_s), cost.work_s(request.remaining_tokens, request.computed_tokens)
        tenant.offered += scale * engine_s(request, cost)
        tenant.requests += scale
        tenant.prefill += scale * prefill_s
        tenant.seen_s = now_s
        if not self.has_share(request, now_s):
            slo = request.slo
            self.demand.add(now_s, work_s=prefill_s, weight=slo.weight, ttft_s=slo.ttft_s)

    def admitted(self, request: RequestState, cost: CostCoefficients, now_s: float) -> None:
        """A request of the class was accepted."""
        cls = self._classes.get(request.slo.name)
        if cls is not None and request.tenant in cls.tenants:
            cls.tenants[request.tenant].admitted += engine_s(request, cost) * self._scale(cls, now_s)

    def refused(self, request: RequestState, now_s: float) -> None:
        """The class could not take a request: it is contended."""
        cls = self._classes.get(request.slo.name)
        if cls is not None:
            cls.contended_s = now_s

    def has_share(self, request: RequestState, now_s: float) -> bool:
        """Whether the class is contended and the tenant of the request has its share already."""
        cls = self._classes.get(request.slo.name)
        if cls is None or not self._contended(cls, now_s) or request.tenant not in cls.tenants:
            return False
        if now_s - cls.level_at_s >= LEVEL_EVERY_S:
            self._forget(cls, now_s)
            self._set_level(cls)
            cls.level_at_s = now_s
        # A tenant may be gone although a request of it is deferred still.
        return request.tenant in cls.tenants and self._has(cls, request.tenant)

    def several(self, request: RequestState, now_s: float) -> bool:
        """Whether tenants contend for the class of the request."""
        cls = self._classes.get(request.slo.name)
        return cls is not None and self._contended(cls, now_s)

    @property
    def known(self) -> int:
        """How many tenants are told apart, each class counted apart."""
        return sum(len(cls.tenants) for cls in self._classes.values())

    def reserved(self, view: EngineView, request: RequestState) -> tuple[EngineView, RequestState]:
        """Return the view and the request as if the reserved part of everything were taken, and a typical request of
        the others came along.
        """
        left, slack = 1.0 - self.reserve, request.due_s - view.now_s
        cls = self._classes.get(request.slo.name)
        # A typical one that takes a large part of the deadline itself would leave nothing to serve.
        typical_s = min(cls.typical_s, self.reserve * slack) if cls is not None else 0.0
        beside = min(view.cost.mean.tokens_within(typical_s, 0), view.max_model_len)
        shadow = copy.copy(request)
        shadow.due_s = view.now_s + left * slack
        shadow.prompt_tokens += beside
        shadow.target_tokens += beside
        kv = view.kv
        smaller = dataclasses.replace(
            view,
            kv=KvView(
                block_size=kv.block_size,
                total_blocks=int(left * kv.total_blocks),
                free_blocks=max(0, kv.free_blocks - int(self.reserve * kv.total_blocks)),
            ),
            max_running=max(1, int(left * view.max_running)),
            max_model_len=view.max_model_len + beside,
            cost=view.cost.crowded(1.0 / left),
        )
        return smaller, shadow

    def _contended(self, cls: _Class, now_s: float) -> bool:
        return len(cls.tenants) > 1 and now_s - cls.contended_s < CALM_S

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _has(self, cls: _Class, name: str) -> bool:
        return cls.tenants[name].admitted >= NEARLY * cls.level * self._weight(name)

    def _set_level(self, cls: _Class) -> None:
        cls.level = self._level(cls)
        below = [each for name, each in cls.tenants.items() if not self._has(cls, name)]
        requests = sum(each.requests for each in below)
        cls.typical_s = sum(each.prefill for each in below) / requests if requests else 0.0

    def _level(self, cls: _Class) -> float:
        """Solve sum(min(offered_i, w_i L)) = sum(admitted_i) for L."""
        rows = sorted(
            (each.offered / self._weight(name), each.offered, self._weight(name)) for name, each in cls.tenants.items()
        )
        left = sum(each.admitted for each in cls.tenants.values())
        weights = sum(weight for _, _, weight in rows)
        for full, offered, weight in rows:
            if left <= full * weights:
                return left / weights
            left -= offered
            weights -= weight
        return math.inf

    def _scale(self, cls: _Class, now_s: float) -> float:
        exponent = (now_s - cls.origin_s) / MEMORY_S
        if exponent > _RESCALE:
            down = math.exp(-exponent)
            for tenant in cls.tenants.values():
                tenant.offered *= down
                tenant.admitted *= down
                tenant.requests *= down
                tenant.prefill *= down
            cls.level_at_s = -math.inf
            cls.origin_s, exponent = now_s, 0.0
        return math.exp(exponent)

    def _forget(self, cls: _Class, now_s: float) -> None:
        """Drop tenants that are gone."""
        for name in [k for k, each in cls.tenants.items() if now_s - each.seen_s > GONE_S]:
            del cls.tenants[name]


def engine_s(request: RequestState, cost: CostCoefficients) -> float:
    """Return the seconds of engine time of a request: its prefill, and a decode for each token that it may produce."""
    return cost.work_s(request.remaining_tokens, request.computed_tokens) + cost.b * request.max_output_tokens
