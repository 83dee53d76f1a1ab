"""Where a noisy series changed its level.

Binary segmentation (A. J. Scott and M. Knott, "A Cluster Analysis Method for Grouping Means in the
Analysis of Variance", Biometrics 30, 1974): the best split of a series is tested, and if it holds,
the two parts are split in turn. With x the values less their mean,

    B_k = n / (k (n - k)) * (sum_{i <= k} x_i)^2,     the best split: the largest B_k

is the sum of squares between the two parts. Values far outside count as much as the outer fences,
three interquartile ranges beyond the quartiles (J. W. Tukey, "Exploratory Data Analysis", 1977), so
that one wild run hides no change.

Significance by permutation: if nothing changed, the values could have come in any order. So the
chance of any false change in a series is at most `level`, whatever the distribution of the noise,
as long as the runs are independent of each other; a slow drift is told as a change, which it is.

A few values cannot prove anything: that of n values the last k have changed has p = 2 / C(n, k) at
the best. At level 0.01 that takes 5 + 5 values, or 3 after 9; at 0.003, 6 + 6, or 3 after 14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_SEGMENT = 3
"""Values on either side of a change."""
DRAWS = 4999
_FENCE = 3.0
"""Interquartile ranges beyond the quartiles."""
_TIE = 1e-9
"""Relative; sums that differ by less are one sum, added up in another order."""


@dataclass(frozen=True, slots=True)
class LevelShift:
    """A change of level.

    at: index of the first value after it. before, after: medians from the change before it, and to
    the next. p: how often chance alone makes a split as clear; 0 where there is no chance.
    """

    at: int
    before: float
    after: float
    p: float


def find_level_shifts(
    values: Sequence[float], *, level: float = 0.01, draws: int = DRAWS, seed: int = 0
) -> list[LevelShift]:
    """Changes of level in a noisy series, first ones first.

    Args:
        values: in order of time, finite.
        level: the chance of telling any change of a series that has none.
        draws: orders tried for each split; `level` * (`draws` + 1) should be at least 1, or no
            split can be significant.
    """
    series = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    found: dict[int, float] = {}
    open_parts = [(0, len(series))]
    while open_parts:
        start, end = open_parts.pop()
        split = _find_split(series[start:end], draws, rng)
        if split is not None and split[1] <= level:
            at = start + split[0]
            found[at] = split[1]
            open_parts += [(at, end), (start, at)]
    return _build_shifts(series, found)


def find_exact_changes(values: Sequence[float]) -> list[LevelShift]:
    """Changes in a series without noise: wherever a value differs from the one before."""
    series = np.asarray(values, dtype=np.float64)
    indices = (i for i in range(1, len(series)) if not math.isclose(series[i], series[i - 1]))
    return _build_shifts(series, dict.fromkeys(indices, 0.0))


def _find_split(part: Floats, draws: int, rng: np.random.Generator) -> tuple[int, float] | None:
    """The best split of a part and its p-value; None where the part is too short."""
    n = len(part)
    if n < 2 * MIN_SEGMENT:
        return None
    clipped = _clip_to_fences(part)
    observed = _compute_split_statistics(clipped)
    best = int(np.argmax(observed))
    orders = rng.permuted(np.broadcast_to(clipped, (draws, n)), axis=1)
    largest = _compute_split_statistics(orders).max(axis=-1)
    extreme = int((largest >= observed[best] - _TIE * (clipped**2).sum()).sum())
    return best + MIN_SEGMENT, (extreme + 1) / (draws + 1)


def _compute_split_statistics(values: Floats) -> Floats:
    """B_k of every split that leaves `LEAST` values on either side: [..., n] -> [..., splits]."""
    n = values.shape[-1]
    sizes = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    sums: Floats = np.cumsum(values, axis=-1)[..., MIN_SEGMENT - 1 : n - MIN_SEGMENT]
    found: Floats = sums**2 * (n / (sizes * (n - sizes)))
    return found


def _clip_to_fences(part: Floats) -> Floats:
    """Values within the fences, less their mean."""
    low, high = np.percentile(part, (25, 75))
    reach = _FENCE * (high - low)
    within: Floats = np.clip(part, low - reach, high + reach) if reach else part
    centred: Floats = within - within.mean()
    return centred


def _build_shifts(series: Floats, p_values: dict[int, float]) -> list[LevelShift]:
    """Changes with the levels between them."""
    ends = [0, *sorted(p_values), len(series)]
    levels = [float(np.median(series[start:end])) for start, end in pairwise(ends) if end > start]
    return [
        LevelShift(at, before, after, p_values[at])
        for at, (before, after) in zip(ends[1:-1], pairwise(levels), strict=True)
    ]
