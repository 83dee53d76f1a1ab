"""Test for more near-ties than rounding can cause.

If the two best tokens have nearly the same score, two correct programs may choose different tokens
because of rounding. The output is then a near-tie. The gaps between the two best scores in
vanilla's outputs bound how often this can happen.

Assume that the rounding error of a gap is symmetric, unimodal and at most `reach`. Then a token
whose score is `gap` below the best one overtakes it with a probability of at most (1 - gap / reach)
/ 2, for any such distribution of errors (a mixture of uniform ones: A. Ya. Khinchin, 1938). `reach`
is twice the tolerance of the near-tie check, because the measured gaps have rounding errors, too.
Only the first near-tie of an output counts. The probability that an output has one is 1 - prod(1 -
probability) over its positions. The number of near-ties is a sum of independent trials with unequal
probabilities (Poisson-binomial distribution).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

LEVEL = 1e-3
"""Probability of so many near-ties below which rounding does not explain them."""


def chance_of_any(chances: Iterable[float]) -> float:
    """Return the probability that at least one of several independent trials succeeds."""
    return float(1.0 - np.prod(1.0 - np.fromiter(chances, dtype=np.float64)))


def upper_tail(successes: int, chances: Sequence[float]) -> float:
    """Return the probability of at least `successes` successes in independent trials.

    The result is exact: the distribution is computed by adding one trial after the other.

    Raises:
        ValueError: A probability is not between 0 and 1.
    """
    if any(not 0 <= chance <= 1 for chance in chances):
        raise ValueError("a probability must be between 0 and 1")
    if successes > len(chances):
        return 0.0
    distribution = np.ones(1)  # distribution[k]: probability of k successes so far
    for chance in chances:
        distribution = np.append(distribution * (1 - chance), 0.0) + np.append(
            0.0, distribution * chance
        )
    return float(min(1.0, distribution[successes:].sum()))
