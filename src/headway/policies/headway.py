"""The default policy: steps sized by decode slack, prefills by deadline, short ones ahead where nothing is lost.

1. Step length. L = min(blocking allowance, least slack of the decodes that can still be on time). The room for
   prefill is L / f - g - b n - k K (f = envelope / mean), so the step's envelope stays under L. A stream that is
   ahead of its pace lends its slack to a larger chunk (`tpot`); under a hard pace (`tbt`) nothing can be lent.
2. Order. By (deadline of the first token, sequence number). A shorter prompt may jump ahead of earlier deadlines
   when, at the present rate, every one of them keeps its deadline all the same (slack stealing, Lehoczky and
   Ramos-Thuel 1992). Requests that cannot make their deadline even if served alone come behind those that
   can, which they must not take with them, and before those that have none, which may come without end.
3. Two-sided. Decodes run in every step. When the decodes leave no room for `min_chunk` tokens the step is decode
   only and the decodes gain pace - tau(0, n, K, 0) of slack, so prefill returns within a bounded number of steps;
   when decodes alone are slower than the pace (nothing can be gained), prefill gets `min_chunk` tokens a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice

from headway.core import EngineView, Phase, RequestState, StepPlan


class Headway:
    """Deadline order, banked slack, blocking allowance.

    Args:
        min_chunk: smallest chunk worth a step's fixed cost, tokens (a prompt's last chunk may be smaller).
        window: how many pending prefills, in deadline order, a step weighs against each other; later ones only fill
            what these leave.
        jump: let shorter prompts go ahead where no deadline is lost.
        jump_margin: a jump may cost at most 1 / jump_margin of the least slack that it passes by.
        skip: let decodes that are a step and the tightest pace of a decode ahead of their due skip steps that prefills
            can fill: a stream of twice that pace then runs in every second step. Only with synchronous scheduling.
    """

    name = "headway"

    def __init__(
        self,
        *,
        min_chunk: int = 16,
        window: int = 48,
        jump: bool = True,
        jump_margin: float = 4.0,
        skip: bool = False,
    ) -> None:
        for key, value in (("min_chunk", min_chunk), ("window", window), ("jump_margin", jump_margin)):
            if value < 1:
                raise ValueError(f"{key} = {value!r}: expected at least 1")
        self.min_chunk = min_chunk
        self.window = window
        self.jump = jump
        self.jump_margin = jump_margin
        self.skip = skip

    def plan(self, view: EngineView) -> StepPlan:
        """Return the plan of the next step."""
        ledger, cost = view.ledger, view.cost.mean
        head = [r for r in ledger.pending[: self.window] if r.target_tokens > r.computed_tokens]
        decodes = view.decodes
        base = cost.g + cost.b * decodes + cost.k * view.context_tokens
        floor = cost.work_s(self.min_chunk, 0)
        held: list[RequestState] = []
        paced = base  # without those that could be held
        if math.isfinite(view.slack_s) and (loose := view.loose):
            held = self._held(view, loose, base + floor if head else base)
            decodes -= len(held)
            paced -= sum([self._decode_s(view, r) for r in loose])
            base -= sum([self._decode_s(view, r) for r in held])
        if self.skip and head and not view.residual_s:
            ahead = self._ahead(view, head, self._room(view, base))
            held += ahead
            decodes -= len(ahead)
            base -= sum([self._decode_s(view, r) for r in ahead])
        skip = frozenset(r.id for r in held)
        if not head:
            return StepPlan(token_budget=max(1, decodes), starts=(), held=skip)
        room = self._room(view, base)
        least = 0  # tokens that the first prefill gets whatever they cost
        if not decodes:
            least = self.min_chunk  # nothing else would make the step worth its while
        elif room < floor:
            if paced * view.cost.factor < ledger.pace_s and not self._starved(view, room, base):
                room = 0.0 if room <= 0 or head[0].remaining_tokens > self.min_chunk else room
            elif paced * view.cost.factor < ledger.pace_s and view.slack_s / view.cost.factor - base >= floor:
                # Only the blocking allowance is in the way: exceed it by a chunk, but never a pace.
                chunk = cost.work_s(self.min_chunk, head[0].computed_tokens)
                room = max(floor, min(chunk, view.slack_s / view.cost.factor - base))
            else:
                room, least = floor, self.min_chunk
        chunks: dict[str, int] = {}
        starts: list[str] = []
        budget = left = view.max_step_tokens - decodes
        slots = view.max_running - len(ledger.decoding) - ledger.prefilling
        kv, free = view.kv, view.kv.free_blocks
        start, factor, waiting = view.now_s + view.residual_s, view.cost.factor, Phase.WAITING
        for work, request in chain(self._order(view, head, max(room, floor)), self._behind(view)):
            context = request.computed_tokens
            whole = request.target_tokens - context
            tokens = whole
            if work > room or whole > left:
                tokens = min(max(cost.tokens_within(room, context), least), whole, left)
            if tokens <= 0 or (tokens < whole and tokens < min(self.min_chunk, left)):
                break
            if request.phase is waiting:
                blocks = kv.blocks(request.target_tokens)
                if slots <= 0 or blocks > free:
                    slots = 0  # the engine would not start it; its tokens go to those that run, nobody overtakes
                    continue
                slots -= 1
                free -= blocks
                starts.append(request.id)
            least = 0
            chunks[request.id] = tokens
            left -= tokens
            if tokens < whole:
                work = cost.work_s(tokens, context)
            base += work
            room -= work
            if tokens < whole:
                break  # what is left is less than one of its tokens: nobody behind it overtakes with that
            if tokens == whole and request.slo.ttft_s is not None:
                # Its first token leaves with the step: later prompts must not fill the step past its deadline.
                spare = (request.due_s - start) / factor - base
                if 0 <= spare < room:
                    room = spare
                elif spare < 0 and request.promised and not self.jump and request.due_s - start >= base:
                    room = 0.0  # in time all the same, where steps in a row take less than the envelope of each
        return StepPlan(
            token_budget=max(1, decodes + budget - left),
            chunks=chunks,
            starts=tuple(starts),
            held=skip,
            victims=self._victims(view, chunks, decodes),
        )

    def _held(self, view: EngineView, loose: list[RequestState], base: float) -> list[RequestState]:
        """Decodes without a pace that skip this step, the youngest first: together they would break a pace."""
        cost = view.cost.mean
        alone = cost.seconds(0, 1, 0, 0)
        factor = max(view.cost.factor, view.cost.envelope(0, 1, 0, 0) / alone if alone > 0 else 1.0)
        excess = base - view.slack_s / factor
        held: list[RequestState] = []
        for request in reversed(loose):
            if excess <= 0:
                break
            held.append(request)
            excess -= self._decode_s(view, request)
        return held

    @staticmethod
    def _ahead(view: EngineView, head: list[RequestState], room: float) -> list[RequestState]:
        """Decodes with a pace that can skip a full step and still leave the next one the tightest pace of a decode."""
        cost, ledger = view.cost.mean, view.ledger
        if sum([cost.work_s(r.target_tokens - r.computed_tokens, r.computed_tokens) for r in head]) <= room:
            return []
        tightest = min([r.slo.pace_s for r in ledger.decoding.values()], default=math.inf)
        after = view.now_s + min(view.blocking_s, view.slack_s) + tightest
        return [r for r in ledger.decoding.values() if after <= r.next_due_s < math.inf]

    @staticmethod
    def _decode_s(view: EngineView, request: RequestState) -> float:
        """What a decode costs its step."""
        cost = view.cost.mean
        return cost.b + cost.k * (request.prompt_tokens + request.output_tokens)

    def _room(self, view: EngineView, base: float) -> float:
        """Seconds of prefill work whose step keeps every decode that can be kept."""
        return min(view.blocking_s, view.slack_s) / view.cost.factor - base

    def _starved(self, view: EngineView, room: float, base: float) -> bool:
        """Whether prefill would wait longer than the blocking allowance for slack to build up."""
        gain = view.ledger.pace_s - base
        if not math.isfinite(gain) or gain <= 0:
            return True
        missing = view.cost.mean.work_s(self.min_chunk, 0) - room
        return missing / gain * base > 4 * view.blocking_s

    def _order(self, view: EngineView, head: list[RequestState], room: float) -> list[tuple[float, RequestState]]:
        """(work, request) in deadline order with safe jumps; what can't be on time any more goes behind what can."""
        cost = view.cost.mean
        token_s, pair_s = cost.a, cost.x  # `work_s` written out: this loop runs for every pending prefill, every step
        room = max(room, 1e-6)
        start = view.now_s + view.residual_s
        # Wall time of a second of prefill work when every step carries `room` of it.
        stretch = max(1.0, min(8.0, (room + cost.g + cost.b * len(view.ledger.decoding)) / room))
        savable: list[tuple[float, RequestState]] = []
        lost: list[tuple[float, RequestState]] = []
        done = 0.0
        least = math.inf  # least slack of the savable prefills so far
        margin = self.jump_margin
        best: tuple[float, int] | None = None  # (work, place) of the shortest that may go first
        for request in head:
            computed, spare = request.computed_tokens, request.due_s - start
            tokens = request.target_tokens - computed
            work = tokens * (token_s + pair_s * (computed + 0.5 * tokens))
            first, early = request.follows, work
            if first is not None and request.phase is Phase.WAITING and first.computed_tokens < computed:
                # It finds in the cache what that one has computed by now.
                found = 0 if first.phase is Phase.WAITING else first.computed_tokens
                early = cost.work_s(request.target_tokens - found, found)
            if spare < early and request.slo.ttft_s is not None:
                lost.append((work, request))
                continue
            if margin * early * stretch <= least and (best is None or early < best[0]):
                best = (early, len(savable))
            done += work
            if spare - done * stretch < least:
                least = spare - done * stretch
            savable.append((work, request))
        if self.jump and best is not None and best[1] > 0:
            savable.insert(0, savable.pop(best[1]))
        if lost:
            # Before those without a target behind them, who may come without end and would keep them out for ever.
            at = len(savable)
            while at and savable[at - 1][1].slo.ttft_s is None:
                at -= 1
            savable[at:at] = lost
        return savable

    def _behind(self, view: EngineView) -> Iterator[tuple[float, RequestState]]:
        """(work, request) of what lies beyond the window, in deadline order."""
        for request in islice(view.ledger.pending, self.window, None):
            left = request.target_tokens - request.computed_tokens
            if left > 0:  # otherwise its last chunk is in flight
                yield view.cost.mean.work_s(left, request.computed_tokens), request

    @staticmethod
    def _victims(view: EngineView, chunks: dict[str, int], decodes: int) -> tuple[str, ...]:
        """Who may be preempted, first to go first; only worked out when the pool may run dry this step."""
        size = view.kv.block_size
        need = sum([-(-tokens // size) for tokens in chunks.values()]) + decodes
        if view.kv.free_blocks >= need:
            return ()
        ledger = view.ledger
        prefills = [r for r in reversed(ledger.pending) if r.phase is Phase.PREFILL]
        streams = sorted(ledger.decoding.values(), key=lambda r: (-r.next_due_s, -r.seq))
        # What nothing is promised goes first; of the same standing, prefills that nobody sees yet before streams.
        return tuple(r.id for promised in (False, True) for r in prefills + streams if r.promised is promised)
