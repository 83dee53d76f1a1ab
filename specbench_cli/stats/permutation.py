"""Whether paired differences are centred on zero, without assuming anything of their distribution.

If two ways of making an output have one distribution, either could have made either output of a
pair, and a difference is as likely as its negative (R. A. Fisher, "The Design of Experiments",
1935, section 21). So the observed mean is compared with the means under all changes of sign, or a
seeded sample of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 9999
_MAX_EXACT = 13
"""Up to 2**13 changes of sign are all tried."""
_TIE = 1e-12
"""Relative; sums that differ by less are one sum, added up in another order."""


@dataclass(frozen=True, slots=True)
class SignFlipTest:
    """A mean paired difference, and how often chance alone makes one as large (two-sided)."""

    difference: float
    p: float
    clusters: int


def run_sign_flip_test(
    clusters: Iterable[Sequence[float]], *, draws: int = DRAWS, seed: int = 0
) -> SignFlipTest | None:
    """Test paired differences; those of one cluster change sign together.

    Args:
        clusters: the differences of each cluster; empty ones are left out.
        draws: changes of sign sampled where there are too many to try all.
    Returns:
        The mean over all differences and its p-value; None without any.
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
    """Every combination of n signs: [2**n, n]."""
    return 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1) - 1
