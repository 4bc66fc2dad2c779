"""Response-time analysis: accept what can be promised, refuse at once what cannot. The default test.

A request is accepted iff, with everything accepted before it,

    TBT   the coming steps, sized for the tightest pace s, still carry at least `min_chunk` prompt tokens when every
          accepted request decodes at once and holds all the context it may ever hold,
    KV    blocks(prompt + max output) of everything accepted fit the pool, and the engine has a slot for it,
    TTFT  in deadline order, its first token and that of EVERY promised request behind it come in time.

Finishing times come from the walk of core/walk.py (`method="walk"`) or from the closed form with one constant
capacity (`method="closed"`), which never accepts more. docs/design.md, section 5.

Foresight: below saturation whoever fits is served. Above it, a long prompt that fits now is paid for by several
short ones refused a moment later. So the same bound is computed once more with the share of time that recently
arriving DENSER work (weight per second of prefill) takes: the response time of a lower-priority job among
higher-priority ones (Joseph and Pandya 1986, in its fluid form H / (1 - rho)). At overload this admits in
order of density, the greedy solution of the knapsack; `foresight=0` turns it off and `weight` of a class shifts it.
A request that fails only this second bound may wait for its answer up to `hesitate` of its TTFT, in case the load lets up.
"""

from __future__ import annotations

import bisect
import math
from typing import Literal

import numpy as np

from headway.core import Accept, Defer, EngineView, Reason, Reject, RequestState, Verdict
from headway.core.walk import MAX_STEPS, Walk, capacity, closed_form, decode_counts, work_s


