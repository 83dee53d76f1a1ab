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
_ROUNDS = 10
"""Of the alternating fit, which is exact after one where nothing is missing or outlying."""
_FLOOR = 0.003
"""Nobody's times repeat better than to 0.3%: a smaller deviation is a coincidence."""


@dataclass(frozen=True, slots=True)
class TwoWay:
    """levels: l [processes], but for what all have in common. noise: variance of a value, as levels
    feel it. df: its degrees of freedom."""

    levels: Floats
    noise: float
    df: int


def two_way(values: Floats) -> TwoWay:
    """The fit with Huber's weights ("Robust estimation of a location parameter", Ann. Math. Stat.
    35, 1964).

    Args:
        values: [prompts, processes]; nan where missing, no row or column all of it.
    """
    seen = np.isfinite(values)
    # Residuals are smaller than noise, by what levels and prompts took.
    df = max(1, int(seen.sum()) - sum(seen.shape) + 1)
    taken = math.sqrt(seen.sum() / df)
    levels = _medians((values - _medians(values)[:, None]).T)
    prompts = _medians(values - levels)
    rest = np.abs(values - prompts[:, None] - levels)[seen] * taken
    bound = _HUBER * max(1.4826 * float(np.median(rest)), _FLOOR) / taken
    y = np.where(seen, values, 0.0)
    for _ in range(_ROUNDS):
        far = np.abs(y - prompts[:, None] - levels)
        weights = np.where(seen, bound / np.maximum(far, bound), 0.0)
        levels = (weights * (y - prompts[:, None])).sum(0) / weights.sum(0)
        prompts = (weights * (y - levels)).sum(1) / weights.sum(1)
    rest = (y - prompts[:, None] - levels)[seen]
    inside = max(0.5, float((np.abs(rest) <= bound).mean()))
    noise = float((np.clip(rest, -bound, bound) ** 2).sum()) / df / inside**2
    return TwoWay(levels, max(noise, _FLOOR**2), df)


def undisturbed(values: Floats) -> Floats:
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
    found = optimize.linprog(
        -count,
        A_ub=sparse.coo_array((ones, places)).tocsr(),
        b_ub=values[prompt, process],
        bounds=[(None, None)] * n + [(0, 0)] + [(None, None)] * (processes - 1),
    )
    levels: Floats = found.x[n:]
    return levels


def _medians(values: Floats) -> Floats:
    """Of every row of what is there: np.nanmedian, which is slow on many short rows."""
    ordered = np.sort(values, axis=1)
    last = np.isfinite(values).sum(1) - 1
    rows = np.arange(len(values))
    found: Floats = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    return found
