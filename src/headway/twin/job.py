"""One request inside the twin: the state that the decisions see, and what only the simulated engine knows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from headway.core import RequestState


class Job:
    """A request of the trace.

    While it decodes, counters are lines in the step number w, so that a step costs nothing per request: after
    step w it has `out_shift + w` output tokens and `kv_shift + w` tokens in the KV pool.
    """

    __slots__ = (
        "_shared",
        "early",
        "finish_step",
        "first_step",
        "held",
        "hit_tokens",
        "ids",
        "ids_block",
        "known_keys",
        "kv_shift",
        "out_shift",
        "output",
        "plain",
        "private",
        "reached_s",
        "registered",
        "row",
        "slo",
        "start_s",
        "state",
        "version",
    )

    def __init__(
        self, *, row: int, state: RequestState, output: int, ids: Sequence[int] | None, ids_block: int
    ) -> None:
        self.row = row
        self.state = state
        self.slo = state.slo  # what it is scored against, also when it is served without a promise
        self.output = output  # tokens it really produces; the state only knows the declared maximum
        self.ids = ids  # prefix ids of the trace, each for `ids_block` tokens
        self.ids_block = ids_block
        self.reached_s: float | None = None  # when a log says that the engine took it
        self.start_s: float | None = None  # start of its first step
        self.hit_tokens = 0  # prompt tokens found in the prefix cache at its first start
        self.held: list[Hashable] = []  # cached blocks that it holds, in prompt order
        self.plain = 0  # plain blocks that it holds (before it decodes)
        self.registered = 0  # leading blocks whose content was offered to the cache
        self.known_keys: list[Hashable] | None = None  # of its blocks, while it waits
        self._shared: list[Hashable] | None = None
        self.private = 0  # leading blocks that only this request can find again, after a preemption
        self.first_step = 0  # first step of the current run of tokens, one a step
        self.early: list[float] = []  # times of tokens before that run
        self.out_shift = 0
        self.kv_shift = 0
        self.finish_step = 0
        self.version = 0  # makes older entries of the finish heap void

    def keys(self, block_size: int, tokens: int) -> list[Hashable]:
        """Return the content of the full blocks of the first `tokens` tokens, as far as anybody can find it again."""
        if self._shared is None:
            shared = 0
            if self.ids is not None:
                shared = min(len(self.ids) * self.ids_block, self.state.prompt_tokens) // block_size
            # Ids are chained: the id at a block's last token stands for everything before it.
            self._shared = [
                (self.ids[((block + 1) * block_size - 1) // self.ids_block], block) for block in range(shared)
            ]
        limit = tokens // block_size
        if limit <= len(self._shared):
            return self._shared[:limit]
        private = range(len(self._shared), min(limit, self.private))
        return self._shared + [(-1, self.state.seq, block) for block in private]
