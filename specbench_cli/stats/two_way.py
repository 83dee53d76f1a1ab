"""Two-way fits: how much faster or slower each process was than the others on the same prompts.

The model is values[i, p] = a_i + l_p + noise, with a level a_i for prompt i and a level l_p for
process p. `fit_two_way` is for symmetric noise with rare outliers. `fit_lower_envelope` is for
noise that can only make a time longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

Floats = NDArray[np.float64]

_HUBER = 1.345
"""Deviation above which weights decrease, in standard deviations. With normal noise, Huber's
estimate then has 95% efficiency."""
_ITERATIONS = 10
"""Number of iterations. One is exact if no value is missing and there are no outliers."""
_FLOOR = 0.003
"""Minimum standard deviation of the noise. Repeated times differ by at least 0.3%."""


@dataclass(frozen=True, slots=True)
class TwoWayFit:
    """Result of a two-way fit.

    levels: [processes], level of each process. Only differences between levels have a meaning.
    noise: Variance of a value.
    df: Degrees of freedom of this variance.
    """

    levels: Floats
    noise: float
    df: int


def fit_two_way(values: Floats) -> TwoWayFit:
    """Fit the two-way model with Huber's weights, which limit the influence of outliers.

    Huber, "Robust estimation of a location parameter", Ann. Math. Stat. 35, 1964.

    Args:
        values: [prompts, processes], nan if missing. No row or column may be all nan.
    """
    seen = np.isfinite(values)
    # The residuals underestimate the noise, because the levels are fitted to the same values. So
    # divide by the degrees of freedom.
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
    """Return the levels [processes] for noise that is never negative. The first level is 0.

    Among all levels with a_i + l_p <= values[i, p], the function chooses the levels with the
    smallest sum of noise. They are the maximum likelihood estimate for exponential noise, and the
    solution of a linear program.

    Args:
        values: As for `fit_two_way`.
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
    """Return the median of the finite values of each row. np.nanmedian is slow for short rows."""
    ordered = np.sort(values, axis=1)
    last = np.isfinite(values).sum(1) - 1
    rows = np.arange(len(values))
    found: Floats = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    return found
