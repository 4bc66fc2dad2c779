"""Request bodies, built ahead of their due time so that building one never delays another."""

from __future__ import annotations

import json

from headway.replay.prompts import Prompts, Vocabulary

#: Bytes of bodies kept ready; more are built in idle moments of the run.
READY_BYTES = 64 << 20


class Bodies:
    """JSON bodies by position in the trace. `take` gives one, built on the spot when it isn't ready."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        vocabulary: Vocabulary,
        max_tokens: list[int],
        fields: dict,
        endpoint: str,
    ) -> None:
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._max_tokens = max_tokens
        self._chat = endpoint == "chat"
        self._tail = json.dumps(fields, separators=(",", ":"))[1:].encode()
        self._ready: dict[int, bytes] = {}
        self._ready_bytes = 0
        self._next = 0
        self.shares_prefixes = prompts.shared_prefixes
        self.built_late = 0  # bodies that had to be built when they were due

    def fill(self) -> bool:
        """Build the next body; return whether there was room and one to build."""
        if self._next >= len(self._max_tokens) or self._ready_bytes >= READY_BYTES:
            return False
        body = self._build(self._next)
        self._ready[self._next] = body
        self._ready_bytes += len(body)
        self._next += 1
        return True

    def take(self, index: int) -> bytes:
        """Return the body of one request, once."""
        body = self._ready.pop(index, None)
        if body is not None:
            self._ready_bytes -= len(body)
            return body
        self.built_late += 1
        if index == self._next:
            self._next += 1
        return self._build(index)

    def _build(self, index: int) -> bytes:
        ids = self._prompts.ids(index)
        if self._chat:
            content = json.dumps(self._vocabulary.decode(ids))
            prompt = '"messages":[{"role":"user","content":' + content + "}]"
        else:
            prompt = '"prompt":' + json.dumps(ids.tolist(), separators=(",", ":"))
        return f'{{{prompt},"max_tokens":{self._max_tokens[index]},'.encode() + self._tail
