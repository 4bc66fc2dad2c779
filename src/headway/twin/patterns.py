"""Courses of service times under the envelope: the factor measured / mean of every step, by step number.

A promise must hold for every course, so `headway check` tries regular, random and searched ones (check.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core import Line
from headway.twin.noise import Noise, NoiseModel

Floats = NDArray[np.float64]

#: Given a first step (from 0) and a count it returns as many factors; the same step always has the same one.
Course = Callable[[int, int], Floats]

_BLOCK = 4096


class Scripted(Noise):
    """A stream of step factors that follows a course, as far as the envelopes of steps in a row let it."""

    __slots__ = ("_course", "_first")

    def __init__(self, course: Course, lines: Sequence[Line] = ()) -> None:
        super().__init__(NoiseModel(), np.random.default_rng(0), lines)
        self._course = course
        self._first = 0  # step of the first factor that is kept

    def _fill(self, n: int) -> None:
        self._first += self._at
        self._block = self._course(self._first, max(n, _BLOCK))
        self._list = self._block.tolist()
        self._at = 0


def constant(factor: float) -> Course:
    """Every step takes `factor` times its mean."""
    return lambda first, count: np.full(count, factor)


def alternating(low: float, high: float, period: int = 1) -> Course:
    """`period` steps take `high` times their mean, the next ones `low` times, and so on."""
    return lambda first, count: np.where(np.arange(first, first + count) // period % 2 == 0, high, low)


def uniform(low: float, high: float, seed: int) -> Course:
    """Factors are drawn from [low, high], step by step."""

    def course(first: int, count: int) -> Floats:
        blocks = range(first // _BLOCK, (first + count - 1) // _BLOCK + 1)
        drawn = np.concatenate([np.random.default_rng([seed, b]).uniform(low, high, _BLOCK) for b in blocks])
        start = first - first // _BLOCK * _BLOCK
        return np.asarray(drawn[start : start + count])

    return course


def spells(low: float, high: float, seed: int) -> Course:
    """Either bound of [low, high] for spells of 1 to 64 steps: quiet times lure promises in, slow ones test them."""
    random = np.random.default_rng([seed, 7])
    lengths = random.integers(1, 65, 2 * _BLOCK)
    table = np.repeat(np.where(random.random(2 * _BLOCK) < 0.5, low, high), lengths)
    return lambda first, count: table[np.arange(first, first + count) % len(table)]


@dataclass(frozen=True, slots=True, eq=False)
class Edited:
    """A course with some steps changed: what the search works on."""

    base: Course
    changes: tuple[tuple[int, int, float], ...] = ()  # first step, count, factor; later ones win

    def __call__(self, first: int, count: int) -> Floats:
        """Return the factors of `count` steps from `first` on."""
        out = np.array(self.base(first, count))
        for start, length, factor in self.changes:
            out[max(0, start - first) : max(0, start + length - first)] = factor
        return out

    def change(self, start: int, length: int, factor: float) -> Edited:
        """Return the course with another factor for these steps."""
        return Edited(self.base, (*self.changes, (start, length, factor)))
