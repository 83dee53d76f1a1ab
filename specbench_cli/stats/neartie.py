"""Whether there are more near-ties than rounding makes.

Where the two best tokens score alike up to rounding, two honest programs choose alike or not, and
an output that chooses otherwise is a near-tie. How often that can happen is known from vanilla's
own gaps: with errors that are symmetric, unimodal and within a reach, a rival that lacks `gap` of
the chosen token overtakes it with a chance of at most (1 - gap / reach) / 2, whatever the errors'
distribution (they are a mixture of uniform ones: A. Ya. Khinchin, 1938). The reach is twice the
tolerance, because the gaps themselves are rounded, and in half precision lie on a coarse grid. An
output has at most one near-tie, so its chance is 1 - prod(1 - chance) over its positions, and the
number of near-ties is a sum of independent trials of unequal chances (Poisson-binomial).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

LEVEL = 1e-3
"""Near-ties of so small an upper tail are no rounding."""


def chance_of_any(chances: Iterable[float]) -> float:
    """The chance that one of several independent trials succeeds."""
    return float(1.0 - np.prod(1.0 - np.fromiter(chances, dtype=np.float64)))


def upper_tail(successes: int, chances: Sequence[float]) -> float:
    """The chance of at least `found` successes in independent trials of these chances.

    Exact, by adding one trial after the other.

    Raises:
        ValueError: a chance outside 0..1.
    """
    if any(not 0 <= chance <= 1 for chance in chances):
        raise ValueError("a chance is a number between 0 and 1")
    if successes > len(chances):
        return 0.0
    distribution = np.ones(1)  # distribution[k]: the chance of k successes so far
    for chance in chances:
        distribution = np.append(distribution * (1 - chance), 0.0) + np.append(
            0.0, distribution * chance
        )
    return float(min(1.0, distribution[successes:].sum()))
