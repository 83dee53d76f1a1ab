"""Rare questions that decide a speedup: few, far from the others, and most of the variance.

An interval knows only the questions that the run met. Where one question in fifty is far slower
than the others, a run may meet none, and its interval then misses the truth whatever the method
(docs/statistics.md). Where a run met some, this module finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbench_cli.stats.bootstrap import Floats, PairedTimes

FENCE = 3.0
"""Outer fences in interquartile ranges (Tukey: Exploratory Data Analysis, 1977). A normal logarithm
lies beyond them once in 400,000 questions."""
DECISIVE = 0.5
"""The share of the variance of the log speedup from which on rare questions decide it."""
ROUNDING = 1e-9
"""A relative spread this small is rounding."""
FEWEST = 20
"""With fewer questions quartiles are too uncertain: equal questions would look rare too often."""


@dataclass(frozen=True, slots=True)
class Rare:
    """The rare questions of a method: how many of how many, and the speedup without them."""

    count: int
    questions: int
    speedup_without: float


def rare_questions(times: PairedTimes) -> list[Rare | None]:
    """Find each method's rare questions; None where there are none or they decide nothing."""
    return [_rare(*sums) for sums in zip(times.baseline.sum(1), times.method.sum(1), strict=True)]


def _rare(x: Floats, y: Floats) -> Rare | None:
    """Find the rare questions among the times of the baseline and of one method."""
    paired = (x > 0) & (y > 0)
    x, y = x[paired], y[paired]
    if len(x) < FEWEST:
        return None
    ratios = np.log(x / y)
    low, high = np.quantile(ratios, (0.25, 0.75))
    margin = FENCE * (high - low)
    far = (ratios < low - margin) | (ratios > high + margin)
    # What each question adds to the variance of log(sum x / sum y), by the delta method.
    parts = (x / x.sum() - y / y.sum()) ** 2
    spread = parts.sum()
    if not far.any() or spread < ROUNDING**2 or parts[far].sum() < DECISIVE * spread:
        return None
    return Rare(int(far.sum()), len(x), float(x[~far].sum() / y[~far].sum()))
