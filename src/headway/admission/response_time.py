"""Response-time analysis: accept what can be promised, refuse at once what cannot. The default test.

A request is accepted iff, with everything accepted before it,

    TBT   the coming steps, sized for the tightest pace s, still carry at least `min_chunk` prompt tokens when every
          accepted request decodes at once and holds all the context it may ever hold,
    KV    blocks(prompt + max output) of everything accepted fit the pool, and the engine has a slot for it,
    TTFT  in deadline order, its first token and that of EVERY promised request behind it come in time.

Finishing times come from the walk of core/walk.py (`method="walk"`) or from the closed form with one constant
capacity (`method="closed"`), which never accepts more. docs/design.md, section 5.

Foresight. A request accepted now must still be in time after those that will be served before it have come. Below
saturation these are later arrivals with earlier deadlines: the work of shorter targets, as recently seen, that
arrives before its deadline is added to its backlog. When the recent demand exceeds what the steps can carry, somebody
has to go: a long prompt that fits now is paid for by several short ones refused a moment later. Then the finishing
time is the response time of a job among more important ones, H / (C - D) (Joseph and Pandya 1986, in fluid form): C
is the share of time that steps have for prefill, D the share that DENSER work (class weight per second of prefill)
takes. That admits by density, the greedy solution of the knapsack; `weight` of a class shifts it, `foresight=0` turns
it off. A request that only foresight denies may wait for its answer up to `hesitate` of its TTFT target, in case the
load lets up.
"""

from __future__ import annotations

import math
from typing import Literal

from headway.admission._finish import Constant, Course, Expected, Load, Queue, Worst
from headway.admission._retry import departure_wait_s, first_token_wait_s
from headway.core import Accept, Defer, EngineView, Ledger, Reason, Reject, RequestState, Verdict
from headway.core.loops import Flags, Floats, cumulate, last_late
from headway.core.walk import work_s

#: By this part of the way a finishing time may turn out later: measured on bursts that nothing follows.
RETRY_DOUBT = 0.07


#: So many times a pace a token must take alone before it is called impossible: a cost that was learned in a bad moment
#: may be far off, and is only unlearned by serving.
IMPOSSIBLE = 4

_PACE = "a token takes {:.1f} ms even alone, and the pace is {:g} ms"


