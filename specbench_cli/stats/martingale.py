"""Test of whether sampled tokens are from the target's distribution, by a martingale.

A step is the log-probability of a sampled token minus the expected log-probability, given the text
before the token. The sum of the steps is a martingale. The target's distribution of each token is
known, so all moments of a step are known. For any number t (the tilt),

    M(t) = exp(t * sum of steps - sum of log E exp(t * step))

has mean 1, and the mean of M over several tilts has mean 1, too. A non-negative variable with mean
1 exceeds 1/a with a probability of at most a (J. Ville, Etude critique de la notion de collectif,
1939). No assumption about the number of tokens, their distributions, or the ends of outputs is
needed. Let z be the sum of the steps divided by its standard deviation. For small steps, the best
tilt is z divided by the standard deviation. Then M is exp(z^2 / 2). Reports show z.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

SMALLEST_TILT = 1 / 64
TILTS = (
    *(-SMALLEST_TILT * 2.0**k for k in range(7)),
    *(SMALLEST_TILT * 2.0**k for k in range(9)),
)
"""Tilts: positive and negative powers of two. Small ones find small faults in long runs."""
LEVEL = 1e-10
"""Maximum probability that a method that draws from the target's distribution is called broken.
With one method per second for a year, the probability of one false alarm is 0.3%."""


def bound_chance(total: float, cumulants: Sequence[float]) -> float:
    """Return an upper bound of the p-value of a sum of steps, two-sided.

    The p-value is the probability that a sum is at least as far from 0 as `total`.

    Args:
        total: Sum of the steps.
        cumulants: For each tilt t of `TILTS`, the sum of log E exp(t * step).
    """
    logs = [t * total - k for t, k in zip(TILTS, cumulants, strict=True)]
    most = max(logs)
    evidence = most + log(sum(exp(each - most) for each in logs) / len(TILTS))
    return min(1.0, exp(-evidence)) if evidence > 0.0 else 1.0
