"""Test of drawn tokens against the target's distribution, by a martingale.

The log-probability of each drawn token minus its expectation, given the text before it, is a step
of a martingale. Its variance and all its moments are known, because the distribution of each token
is. So for any tilt t

    M(t) = exp(t * sum of steps - sum of log E exp(t * step))

has mean 1, and so has the mean of M over several tilts. A non-negative variable with mean 1 exceeds
1/a with a probability of at most a (J. Ville, Etude critique de la notion de collectif, 1939). This
assumes nothing about the number of tokens, their distributions, or when outputs end. For small
steps the best tilt is z divided by the standard deviation, and M is exp(z^2 / 2); reports show z.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

SMALLEST_TILT = 1 / 64
TILTS = (
    *(-SMALLEST_TILT * 2.0**k for k in range(7)),
    *(SMALLEST_TILT * 2.0**k for k in range(9)),
)
"""Tilts: powers of two from 1/64, for long runs and small faults, up to 4 and down to -1."""
LEVEL = 1e-10
"""Maximum probability that a method that draws from the target's distribution is called broken.
With one method per second for a year, the probability of one false alarm is 0.3%."""


def bound_chance(total: float, cumulants: Sequence[float]) -> float:
    """Return an upper bound of the probability of a sum of steps at least as far from 0.

    Args:
        total: sum of the steps.
        cumulants: for each of `TILTS`, the sum of log E exp(t * step).
    """
    logs = [t * total - k for t, k in zip(TILTS, cumulants, strict=True)]
    most = max(logs)
    evidence = most + log(sum(exp(each - most) for each in logs) / len(TILTS))
    return min(1.0, exp(-evidence)) if evidence > 0.0 else 1.0
