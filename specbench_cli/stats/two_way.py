"""Levels of processes from times of prompts: values[i, p] = a_i + l_p + noise.

Two answers: one for noise that is as often above as below, with rare hiccups, and one for
disturbances, which make a time longer and never shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

Floats = NDArray[np.float64]

_HUBER = 1.345
"""Where weights begin to fall, in standard deviations: 95% efficient at the normal distribution
(Huber)."""
_ITERATIONS = 10
"""Of the alternating fit, which is exact after one where nothing is missing or outlying."""
_FLOOR = 0.003
"""Nobody's times repeat better than to 0.3%: a smaller deviation is a coincidence."""


@dataclass(frozen=True, slots=True)
class TwoWayFit:
    """levels: l [processes], but for what all have in common. noise: variance of a value, as levels
    feel it. df: its degrees of freedom."""

    levels: Floats
    noise: float
    df: int


def fit_two_way(values: Floats) -> TwoWayFit:
    """The fit with Huber's weights ("Robust estimation of a location parameter", Ann. Math. Stat.
    35, 1964).

    Args:
        values: [prompts, processes]; nan where missing, no row or column all of it.
    """
    seen = np.isfinite(values)
    # Residuals are smaller than noise, by what levels and prompts took.
    df = max(1, int(seen.sum()) - sum(seen.shape) + 1)
    correction = math.sqrt(seen.sum() / df)
    levels = _row_medians((values - _row_medians(values)[:, None]).T)
    prompts = _row_medians(values - levels)
    residuals = np.abs(values - prompts[:, None] - levels)[seen] * correction
    bound = _HUBER * max(1.4826 * float(np.median(residuals)), _FLOOR) / correction
    y = np.where(seen, values, 0.0)
    for _ in range(_ITERATIONS):
        distance = np.abs(y - prompts[:, None] - levels)
        weights = np.where(seen, bound / np.maximum(distance, bound), 0.0)
        levels = (weights * (y - prompts[:, None])).sum(0) / weights.sum(0)
        prompts = (weights * (y - levels)).sum(1) / weights.sum(1)
    residuals = (y - prompts[:, None] - levels)[seen]
    inlier_share = max(0.5, float((np.abs(residuals) <= bound).mean()))
    noise = float((np.clip(residuals, -bound, bound) ** 2).sum()) / df / inlier_share**2
    return TwoWayFit(levels, max(noise, _FLOOR**2), df)


def fit_lower_envelope(values: Floats) -> Floats:
    """The levels [processes] where noise is never below zero, the first one's 0.

    Of all a_i + l_p that are nowhere above a value, those that leave the least to disturbances: the
    likeliest where these are exponential. A linear program.

    Args:
        values: as for `two_way`.
    """
    n, processes = values.shape
    prompt, process = np.nonzero(np.isfinite(values))
    at, ones = np.arange(len(prompt)), np.ones(2 * len(prompt))
    places = np.concatenate([at, at]), np.concatenate([prompt, n + process])
    count = np.concatenate([np.bincount(prompt, minlength=n), np.bincount(process)])
    solution = optimize.linprog(
        -count,
        A_ub=sparse.coo_array((ones, places)).tocsr(),
        b_ub=values[prompt, process],
        bounds=[(None, None)] * n + [(0, 0)] + [(None, None)] * (processes - 1),
    )
    levels: Floats = solution.x[n:]
    return levels


def _row_medians(values: Floats) -> Floats:
    """Of every row of what is there: np.nanmedian, which is slow on many short rows."""
    ordered = np.sort(values, axis=1)
    last = np.isfinite(values).sum(1) - 1
    rows = np.arange(len(values))
    found: Floats = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    return found
