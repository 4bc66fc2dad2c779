"""What a step of the twin takes: the five coefficients, and by how much real steps of a kind differ from them.

The scheduler believes in a linear cost; real kernels are not linear (a batch of three may be faster than one of
two). A simulated step therefore takes tau(q, n, K, X) times the factor of its kind, by prompt tokens and by decodes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core import CostCoefficients

Floats = NDArray[np.float64]

#: Kinds of steps in a calibration: up to so many prompt tokens, up to so many decodes, or more.
Q_UP_TO = (0, 32, 128, 512)
N_UP_TO = (0, 2, 5, 10, 20, 40, 80)

#: A kind with as many steps moves half of the way from its neighbour's factor to its own.
_HALF = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factor on the five coefficients' price by kind of step: the row by q, the column by n, the last ones beyond."""

    q_up_to: tuple[int, ...]
    n_up_to: tuple[int, ...]
    factors: tuple[tuple[float, ...], ...]

    def factor(self, q: int, n: int) -> float:
        """Return the factor of a step with q prompt tokens and n decodes."""
        return self.factors[bisect_left(self.q_up_to, q)][bisect_left(self.n_up_to, n)]

    def of(self, terms: Floats) -> Floats:
        """Return the factor of each row of `terms` (steps x (q, n, K, X))."""
        rows = np.searchsorted(self.q_up_to, terms[:, 0])
        return np.asarray(np.array(self.factors)[rows, np.searchsorted(self.n_up_to, terms[:, 1])])


NONE = Correction(q_up_to=(), n_up_to=(), factors=((1.0,),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds of a step without noise."""

    cost: CostCoefficients
    correction: Correction = NONE

    def seconds(self, q: int, n: int, K: int, X: float) -> float:
        """Return what a step takes."""
        seconds = self.cost.seconds(q, n, K, X)
        return seconds if self.correction is NONE else seconds * self.correction.factor(q, n)

    def decode_only(self, n: int, contexts: Floats) -> Floats:
        """Return what steps of n decodes and nothing else take that read so many context tokens (shape of it)."""
        cost = self.cost
        return ((cost.g + cost.b * n) + cost.k * contexts) * self.correction.factor(0, n)


def correct(terms: Floats, expected: Floats, seconds: Floats) -> Correction:
    """Return the factors with which steps of a kind take as long in total as those that were measured.

    Totals, because a queue waits for the time of all steps; most of it is that of the long ones. A kind of which few
    steps were seen stays near that of fewer decodes and about as many prompt tokens.

    Args:
        terms: steps x (q, n, K, X).
        expected: what the twin would let them take without a correction, seconds (shape: steps).
        seconds: measured.
    """
    rows, columns = np.searchsorted(Q_UP_TO, terms[:, 0]), np.searchsorted(N_UP_TO, terms[:, 1])
    table = np.ones((len(Q_UP_TO) + 1, len(N_UP_TO) + 1))
    for row in range(len(table)):
        of = rows == row
        about = _shrunk(expected[of], seconds[of], 1.0)
        for column in range(table.shape[1]):
            of = (rows == row) & (columns == column)
            about = table[row, column] = _shrunk(expected[of], seconds[of], about)
    factors = tuple(tuple(round(each, 4) for each in row) for row in table.tolist())
    return Correction(q_up_to=Q_UP_TO, n_up_to=N_UP_TO, factors=factors)


def _shrunk(expected: Floats, seconds: Floats, toward: float) -> float:
    """Return the ratio of the totals, with `_HALF` steps of average length more that have another ratio."""
    if not len(expected):
        return toward
    more = _HALF * float(expected.mean())
    return (float(seconds.sum()) + more * toward) / (float(expected.sum()) + more)


def as_tables(correction: Correction) -> dict[str, dict[str, float]]:
    """Return the serialised form: a table for each row, keys `q_32`, `n_5`, `n_more`."""
    names = [f"n_{each}" for each in correction.n_up_to] + ["n_more"]
    rows = [f"q_{each}" for each in correction.q_up_to] + ["q_more"]
    return {row: dict(zip(names, each, strict=True)) for row, each in zip(rows, correction.factors, strict=True)}


def edges(names: list[str], prefix: str) -> tuple[int, ...] | None:
    """Return the numbers in the keys of a row or column of `as_tables`, None when they are not such keys in order."""
    *some, last = names
    parts = [name.removeprefix(prefix) for name in some]
    if last != f"{prefix}more" or not all(
        p.isascii() and p.isdigit() and f"{prefix}{p}" == n for p, n in zip(parts, some, strict=True)
    ):
        return None
    found = tuple(int(part) for part in parts)
    return found if all(a < b for a, b in itertools.pairwise(found)) else None
