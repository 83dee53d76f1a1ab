"""Which of several methods really differ: all pairs at once, told as letter groups.

One max-t bootstrap on the log speedups holds the family-wise error of all pairwise comparisons
(Westfall & Young, "Resampling-Based Multiple Testing", 1993, section 2.5; single step). Letters by
insert-and-absorb (Piepho, "An algorithm for a letter-based representation of all-pairwise
comparisons", J. Comput. Graph. Stat. 13, 2004): same letter = no significant difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

import numpy as np
from numpy.typing import NDArray

from specbench_cli.stats.bootstrap import LEVEL, MAX_LOST, Floats, Resampled, studentized


def different(drawn: Resampled, level: float = LEVEL) -> NDArray[np.bool_]:
    """Which pairs differ at a simultaneous `level`: [k, k], symmetric, the diagonal False.

    One question alone proves no difference, nor do passes too incomplete to resample.
    """
    k = len(drawn.theta)
    result = np.zeros((k, k), dtype=bool)
    limit = critical(drawn, level)
    if limit is None:
        return result
    a, b = np.triu_indices(k, 1)
    delta = drawn.theta[a] - drawn.theta[b]
    significant = np.abs(studentized(delta, standard_error(drawn.cov, a, b))) > limit
    result[a, b] = result[b, a] = significant
    return result


def critical(drawn: Resampled, level: float = LEVEL) -> float | None:
    """The studentized difference beyond which a pair differs; None where nothing is proved."""
    k = len(drawn.theta)
    if drawn.clusters < 2 or k < 2:
        return None
    a, b = np.triu_indices(k, 1)
    delta = drawn.theta[a] - drawn.theta[b]
    delta_star = drawn.theta_star[:, a] - drawn.theta_star[:, b]
    t_star = np.abs(studentized(delta_star - delta, standard_error(drawn.cov_star, a, b)))
    largest = t_star.max(axis=1)
    lost = np.isnan(largest)
    if lost.mean() > MAX_LOST:
        return None
    return float(np.quantile(largest[~lost], level, method="inverted_cdf"))


def letters(differ: NDArray[np.bool_], order: Sequence[int]) -> list[str]:
    """The letters of each of k methods.

    Args:
        differ: [k, k], which pairs differ.
        order: the methods, best first; "A" goes to the best one's group.
    """
    groups = [frozenset(range(len(differ)))]
    for a, b in zip(*np.nonzero(np.triu(differ)), strict=True):
        split: list[frozenset[int]] = []
        for group in groups:
            split += [group - {a}, group - {b}] if {a, b} <= group else [group]
        groups = _absorbed(split)
    rank = {method: place for place, method in enumerate(order)}
    groups.sort(key=lambda group: sorted(rank[method] for method in group))
    return [
        "".join(_letter(i) for i, group in enumerate(groups) if method in group)
        for method in range(len(differ))
    ]


def standard_error(cov: Floats, a: NDArray[np.intp], b: NDArray[np.intp]) -> Floats:
    """Standard errors of the differences a - b, over the last two axes of `cov`."""
    variance = cov[..., a, a] + cov[..., b, b] - 2 * cov[..., a, b]
    return np.sqrt(np.maximum(variance, 0.0))


def _absorbed(groups: list[frozenset[int]]) -> list[frozenset[int]]:
    """The groups that are no part of another, each once."""
    distinct = list(dict.fromkeys(groups))
    return [g for g in distinct if not any(g < other for other in distinct)]


def _letter(index: int) -> str:
    alphabet = ascii_uppercase + ascii_lowercase
    return alphabet[index % len(alphabet)] + "'" * (index // len(alphabet))
