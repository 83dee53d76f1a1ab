"""Mean difference of paired scores, with an interval for clustered pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """A mean difference of paired scores and its 95% interval.

    With one cluster of pairs there is no interval.
    """

    mean: float
    low: float | None
    high: float | None


def mean_difference(
    differences: Sequence[float],
    clusters: Sequence[str],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> MeanDifference:
    """Return the mean difference with a cluster bootstrap-t interval.

    The method is that of Cameron, Gelbach and Miller, 2008.

    The standard error is that of a linearised ratio of sums, because clusters differ in size.

    Args:
        differences: Difference of each pair, at least one.
        clusters: Cluster of each pair. Pairs of one cluster are not independent.
    """
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(differences, float))
    sizes = np.bincount(index).astype(float)
    mean, error = _mean_and_error(sums, sizes)
    if len(names) < 2:
        return MeanDifference(float(mean), None, None)
    drawn = np.random.default_rng(seed).integers(0, len(names), (resamples, len(names)))
    means, errors = _mean_and_error(sums[drawn], sizes[drawn])
    varying = errors > 0
    if (
        not error > 0 or not varying.any()
    ):  # all clusters have the same mean, so resamples do not vary
        return MeanDifference(float(mean), float(mean), float(mean))
    t = (means[varying] - mean) / errors[varying]
    low, high = mean - np.quantile(t, [0.975, 0.025]) * error
    return MeanDifference(float(mean), float(low), float(high))


def _mean_and_error(sums: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and its standard error from the sums and sizes of clusters (last axis)."""
    n_clusters, total = sums.shape[-1], sizes.sum(-1)
    mean = sums.sum(-1) / total
    rest = ((sums - mean[..., None] * sizes) ** 2).sum(-1)
    return mean, np.sqrt(rest * n_clusters / max(1, n_clusters - 1)) / total
