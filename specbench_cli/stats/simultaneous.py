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

from specbench_cli.stats.bootstrap import LEVEL, MAX_UNDEFINED, BootstrapResult, Floats, studentize

_CHUNK = 64
"""Resamples whose pairs are compared at a time: as many as the cache holds."""


def find_different_pairs(
    bootstrap: BootstrapResult, level: float = LEVEL, methods: Sequence[int] | None = None
) -> NDArray[np.bool_]:
    """Which pairs of k methods differ at a simultaneous `level`: [k, k], symmetric, the diagonal
    False.

    One question alone proves no difference, nor do passes too incomplete to resample.

    Args:
        methods: those that are compared, in this order; None for all.
    """
    compared = np.arange(len(bootstrap.theta)) if methods is None else np.array(methods, np.intp)
    result = np.zeros((len(compared), len(compared)), dtype=bool)
    limit = critical_value(bootstrap, level, compared)
    if limit is None:
        return result
    first, second = np.triu_indices(len(compared), 1)
    a, b = compared[first], compared[second]
    delta = bootstrap.theta[a] - bootstrap.theta[b]
    significant = np.abs(studentize(delta, standard_error(bootstrap.cov, a, b))) > limit
    result[first, second] = result[second, first] = significant
    return result


def critical_value(
    bootstrap: BootstrapResult, level: float = LEVEL, methods: NDArray[np.intp] | None = None
) -> float | None:
    """The studentized difference beyond which a pair differs; None where nothing is proved."""
    compared = np.arange(len(bootstrap.theta)) if methods is None else methods
    if bootstrap.clusters < 2 or len(compared) < 2:
        return None
    a, b = (compared[each] for each in np.triu_indices(len(compared), 1))
    delta = bootstrap.theta[a] - bootstrap.theta[b]
    largest = np.empty(len(bootstrap.theta_star))
    for start in range(0, len(largest), _CHUNK):
        part = slice(start, start + _CHUNK)
        theta = bootstrap.theta_star[part]
        spread = standard_error(bootstrap.cov_star[part], a, b)
        t = np.abs(studentize(theta[:, a] - theta[:, b] - delta, spread))
        largest[part] = t.max(axis=1)
    undefined = np.isnan(largest)
    if undefined.mean() > MAX_UNDEFINED:
        return None
    return float(np.quantile(largest[~undefined], level, method="inverted_cdf"))


def group_letters(differ: NDArray[np.bool_], order: Sequence[int]) -> list[str]:
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
        groups = _absorb_subsets(split)
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


def _absorb_subsets(groups: list[frozenset[int]]) -> list[frozenset[int]]:
    """The groups that are no part of another, each once."""
    distinct = list(dict.fromkeys(groups))
    return [g for g in distinct if not any(g < other for other in distinct)]


def _letter(index: int) -> str:
    alphabet = ascii_uppercase + ascii_lowercase
    return alphabet[index % len(alphabet)] + "'" * (index // len(alphabet))
