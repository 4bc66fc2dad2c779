"""Prompt blocks that sequences of one HTTP request have in common: vLLM computes them once.

When sequences come together, none of their blocks is in the prefix cache yet. A block can be hit from the moment at
which the step that computes it is built, so who comes behind the first of them has it for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

#: Requests that are remembered while sequences of theirs are missing (one whose client left never comes whole).
MOST = 64


class Siblings:
    """Blocks by their chained hashes (two that are equal have equal prefixes), request by request."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[int, dict[Hashable, str]]] = {}  # name -> sequences missing, block -> who has it

    def shared(self, request_id: str, hashes: Sequence[Hashable], *, group: str, size: int) -> tuple[int, str | None]:
        """Return how many leading blocks an earlier one of the `size` sequences of `group` has, and which has them."""
        missing, known = self._groups.pop(group, (size, {}))
        count = next((i for i, block in enumerate(hashes) if block not in known), len(hashes))
        first = known[hashes[count - 1]] if count else None
        if missing > 1:
            for block in hashes[count:]:
                known[block] = request_id
            self._groups[group] = (missing - 1, known)
            while len(self._groups) > MOST:
                del self._groups[next(iter(self._groups))]
        return count, first