class ResponseTime:
    """Accept iff every promise, old and new, still holds.

    Args:
        method: "walk" (steps forward, with departures) or "closed" (constant capacity).
        strict: promise only what holds for every run in which steps stay under their envelopes (`guaranteed`), instead
            of the expected course (`capacity`).
        stretches: a strict promise counts on what steps in a row were measured to take (core/stretch.py), instead of
            the envelope of each.
        foresight: share of the recent denser demand that is reserved, 0 (none) to 1 (all).
        concede: share of what the steps can carry until its deadline that a request may take, with all that is
            before it, even when denser demand fills them: as much is left for those, and capacity is not left idle.
        hesitate: longest wait for an answer that only foresight denies, as a share of the TTFT target.
        min_chunk: prompt tokens that every step must still be able to carry.
    """

    name = "response_time"

    def __init__(
        self,
        *,
        method: Literal["walk", "closed"] = "walk",
        strict: bool = False,
        stretches: bool = True,
        foresight: float = 1.0,
        concede: float = 0.35,
        hesitate: float = 0.5,
        min_chunk: int = 16,
    ) -> None:
        if method not in ("walk", "closed"):
            raise ValueError(f"method = {method!r}: expected walk or closed")
        for key, value in (("foresight", foresight), ("concede", concede), ("hesitate", hesitate)):
            if not 0 <= value <= 1:
                raise ValueError(f"{key} = {value!r}: expected a share in [0, 1]")
        if min_chunk < 1:
            raise ValueError(f"min_chunk = {min_chunk!r}: expected at least 1")
        self.method = method
        self.strict = strict
        self.stretches = stretches
        self.foresight = foresight
        self.concede = concede
        self.hesitate = hesitate
        self.min_chunk = min_chunk

    def decide(self, view: EngineView, request: RequestState) -> Verdict:
        """Return the verdict for `request`; a request without TTFT target is accepted without a promise."""
        ledger, kv = view.ledger, view.kv
        tokens = request.reserved_tokens
        if request.prompt_tokens >= view.max_model_len or kv.blocks(tokens) > kv.total_blocks:
            return Reject(reason=Reason.NEVER_FITS)
        own_pace = request.slo.pace_s
        paced = own_pace < math.inf
        if not view.cost.ready or not (request.has_target or (paced and self.strict)):
            return Accept()
        start = view.now_s + view.residual_s
        alone = view.alone_s(request)
        if request.has_target and request.arrival_s + alone > request.due_s:
            return Reject(reason=Reason.NEVER_FITS, bound_s=start + alone)
        if paced and request.max_output_tokens > 1 and not view.cost.drifting:
            gap = view.cost.mean.seconds(0, 1, request.prompt_tokens, 0)
            if gap > own_pace * (1 if self.strict else IMPOSSIBLE):
                return Reject(reason=Reason.NEVER_FITS, detail=_PACE.format(1e3 * gap, 1e3 * own_pace))
        at = ledger.place(request)
        # Behind all promises: they start after this request, and lose their blocks before it.
        idle, idle_tokens = ledger.idle_behind(at)
        served = len(ledger.pending) + len(ledger.decoding) - idle
        reserved = ledger.reserved_tokens + tokens - idle_tokens
        if not served and (not self.strict or view.cost.drifting):
            # Nothing can be lost, and a cost that was learned in a bad moment is only unlearned by serving.
            bound = start + alone
            return Accept(bound_s=bound if bound <= request.due_s and not self.strict else None)
        # Each request may waste most of one block, so count one more for each.
        if kv.blocks(reserved) + served + 1 > kv.total_blocks or served >= view.max_running:
            return self._without_memory(view, served, reserved)
        cost, factor = view.cost.mean, self._factor(view)
        # Tightest pace of anything accepted, the candidate included; the blocking allowance when there is none.
        pace = min(ledger.pace_s, own_pace)
        if pace == math.inf:
            pace = view.blocking_s
        # Decodes without a pace skip steps that they would make too long (policy `headway`), so only the others count.
        decodes = sum(ledger.paces.values()) - ledger.paces.get(math.inf, 0) + paced
        context_tokens = ledger.reserved_tokens - ledger.loose_tokens + paced * tokens
        worst = factor * cost.seconds(self.min_chunk, decodes, context_tokens, self.min_chunk**2 / 2)
        if worst > pace:
            if not served:
                return Reject(reason=Reason.NEVER_FITS, detail=_PACE.format(1e3 * worst, 1e3 * pace))
            wait = self._pace_wait_s(view, factor, decodes, context_tokens, pace)
            return Reject(reason=Reason.TBT, bound_s=worst, retry_after_s=wait)
        if not request.has_target:
            return Accept()

        dues, remaining, context, promised = self._columns(ledger)
        own = cost.work_s(request.remaining_tokens, request.computed_tokens)
        work = work_s(cost, remaining, context)
        if self.strict and (request.computed_tokens or ledger.hoped):
            # Hits may be evicted before the request starts; then the step in which it starts may be a short one.
            short = cost.seconds(0, served + 1, reserved, 0)
            if request.computed_tokens:
                own = cost.work_s(request.prompt_tokens, 0) + short
            work[[ledger.place(hoped) - 1 for hoped in ledger.hoped.values()]] += short
        ahead, with_it = cumulate(work, at, own)
        load = Load(pace, served + 1, reserved, factor)
        if self.strict and self.stretches:
            load = load._replace(lines=self._lines(view, load, request.due_s, dues[at:], promised[at:]))
        queue = Queue(dues, promised, at, ledger.outputs_left(), remaining, context)
        course = self._course(view, request, load, queue, with_it)
        end = course.kept_s()
        if end is not None and start + end <= request.due_s:
            bound = start + end
        else:
            found = self._unless_late(view, request, load, queue, course, work, ahead, with_it)
            if isinstance(found, Reject):
                return found
            bound = found
        crowded = self._crowded_s(view, request, own, float(with_it[at]), load)
        if crowded > 0:
            detail = "demand exceeds capacity and requests of less work for the same value take what there is"
            after = crowded if math.isfinite(crowded) else None
            denied = Reject(reason=Reason.TTFT, detail=detail, bound_s=bound, retry_after_s=after)
            until = min(request.arrival_s + self.hesitate * (request.due_s - request.arrival_s), request.due_s - alone)
            return Defer(until_s=until, otherwise=denied) if view.now_s < until else denied
        return Accept(bound_s=bound)

    @staticmethod
    def _without_memory(view: EngineView, served: int, reserved: int) -> Reject:
        """Refuse for want of blocks or of a slot; `reserved` tokens are those with the request."""
        if not served:
            return Reject(reason=Reason.NEVER_FITS)
        kv, ledger = view.kv, view.ledger
        room, slots = kv.total_blocks - served - 1, view.max_running - served
        wait = departure_wait_s(ledger, lambda n, freed: kv.blocks(reserved - freed) <= room + n and n + slots > 0)
        return Reject(reason=Reason.KV, retry_after_s=wait)

    def _pace_wait_s(
        self, view: EngineView, factor: float, decodes: int, context_tokens: int, pace: float
    ) -> float | None:
        """Time until enough decodes have ended for a step with `min_chunk` prompt tokens to keep the pace."""
        cost, pairs = view.cost.mean, self.min_chunk**2 / 2

        def passes(ended: int, freed: int) -> bool:
            return factor * cost.seconds(self.min_chunk, decodes - ended, context_tokens - freed, pairs) <= pace

        return departure_wait_s(view.ledger, passes)

    def _unless_late(
        self,
        view: EngineView,
        request: RequestState,
        load: Load,
        queue: Queue,
        course: Course,
        work: Floats,
        ahead: Floats,
        with_it: Floats,
    ) -> float | Reject:
        """Return when the first token comes, or a refusal if that, or one promised behind it, would be late.

        Args:
            view: the moment.
            request: the candidate.
            load: what steps count with.
            queue: what is accepted.
            course: with the candidate.
            work: of each that is accepted, seconds.
            ahead: the same, cumulative.
            with_it: the same with the candidate.
        """
        at, dues = queue.at, queue.dues[queue.at :]
        start = view.now_s + view.residual_s
        finish = start + course.finish_s()
        bound = float(finish[0])
        late = bound - request.due_s
        promised = queue.promised[at:]
        # It would have to be due behind these when it comes again.
        behind = last_late(finish[1:], dues, promised)
        if late <= 0 and behind:
            if self.method == "walk" and not self.strict:
                # Only a promise that holds without the candidate can be broken by it.
                held = start + self._course(view, request, load, queue, ahead).finish_s() <= dues
            else:
                # The bound of a promise that holds may have grown since (more context, a tighter pace), so only
                # what is lost for certain is given up.
                held = dues - start >= work[at:]
            behind = last_late(finish[1:], dues, promised & held)
        if late <= 0 and not behind:
            return bound
        if not (math.isfinite(bound) and math.isfinite(finish[behind])) and not self.strict:
            # Not within its target: look as far as walks go, for the bound and the time to retry.
            finish = start + self._course(view, request, load, queue, with_it, math.inf).finish_s()
            bound = float(finish[0])
        # A step more, because it may arrive just after one has begun, and what expected courses are off by.
        later = (1.0 + RETRY_DOUBT) * finish + (min(load.pace_s, view.blocking_s) - RETRY_DOUBT * view.now_s)
        wait = first_token_wait_s(later, dues, request.due_s, behind)
        if load.served == 1 and bound - start > request.due_s - request.arrival_s:
            wait = None  # an idle engine gets no emptier by waiting
        return Reject(
            reason=Reason.TTFT,
            detail="it would break a promise already made to another request" if late <= 0 else None,
            bound_s=bound if math.isfinite(bound) else None,
            retry_after_s=wait,
        )

    def _course(
        self,
        view: EngineView,
        request: RequestState,
        load: Load,
        queue: Queue,
        backlog: Floats,
        horizon_s: float | None = None,
    ) -> Course:
        """The coming steps with a backlog. The expected one is looked at until the last deadline, unless told."""
        if self.strict:
            closed = self.method == "closed"
            return Worst(view, request, load, queue, backlog, min_chunk=self.min_chunk, closed=closed)
        if self.method == "closed":
            return Constant(view, request, load, queue, backlog, min_chunk=self.min_chunk, closed=True)
        if horizon_s is None:
            last = float(queue.dues[-1]) if queue.at < len(queue.dues) else request.due_s
            horizon_s = max(request.due_s, last) - view.now_s
        return Expected(view, load, queue, backlog, horizon_s=horizon_s, min_chunk=self.min_chunk)

    def _factor(self, view: EngineView) -> float:
        """Envelope / mean; a strict promise counts that of decode-only steps too, where it is larger."""
        factor = view.cost.factor
        if self.strict and (alone := view.cost.mean.seconds(0, 1, 0, 0)) > 0:
            factor = max(factor, view.cost.envelope(0, 1, 0, 0) / alone)
        return factor

    def _lines(
        self, view: EngineView, load: Load, due_s: float, dues: Floats, promised: Flags
    ) -> tuple[tuple[float, float], ...]:
        """The envelopes of steps in a row that a strict promise counts on, by the sum of the envelopes of each.

        Of all the one that is least at the candidate's deadline and that at the last promised one behind it: any of
        them gives a bound.
        """
        known = view.cost.lines
        if not known:
            return ()
        later_s = 0.0
        if view.ahead:
            # Plans take the step in flight at its own envelope, so by their clock the next begins so much later.
            longest = load.factor * view.cost.mean.seconds(0, load.served, load.reserved_tokens, 0)
            longest += load.factor * view.cost.mean.work_s(self.min_chunk, view.max_model_len)
            later_s = max(longest, view.blocking_s * load.factor / view.cost.factor)
        last = len(dues) - 1
        while last >= 0 and not promised[last]:
            last -= 1
        best: list[tuple[float, float]] = []
        for t in (due_s - view.now_s, float(dues[last]) - view.now_s if last >= 0 else 0.0):
            least, found = t, None
            for rate, burst_s in known:
                slope = rate / load.factor
                burst = burst_s + (1 - slope) * later_s
                if slope < 1 and slope * t + burst < least:
                    least, found = slope * t + burst, (slope, burst)
            if found is not None and found not in best:
                best.append(found)
        return tuple(best)

    def _columns(self, ledger: Ledger) -> tuple[Floats, Floats, Floats, Flags]:
        """The columns of `pending`; a strict promise counts on no hit in the prefix cache that is not held yet."""
        dues, remaining, context, promised = ledger.columns()
        if self.strict:
            for request in ledger.hoped.values():
                at = ledger.place(request) - 1
                remaining[at], context[at] = request.target_tokens, 0.0
        return dues, remaining, context, promised

    def _crowded_s(self, view: EngineView, request: RequestState, own: float, backlog: float, load: Load) -> float:
        """Time until this request would be in time although those that are expected to go before it come.

        0 when it is already; inf when that is not known: the demand must change first.
        """
        if not self.foresight:
            return 0.0
        cost, factor, demand, now = view.cost.mean, view.cost.factor, view.demand, view.now_s
        step = min(load.pace_s, view.blocking_s)
        base = cost.g + cost.b * load.served + cost.k * load.reserved_tokens
        # With a backlog a step takes one pace on average; a strict promise counts every step at its envelope.
        share = 1.0 - (factor if self.strict else 1.0) * base / step
        density = request.slo.weight / max(own, 1e-6)
        horizon = request.due_s - now - view.residual_s
        everybody = self.foresight * demand.denser(now, 0.0)
        if everybody <= share:
            # On average everybody fits, so only arrivals with earlier deadlines stand in its way.
            room = share * horizon - self.foresight * demand.ahead_s(now, density, horizon)
            drain = share - everybody
        else:
            # Somebody has to go: everything denser comes first, whatever its deadline.
            drain = share - self.foresight * demand.denser(now, density)
            room = max(drain, self.concede * share) * horizon
        if backlog <= room:
            return 0.0
        # What is ahead of it gets less by what denser work leaves of each second; its own work does not.
        return (backlog - room) / drain if own <= room and drain > 0 else math.inf
