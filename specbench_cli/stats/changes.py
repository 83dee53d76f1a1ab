"""Detection of change points in a noisy series, such as a speedup over many runs.

Binary segmentation (A. J. Scott and M. Knott, "A Cluster Analysis Method for Grouping Means in the
Analysis of Variance", Biometrics 30, 1974): find the best split of a series and test it. If it is
significant, do the same with both parts. Let x be the n values of the series minus their mean. For
a split after the k-th value,

    B_k = n / (k (n - k)) * (sum_{i <= k} x_i)^2

is the sum of squares between the two parts, as in an analysis of variance. The best split has the
largest B_k. Values that are more than three interquartile ranges beyond the quartiles (outer
fences: J. W. Tukey, "Exploratory Data Analysis", 1977) are clipped, so that one extreme run does
not hide a change.

The p-value comes from a permutation test: if nothing changed, all orders of the values are equally
likely. So the probability of a false change in a series is at most `level`, for any distribution of
the noise, if the runs are independent. A slow drift is reported as a change, too.

A change after few values cannot be significant: if the last k of n values changed, p is at least 2
/ C(n, k). At level 0.01, the test needs 5 values before the change and 5 after it, or 9 before and
3 after. At level 0.003, it needs 6 and 6, or 14 and 3.
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
"""Minimum number of values on each side of a change."""
DRAWS = 4999
_FENCE = 3.0
"""Distance of the outer fences from the quartiles, in interquartile ranges."""
_TIE = 1e-9
"""Relative tolerance for equal sums. They can differ by rounding."""


@dataclass(frozen=True, slots=True)
class LevelShift:
    """A change point of a series: the index where its typical value changes.

    index: Index of the first value after the change.
    before: Median of the values since the previous change.
    after: Median of the values until the next change.
    p: p-value. 0 for series without noise.
    """

    index: int
    before: float
    after: float
    p: float


def find_level_shifts(
    values: Sequence[float], *, level: float = 0.01, draws: int = DRAWS, seed: int = 0
) -> list[LevelShift]:
    """Find the change points of a noisy series, in order of time.

    Args:
        values: Finite values in order of time.
        level: Maximum probability of a false change in the whole series.
        draws: Number of permutations for each split. No split can be significant unless `level` *
            (`draws` + 1) is at least 1.
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
    """Find the changes in a series without noise: each value that differs from the previous one."""
    series = np.asarray(values, dtype=np.float64)
    indices = (i for i in range(1, len(series)) if not math.isclose(series[i], series[i - 1]))
    return _build_shifts(series, dict.fromkeys(indices, 0.0))


def _find_split(part: Floats, draws: int, rng: np.random.Generator) -> tuple[int, float] | None:
    """Return the best split of a part of the series, and the p-value of the split.

    Return None if the part is too short.
    """
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
    """Return the statistic B_k (see the module docstring) of each split of a series.

    `values` has the shape [..., n], and the result [..., splits]. Each side of a split has at least
    `MIN_SEGMENT` values.
    """
    n = values.shape[-1]
    sizes = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    sums: Floats = np.cumsum(values, axis=-1)[..., MIN_SEGMENT - 1 : n - MIN_SEGMENT]
    found: Floats = sums**2 * (n / (sizes * (n - sizes)))
    return found


def _clip_to_fences(part: Floats) -> Floats:
    """Clip values to the outer fences (three interquartile ranges), and subtract their mean."""
    low, high = np.percentile(part, (25, 75))
    reach = _FENCE * (high - low)
    within: Floats = np.clip(part, low - reach, high + reach) if reach else part
    centred: Floats = within - within.mean()
    return centred


def _build_shifts(series: Floats, p_values: dict[int, float]) -> list[LevelShift]:
    """Return the change points, each with the medians before and after it."""
    ends = [0, *sorted(p_values), len(series)]
    levels = [float(np.median(series[start:end])) for start, end in pairwise(ends) if end > start]
    return [
        LevelShift(at, before, after, p_values[at])
        for at, (before, after) in zip(ends[1:-1], pairwise(levels), strict=True)
    ]
