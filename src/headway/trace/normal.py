"""The normal distribution on arrays, from the standard library: not worth 143 MB of SciPy to the measuring part."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

_STANDARD = NormalDist()


def cdf(scores: np.ndarray) -> np.ndarray:
    """Return the standard normal distribution function of each score (same shape)."""
    return np.fromiter(map(_STANDARD.cdf, scores.tolist()), float, len(scores))


def quantile(shares: np.ndarray) -> np.ndarray:
    """Return the standard normal quantile of each share, 0 < share < 1 (same shape)."""
    return np.fromiter(map(_STANDARD.inv_cdf, shares.tolist()), float, len(shares))
