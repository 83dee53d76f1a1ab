"""Sign-flip test of whether paired differences have mean zero.

If two methods have the same output distribution, a difference between the outputs of a pair is as
likely as its negative (R. A. Fisher, "The Design of Experiments", 1935, section 21). The test
compares the observed mean with the means after all sign changes, or after a random sample of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 9999
_MAX_EXACT = 13
"""Maximum number of clusters for which all 2**n sign changes are tried."""
_TIE = 1e-12
"""Relative tolerance for equal sums. They can differ by rounding."""


@dataclass(frozen=True, slots=True)
class SignFlipTest:
    """A mean paired difference and its two-sided p-value."""

    difference: float
    p: float
    clusters: int


def run_sign_flip_test(
    clusters: Iterable[Sequence[float]], *, draws: int = DRAWS, seed: int = 0
) -> SignFlipTest | None:
    """Test whether paired differences have mean zero.

    All differences of a cluster change sign together, because they are not independent.

    Args:
        clusters: Differences of each cluster. Empty clusters are skipped.
        draws: Number of random sign changes, used if there are too many sign changes to try all.
        seed: Random seed.

    Returns:
        The mean over all differences and its p-value. None if there are no differences.
    """
    parts = [cluster for cluster in clusters if len(cluster)]
    if not parts:
        return None
    sums = np.array([sum(part) for part in parts], dtype=np.float64)
    n = sum(map(len, parts))
    observed = abs(sums.sum())
    threshold = observed - _TIE * np.abs(sums).sum()
    if len(sums) <= _MAX_EXACT:
        p = float((np.abs(_all_signs(len(sums)) @ sums) >= threshold).mean())
    else:
        signs = np.random.default_rng(seed).integers(0, 2, (draws, len(sums)), dtype=np.int8)
        extreme = int((np.abs((2 * signs - 1) @ sums) >= threshold).sum())
        p = (extreme + 1) / (draws + 1)
    return SignFlipTest(float(sums.sum() / n), p, len(sums))


def _all_signs(n: int) -> NDArray[np.int64]:
    """Return every combination of n signs: [2**n, n]."""
    return 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1) - 1
