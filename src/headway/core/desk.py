"""Who is put before the admission test at a step boundary, and what the rule of a class makes of its answer.

The real engine and the twin ask through the same desk:

    asked       deferred requests whose time is up; a few of the other deferred ones, in turn; then who is new
    together    all sequences of one HTTP request (n > 1, several prompts) are accepted or refused as one
    tenants     one that has its share of a contended class is asked as if a part of the engine were taken (tenants.py)
    bookings    who was told to come back now is asked as it is, others as if those came along (bookings.py)
    on_miss     `reject` refuses at once, `defer` asks again until the deadline, `best_effort` serves without a promise
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from headway.core.bookings import Bookings
from headway.core.cost import CostCoefficients
from headway.core.request import RequestState
from headway.core.slo import Slo
from headway.core.tenants import FairShares
from headway.core.verdict import Accept, Admission, Defer, Reason, Reject, Verdict
from headway.core.view import EngineView

#: Deferred requests that are asked about again at one boundary, so that a crowd of them cannot slow the steps down.
RETRIES_PER_STEP = 4

#: Lost deadlines that are renewed at one boundary.
RENEWED_PER_STEP = 4

#: A group whose members do not all arrive is decided after this time with those that did.
GROUP_WAIT_S = 1.0

#: Members of a decided group that are still missing after this time never come.
GROUP_LATE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict on the sequences of one HTTP request."""

    requests: Sequence[RequestState]
    verdict: Accept | Reject
    late: bool = False  # they came after the others of their group and get the same verdict


@dataclass(slots=True)
class _Group:
    """Sequences of one HTTP request. Once it has a verdict, it is only kept for the members that are missing."""

    name: str
    size: int  # members without a verdict, arrived or not
    since_s: float
    arrival_s: float
    waiting: list[str]  # those that arrived
    verdict: Accept | Reject | None = None


def renew(view: EngineView) -> None:
    """Give prompts at the head of the queue whose deadline is lost a new one, a target from now.

    The policy serves what is lost behind what is not, while an admission test counts what is due before a candidate as
    served before it: a lost document at the head would refuse every chat until it is done, for the longer the more.
    """
    ledger, cost, start = view.ledger, view.cost.mean, view.now_s + view.residual_s
    for request in ledger.pending[:RENEWED_PER_STEP]:
        target, left = request.slo.ttft_s, request.remaining_tokens
        if target is not None and left and request.due_s - start < cost.work_s(left, request.computed_tokens):
            ledger.postpone(request, start + target)


