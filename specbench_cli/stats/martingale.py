"""How unlikely it is that drawn tokens are as likely, or as unlikely, as they came out.

The log-probability of each drawn token less its expectation, given the text before it, is a step of
a martingale, since every token is drawn anew; its variance and all else of it is known, because the
distribution of every token is. So for any tilt t

    M(t) = exp(t * sum of steps - sum of log E exp(t * step))

has mean 1, and so has the mean of M over some tilts. A quantity that is never negative and has mean
1 exceeds 1/a with a chance of at most a (J. Ville: Etude critique de la notion de collectif, 1939).
Nothing is assumed of the number of tokens, of their distributions, or of when outputs end. For
small steps the best tilt is z over the standard deviation, and M is exp(z^2 / 2): z is what is
shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

SMALLEST_TILT = 1 / 64
TILTS = (
    *(-SMALLEST_TILT * 2.0**k for k in range(7)),
    *(SMALLEST_TILT * 2.0**k for k in range(9)),
)
"""From 1/64, for long runs and small faults, to -1 and 4, each twice the one before."""
LEVEL = 1e-10
"""The chance, at most, that a row which draws from the target's distribution is called broken. A
row a second for a year would meet it with a chance of 0.3%."""


def bound_chance(total: float, cumulants: Sequence[float]) -> float:
    """The chance, at most, of a sum of steps as far from 0 as this one.

    Args:
        total: the sum.
        cumulants: of each of `TILTS`, the sum of log E exp(t * step).
    """
    logs = [t * total - k for t, k in zip(TILTS, cumulants, strict=True)]
    most = max(logs)
    evidence = most + log(sum(exp(each - most) for each in logs) / len(TILTS))
    return min(1.0, exp(-evidence)) if evidence > 0.0 else 1.0
