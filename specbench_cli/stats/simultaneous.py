"""Significance groups of methods: which pairs differ, for all pairs at once.

A max-t bootstrap on the log speedups bounds the probability of any false difference among all pairs
(Westfall & Young, "Resampling-Based Multiple Testing", 1993, section 2.5, single step). The groups
are shown as letters: methods with a common letter do not differ significantly. The letters are
assigned by insert-and-absorb (Piepho, "An algorithm for a letter-based representation of
all-pairwise comparisons", J. Comput. Graph. Stat. 13, 2004).
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

import numpy as np
from numpy.typing import NDArray

from specbench_cli.stats.bootstrap import LEVEL, MAX_UNDEFINED, BootstrapResult, Floats, studentize

_CHUNK = 64
"""Number of resamples compared at a time, so that they fit in the cache."""


def find_different_pairs(
    bootstrap: BootstrapResult, level: float = LEVEL, methods: Sequence[int] | None = None
) -> NDArray[np.bool_]:
    """Return which pairs of k methods differ significantly, at a simultaneous confidence level.

    The result [k, k] is symmetric with a False diagonal. It is all False if there is only one
    question, or if too many resamples have no result of some method.

    Args:
        methods: Indices of the methods to compare, in this order. None means all methods.
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
    """Return the studentized difference above which a pair differs significantly.

    Return None if no pair can differ.
    """
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
    """Return the letters of the significance groups of each of k methods.

    Args:
        differ: [k, k], True for pairs that differ.
        order: Indices of the methods, best first. The group of the best method is "A".
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
    """Return the standard errors of the differences between methods a and b.

    Args:
        cov: [..., k, k], covariances of the methods' log speedups.
        a, b: Indices of the methods of each difference.
    """
    variance = cov[..., a, a] + cov[..., b, b] - 2 * cov[..., a, b]
    return np.sqrt(np.maximum(variance, 0.0))


def _absorb_subsets(groups: list[frozenset[int]]) -> list[frozenset[int]]:
    """Return the distinct groups that are not a subset of another group."""
    distinct = list(dict.fromkeys(groups))
    return [g for g in distinct if not any(g < other for other in distinct)]


def _letter(index: int) -> str:
    alphabet = ascii_uppercase + ascii_lowercase
    return alphabet[index % len(alphabet)] + "'" * (index // len(alphabet))