class Desk:
    """Requests without a verdict. It accepts and refuses in the ledger; the caller tells whoever waits.

    Args:
        patience_s: age at which a request served as best effort is ordered as if its deadline had come.
        shares: fair shares of the tenants; None treats all requests alike.
        bookings: who was told to come back; None tells waits as the admission test finds them.
        renews: whether lost deadlines are renewed; for decisions that read none it is only work.
    """

    __slots__ = ("_deferred", "_groups", "_members", "bookings", "patience_s", "renews", "shares")

    def __init__(
        self,
        *,
        patience_s: float = 60.0,
        shares: FairShares | None = None,
        bookings: Bookings | None = None,
        renews: bool = True,
    ) -> None:
        self.patience_s = patience_s
        self.shares = shares
        self.bookings = bookings
        self.renews = renews
        self._deferred: dict[str, float] = {}  # id -> when its answer is due; the one asked last is at the end
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, _Group] = {}

    def arrive(self, request: RequestState, cost: CostCoefficients, now_s: float) -> None:
        """A request reached the engine."""
        if self.shares is not None:
            self.shares.offered(request, cost, now_s)
        if self.bookings is not None and request.fingerprint:
            request.booked = self.bookings.claim(request, now_s)

    def join(self, request_id: str, *, group: str, size: int, now_s: float, arrival_s: float | None = None) -> float:
        """An undecided request is one of `size` that are decided together under the name `group`.

        Returns when they came: `arrival_s` (None: now) of the first. For each two clocks are read, never at once, and
        one that seemed to come before its siblings would stand before them.
        """
        for name in [k for k, g in self._groups.items() if not g.waiting and now_s - g.since_s > GROUP_LATE_S]:
            del self._groups[name]
        found = self._groups.setdefault(
            group, _Group(group, size, now_s, now_s if arrival_s is None else arrival_s, [])
        )
        found.waiting.append(request_id)
        self._members[request_id] = found
        return found.arrival_s

    def leave(self, request_id: str) -> None:
        """The request does not wait for an answer any more."""
        self._deferred.pop(request_id, None)
        group = self._members.pop(request_id, None)
        if group is None:
            return
        group.waiting.remove(request_id)
        group.size -= 1
        if group.size <= 0:
            self._groups.pop(group.name, None)

    def clear(self) -> None:
        """Forget everybody."""
        for books in (self._deferred, self._groups, self._members):
            books.clear()

    @property
    def empty(self) -> bool:
        """Whether nobody is deferred and no group waits for a member."""
        return not (self._deferred or self._groups)

    def ask(self, view: EngineView, admission: Admission) -> Iterator[Answer]:
        """Yield the verdicts of this boundary as they fall: what raises later does not undo them."""
        if self.renews:
            renew(view)
        now, deferred, undecided = view.now_s, self._deferred, view.ledger.undecided
        asked = [i for i, until in deferred.items() if now >= until]
        asked += [i for i in islice(deferred, RETRIES_PER_STEP) if now < deferred[i]]
        asked += [i for i in undecided if i not in deferred]
        for request_id in asked:
            if request_id not in undecided:
                continue  # decided with its group
            group = self._members.get(request_id)
            if group is None:
                answer = self._answer(view, admission, [request_id])
            elif request_id == group.waiting[0]:
                answer = self._answer_group(view, admission, group)
            else:
                continue
            if answer is not None:
                yield answer

    def _answer_group(self, view: EngineView, admission: Admission, group: _Group) -> Answer | None:
        """Answer all sequences of one HTTP request together; late ones follow the others."""
        ids = list(group.waiting)
        if group.verdict is None:
            if len(ids) < group.size and view.now_s - group.since_s < GROUP_WAIT_S:
                return None
            answer = self._answer(view, admission, ids)
            group.verdict = answer.verdict if answer is not None else None
            return answer
        states = [view.ledger.requests[i] for i in ids]
        if isinstance(group.verdict, Accept):
            for state in states:
                view.ledger.accept(state, None)
            self._leave_all(ids)
        else:
            self._refuse(view, states)
        return Answer(states, group.verdict, late=True)

    def _answer(self, view: EngineView, admission: Admission, ids: list[str]) -> Answer | None:
        """Accept all of `ids`, refuse all, or put the answer off (None)."""
        ledger = view.ledger
        states = [ledger.requests[i] for i in ids]
        self._deferred.pop(ids[0], None)
        bounds: list[float | None] = []
        for state in states:
            state.booked = states[0].booked
            verdict = self._verdict(view, admission, state)
            if isinstance(verdict, Accept):
                ledger.accept(state, verdict.bound_s)
                bounds.append(verdict.bound_s)
                continue
            alone = len(ledger.pending) + len(ledger.decoding) == len(bounds)
            if bounds and alone:
                verdict = self._own_way(view, admission, states, len(bounds), verdict)
            for accepted in states[: len(bounds)]:
                ledger.retract(accepted)
            if isinstance(verdict, Defer):
                self._deferred[ids[0]] = verdict.until_s
                return None
            verdict = self._book(view, states[0], verdict)
            self._refuse(view, states)
            return Answer(states, verdict)
        self._leave_all(ids)
        for books in (self.shares, self.bookings):
            if books is not None:
                for state in states:
                    books.admitted(state, view.cost.mean, view.now_s)
        known = [bound for bound in bounds if bound is not None]
        # A bound that holds for some of a group would say nothing.
        return Answer(states, Accept(bound_s=max(known) if len(known) == len(bounds) else None))

    def _own_way(
        self,
        view: EngineView,
        admission: Admission,
        states: Sequence[RequestState],
        at: int,
        verdict: Defer | Reject,
    ) -> Defer | Reject:
        """Return the refusal of a group of which `states[at]` is refused, when nobody but itself is there.

        What its sequences take together even at the mean cost never fits. What only the envelope denies may pass one
        day, when steps scatter less; no wait is known for that.
        """
        if self.bookings is not None and self.bookings.open:
            # Places kept for others are not its own.
            own = admission.decide(view, states[at])
            if isinstance(own, Accept):
                return verdict
            verdict = own if isinstance(verdict, Reject) else verdict
        reason, slo, detail = _reason(verdict), states[at].slo, None
        if reason is Reason.KV:
            detail = _TOO_MANY.format(len(states))
        elif reason is Reason.TBT and not view.cost.drifting:
            gap = view.cost.mean.seconds(0, len(states), sum(each.prompt_tokens for each in states), 0)
            if gap > slo.pace_s:
                detail = _TOO_SLOW.format(len(states), 1e3 * gap, 1e3 * slo.pace_s)
        elif reason is Reason.TTFT and not view.cost.drifting:
            takes = view.alone_s(*states)
            if takes > states[at].due_s - states[at].arrival_s:
                detail = _TOO_LONG.format(len(states), 1e3 * takes)
        if detail is not None:
            return Reject(reason=Reason.NEVER_FITS, detail=detail)
        if isinstance(verdict, Reject) and reason in (Reason.TBT, Reason.TTFT):
            return dataclasses.replace(verdict, retry_after_s=None)
        return verdict

    def _verdict(self, view: EngineView, admission: Admission, state: RequestState) -> Verdict:
        """Ask the admission test, then apply the rule of the class; Defer only while there is time."""
        if state.follows is not None and state.has_target and not state.follows.has_target:
            return self._best_effort(state)  # the one that computes its prefix will do so some day
        verdict = self._decide(view, admission, state)
        if isinstance(verdict, Accept):
            return verdict
        if isinstance(verdict, Defer):
            if view.now_s < verdict.until_s:
                return verdict
            verdict = verdict.otherwise
        if not state.refusable:
            return self._best_effort(state)
        if verdict.reason is Reason.NEVER_FITS or state.slo.on_miss == "reject":
            return verdict
        if state.slo.on_miss == "best_effort":
            return self._best_effort(state)
        return Defer(until_s=state.due_s, otherwise=verdict) if view.now_s < state.due_s else verdict

    def _decide(self, view: EngineView, admission: Admission, state: RequestState) -> Verdict:
        """Ask the admission test, within the share of the tenant and beside those who were told to come back."""
        shares, now, ledger = self.shares, view.now_s, view.ledger
        contended = shares is not None and shares.several(state, now)
        above = contended and shares is not None and shares.has_share(state, now)
        if state.booked:
            # A place was found for it: only shorter targets go before it whatever comes.
            view = dataclasses.replace(view, demand=view.demand.shorter(state.slo.ttft_s))
        elif contended and not above and shares is not None:
            # What others offer above their shares does not count against it.
            view = dataclasses.replace(view, demand=shares.demand)
        asked_view, asked = view, state
        if ledger.pending or ledger.decoding:  # an idle engine has room for everybody
            if above and shares is not None:
                asked_view, asked = shares.reserved(view, state)
            if self.bookings is not None and self.bookings.open:
                own = contended and not above
                asked = self.bookings.beside(asked, view.cost.mean, now, only_own=own) or asked
                longer = view.max_model_len + asked.prompt_tokens - state.prompt_tokens
                asked_view = dataclasses.replace(asked_view, max_model_len=longer)
        verdict = admission.decide(asked_view, asked)
        if asked is not state and not isinstance(verdict, Accept):
            reason, detail = (Reason.TENANT_SHARE, _SHARE) if above else (None, _BOOKED)
            if _reason(verdict) is Reason.NEVER_FITS:
                real = admission.decide(view, state)
                if _reason(real) is Reason.NEVER_FITS or not ledger.pending:
                    return real
                verdict = Reject(reason=Reason.TTFT)
            verdict = _because(verdict, reason, detail)
        if shares is not None and not isinstance(verdict, Accept) and _reason(verdict) is not Reason.NEVER_FITS:
            shares.refused(state, now)
        return verdict

    def _best_effort(self, state: RequestState) -> Accept:
        """Serve it without any promise: its targets neither bind the steps nor go before promised ones."""
        state.slo = Slo(name=state.slo.name, on_miss="best_effort", weight=state.slo.weight)
        state.due_s = state.arrival_s + self.patience_s
        return Accept()

    def _book(self, view: EngineView, state: RequestState, reject: Reject) -> Reject:
        """Tell a wait behind those who were told one before."""
        if self.bookings is None or reject.reason is Reason.NEVER_FITS:
            return reject
        wait = reject.retry_after_s
        if wait is None:
            return reject
        return dataclasses.replace(reject, retry_after_s=self.bookings.book(state, view.cost.mean, wait, view.now_s))

    def _refuse(self, view: EngineView, states: Sequence[RequestState]) -> None:
        for state in states:
            self.leave(state.id)
            view.ledger.finish(state.id)

    def _leave_all(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.leave(request_id)


def _reason(verdict: Verdict) -> Reason | None:
    if isinstance(verdict, Defer):
        verdict = verdict.otherwise
    return verdict.reason if isinstance(verdict, Reject) else None


_TOO_MANY = "its {} sequences are served together, and the engine cannot hold so many even alone"
_TOO_SLOW = "a token of each of its {} sequences takes {:.1f} ms even alone, and the pace is {:g} ms"
_TOO_LONG = "its {} sequences take {:.0f} ms to their first tokens even alone"
_SHARE = "the room that is left is kept for others"
_BOOKED = "the room that is left is kept for requests that were told to come back now"


def _because(verdict: Verdict, reason: Reason | None, detail: str) -> Verdict:
    """Return a refusal with another reason (None: its own) and detail."""
    if isinstance(verdict, Defer):
        other = _because(verdict.otherwise, reason, detail)
        assert isinstance(other, Reject)
        return Defer(until_s=verdict.until_s, otherwise=other)
    assert isinstance(verdict, Reject)
    return dataclasses.replace(verdict, reason=reason or verdict.reason, detail=detail)
