"""The paged KV pool of one engine: block counts, and a prefix cache where the trace tells what is shared.

As in vLLM, full blocks keep their content after they are freed, the free list is least recently freed first, a
request frees its blocks tail first, and a block in use is never evicted. Two blocks of the same content count as
one cached and one plain block; vLLM would find the second after the first is gone.

Blocks that nobody can ever find again (answers, prompts without ids) are only counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class KvPool:
    """Blocks of `block_size` tokens.

    Attributes:
        total: blocks of the pool.
        free: blocks that nobody holds, cached ones included.
    """

    __slots__ = ("_cached", "_queue", "_runs", "block_size", "caching", "free", "total")

    def __init__(self, *, total: int, block_size: int, caching: bool) -> None:
        self.total = total
        self.block_size = block_size
        self.caching = caching
        self.free = total
        self._cached: dict[Hashable, int] = {}  # content -> requests that hold it
        # Free blocks, next to be taken first: content -> 1, or the number of a run of plain blocks -> its length.
        self._queue: OrderedDict[Hashable, int] = OrderedDict()
        self._runs = 0
        if caching:
            self._append_run(total)

    def blocks(self, tokens: int) -> int:
        """Return the blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> None:
        """Allocate `count` plain blocks; there must be as many free ones."""
        self.free -= count
        if not self.caching:
            return
        queue = self._queue
        while count:
            key, length = queue.popitem(last=False)
            if length > count:
                queue[key] = length - count
                queue.move_to_end(key, last=False)
                return
            count -= length
            self._cached.pop(key, None)

    def hits(self, keys: Sequence[Hashable]) -> int:
        """Return how many leading `keys` are cached."""
        cached = self._cached
        count = 0
        for key in keys:
            if key not in cached:
                break
            count += 1
        return count

    def idle(self, keys: Sequence[Hashable]) -> int:
        """Return how many of the cached `keys` are held by nobody, that is, count as free."""
        return sum(not self._cached[key] for key in keys)

    def acquire(self, keys: Sequence[Hashable]) -> None:
        """Hold cached blocks."""
        for key in keys:
            if not self._cached[key]:
                del self._queue[key]
                self.free -= 1
            self._cached[key] += 1

    def register(self, key: Hashable) -> bool:
        """Give a plain block that is held a content; False (it stays plain) when that content is cached already."""
        if key in self._cached:
            return False
        self._cached[key] = 1
        return True

    def release(self, keys: Sequence[Hashable], plain: int) -> None:
        """Free the cached blocks `keys` (in the order of the prompt) and `plain` others behind them."""
        self.free += plain
        if not self.caching:
            return
        if plain:
            self._append_run(plain)
        for key in reversed(keys):
            self._cached[key] -= 1
            if not self._cached[key]:
                self._queue[key] = 1
                self.free += 1

    def _append_run(self, length: int) -> None:
        self._runs += 1
        self._queue["run", self._runs] = length

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert 0 <= self.free <= self.total
        if self.caching:
            assert self.free == sum(self._queue.values())
            assert all((key in self._queue) == (not holders) for key, holders in self._cached.items())