class ResponseTime:
    """Accept iff every promise, old and new, still holds.

    Args:
        method: "walk" (steps forward, with departures) or "closed" (constant capacity).
        strict: count every step at its envelope instead of letting independent errors average out.
        foresight: share of the recent denser demand that is reserved, 0 (none) to 1 (all).
        hesitate: longest wait for an answer that only foresight denies, as a share of the TTFT target.
        min_chunk: prompt tokens that every step must still be able to carry.
    """

    name = "response_time"

    def __init__(
        self,
        *,
        method: Literal["walk", "closed"] = "walk",
        strict: bool = False,
        foresight: float = 1.0,
        hesitate: float = 0.5,
        min_chunk: int = 16,
    ) -> None:
        if method not in ("walk", "closed"):
            raise ValueError(f"method = {method!r}: expected walk or closed")
        for key, value in (("foresight", foresight), ("hesitate", hesitate)):
            if not 0 <= value <= 1:
                raise ValueError(f"{key} = {value!r}: expected a share in [0, 1]")
        self.method = method
        self.strict = strict
        self.foresight = foresight
        self.hesitate = hesitate
        self.min_chunk = min_chunk

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the verdict for `request`; a request without TTFT target is accepted without a promise."""
        ledger, kv = view.ledger, view.kv
        tokens = request.reserved_tokens
        if request.prompt_tokens >= view.max_model_len or kv.blocks(tokens) > kv.total_blocks:
            return Reject(reason=Reason.NEVER_FITS)
        if not request.has_target or not view.cost.ready:
            return Accept()
        start = view.now_s + view.residual_s
        alone = self._alone_s(view, request)
        if request.arrival_s + alone > request.due_s:
            return Reject(reason=Reason.NEVER_FITS, bound_s=start + alone)
        served = len(ledger.pending) + len(ledger.decoding)
        # Each request may waste most of one block, so count one more for each.
        if kv.blocks(ledger.reserved_tokens + tokens) + served + 1 > kv.total_blocks or served >= view.max_running:
            return Reject(reason=Reason.KV, retry_after_s=self._departure_s(view))

        cost, factor = view.cost.mean, view.cost.factor
        reserved = ledger.reserved_tokens + tokens
        step_s = self._step_s(view, request)
        worst = factor * cost.seconds(self.min_chunk, served + 1, reserved, 0)
        if worst > step_s:
            return Reject(reason=Reason.TBT, bound_s=start + worst, retry_after_s=self._departure_s(view))

        keys, remaining, context = ledger.columns()
        at = bisect.bisect_right(keys, (request.due_s, request.seq))
        own = cost.work_s(request.remaining_tokens, request.computed_tokens)
        ahead = np.cumsum(work_s(cost, remaining, context))
        before = float(ahead[at - 1]) if at else 0.0
        backlog = np.concatenate((ahead[:at], [before + own], ahead[at:] + own))
        dues = np.array([key[0] for key in keys[at:]])
        promised = np.array([r.promised for r in ledger.pending[at:]], dtype=bool)

        finish = self._finish(view, step_s, factor, served, reserved, backlog, request.due_s, dues)
        bound = start + float(finish[at])
        late = bound - request.due_s
        if len(dues) and late <= 0:
            # Behind it in deadline order: only promises that hold without it can be broken by it.
            held = start + self._finish(view, step_s, factor, served, reserved, ahead, request.due_s, dues)[at:]
            broken = promised & (held <= dues) & (start + finish[at + 1 :] > dues)
            if broken.any():
                late = float(np.max(np.where(broken, start + finish[at + 1 :] - dues, 0.0)))
        if late > 0:
            return Reject(reason=Reason.TTFT, bound_s=bound, retry_after_s=late if math.isfinite(late) else None)
        denied = self._foresee(view, request, own, before + own, step_s, served, reserved, backlog)
        if denied is not None:
            until = min(request.arrival_s + self.hesitate * (request.due_s - request.arrival_s), request.due_s - alone)
            if view.now_s < until:
                return Defer(until_s=until, otherwise=denied)
            return denied
        return Accept(bound_s=bound)

    def _step_s(self, view: EngineView, request: RequestState) -> float:
        """Length that every step may have: the tightest pace of anything accepted, the candidate included."""
        pace = min(view.ledger.pace_s, request.slo.pace_s)
        # Without any decode target steps are only bounded by the blocking allowance.
        return min(pace, max(view.blocking_s, view.pace_hint_s or 0.0))

    @staticmethod
    def _alone_s(view: EngineView, request: RequestState) -> float:
        """Least time to the first token on an idle engine: the fewest steps, nothing else in them."""
        cost = view.cost.mean
        steps = math.ceil(request.remaining_tokens / view.max_step_tokens)
        return steps * cost.g + cost.work_s(request.remaining_tokens, request.computed_tokens)

    @staticmethod
    def _departure_s(view: EngineView) -> float | None:
        """Time until the next decode ends by its max output at the pace it is promised, None when unknown."""
        ends = [r.remaining_output * r.slo.pace_s for r in view.ledger.decoding.values() if math.isfinite(r.slo.pace_s)]
        return min(ends, default=None)

    def _finish(
        self,
        view: EngineView,
        step_s: float,
        factor: float,
        served: int,
        reserved: int,
        backlog: np.ndarray,
        due_s: float,
        dues: np.ndarray,
    ) -> np.ndarray:
        """Time from the start of the next step until each entry of the cumulative backlog is computed."""
        if self.method == "closed":
            ledger = view.ledger
            times = [
                closed_form(
                    view.cost.mean,
                    step_s=step_s,
                    factor=factor,
                    decodes=len(ledger.decoding),
                    pending=len(ledger.pending) + 1,
                    reserved_tokens=reserved,
                    backlog_s=float(h),
                )
                for h in backlog
            ]
            return np.array(times)
        horizon = max(due_s, float(dues.max()) if len(dues) else due_s) - view.now_s
        return self._walk(view, step_s, factor, reserved, backlog, horizon, 0.0).finish_s(backlog)

    def _walk(
        self,
        view: EngineView,
        step_s: float,
        factor: float,
        reserved: int,
        backlog: np.ndarray,
        horizon_s: float,
        taken_share: float,
    ) -> Walk:
        steps = max(1, min(MAX_STEPS, math.ceil(horizon_s / step_s * factor) + 1))
        return capacity(
            view.cost.mean,
            step_s=step_s,
            factor=factor,
            decodes=decode_counts(list(view.ledger.decoding.values()), steps),
            reserved_tokens=reserved,
            backlog=backlog,
            taken_share=taken_share,
            strict=self.strict,
        )

    def _foresee(
        self,
        view: EngineView,
        request: RequestState,
        own: float,
        backlog_s: float,
        step_s: float,
        served: int,
        reserved: int,
        backlog: np.ndarray,
    ) -> Reject | None:
        """Refuse what would only be served at the cost of denser requests that keep arriving."""
        if not self.foresight:
            return None
        share = self.foresight * view.demand.denser(view.now_s, request.slo.weight / max(own, 1e-6))
        if share <= 0:
            return None
        factor = view.cost.factor
        start = view.now_s + view.residual_s
        horizon = request.due_s - view.now_s
        walk = self._walk(view, step_s, factor, reserved, backlog, horizon, share / factor)
        finish = float(walk.finish_s(np.array([backlog_s]))[0])
        if start + finish <= request.due_s:
            return None
        late = start + finish - request.due_s
        return Reject(
            reason=Reason.TTFT,
            bound_s=start + finish if math.isfinite(finish) else None,
            retry_after_s=late if math.isfinite(late) else None,
        )
