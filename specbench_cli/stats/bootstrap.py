"""Bootstrap-t intervals of speedups: paired, clustered and stratified, on the log scale.

The speedup of a method is R = X / Y, where X is the sum of vanilla's times (the baseline) and Y the
sum of the method's times. The bootstrap resamples questions (clusters) within task families
(strata). If the run was repeated in several processes (passes), the bootstrap resamples the passes,
too, independently of the questions (Owen, "The pigeonhole bootstrap", Ann. Appl. Stat. 1, 2007).

The variance of log R is a jackknife variance. The jackknife leaves out one unit after the other:
each cluster of each stratum, and each pass (Efron & Tibshirani, "An Introduction to the Bootstrap",
1993, chapter 11; strata as in Davison & Hinkley, "Bootstrap Methods and their Application", 1997,
section 3.2):

    var  = sum_s (n_s-1)/n_s sum_{c in s} (l_c - mean_s l)^2    over the strata s of n_s clusters
         + (P-1)/P sum_p (l_p - mean l)^2                       if there are P > 1 passes
    l_u  = log R without unit u, with more weight for the rest of its stratum, minus log R

If times are skewed, a variance from the delta method is often far too small. A jackknife variance
is too small less often. So its intervals cover the true value more often
(docs/explanations/statistics.md).

The interval is a bootstrap-t interval (Efron & Tibshirani, section 12.5):
log R - t(1-a/2) se <= log rho <= log R - t(a/2) se, where rho is the true speedup and se the square
root of the variance. t(q) is the q-quantile of (log R* - log R) / se* over the resamples, which
have a star.

Strata with fewer than four clusters are joined (collapsed strata: Cochran, "Sampling Techniques",
1977, section 5A.12). This can only widen intervals. If the joined stratum has fewer than four
clusters, too, the smallest other stratum is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.integer[Any]]
Blocks = tuple[tuple[int, int], ...]
"""Start and end index of each stratum. Units (clusters or passes) are sorted by stratum."""

RESAMPLES = 4999
LEVEL = 0.95
_MIN_STRATUM = 4
_ZERO_SE = 1e-9
"""Standard error of a log ratio below which its variation is only rounding."""
MAX_UNDEFINED = 0.01
"""Maximum share of resamples without a speedup, because all drawn passes lack the method."""
MAX_INTERVAL_RATIO = 100.0
"""Maximum ratio of the ends of an interval. A wider interval is not reported."""
_CHUNK = 1 << 17
"""Maximum number of array elements resampled at a time, so that they fit in the cache."""
_DRAW_BATCH = 256
"""Number of resamples drawn at a time."""


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Times of k methods and of their baseline for the same outputs.

    baseline, method: [k, passes, clusters], times in any unit, summed over the turns of a cluster.
        Both times are 0 if one of them is missing. The baseline may be one of the methods.
    strata: [clusters], number of the stratum of each cluster.
    """

    baseline: Floats
    method: Floats
    strata: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BootstrapResult:
    """Log speedups of k methods and their covariances, as observed and in B bootstrap resamples.

    theta: [k], observed log speedups.
    cov: [k, k], covariances of the observed log speedups.
    theta_star: [B, k], log speedups of the resamples.
    cov_star: [B, k, k], covariances of the log speedups of each resample.
    clusters: Number of clusters (questions).
    """

    theta: Floats
    cov: Floats
    theta_star: Floats
    cov_star: Floats
    clusters: int


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """A ratio, such as a speedup, with its confidence interval.

    reason: Why there is no interval. None if there is one.
    """

    ratio: float
    low: float | None = None
    high: float | None = None
    reason: str | None = None


def resample(times: PairedTimes, *, resamples: int = RESAMPLES, seed: int = 0) -> BootstrapResult:
    """Draw bootstrap resamples. All methods share the same resampled questions and passes.

    Raises:
        ValueError: No output has times of both a method and its baseline.
    """
    x, y = times.baseline, times.method
    if not (x.sum((1, 2)) > 0).all() or not (y.sum((1, 2)) > 0).all():
        raise ValueError("every method needs at least one pair with positive times")
    k, passes, clusters = x.shape
    strata = _pool_strata(times.strata)
    order = np.argsort(strata, kind="stable")
    x, y = (np.ascontiguousarray(z[..., order].transpose(1, 0, 2)) for z in (x, y))
    blocks = _block_bounds(np.bincount(strata))
    cluster_counts, pass_counts = _draw_counts(blocks, passes, resamples, seed)

    ones = np.ones((1, clusters)), np.ones((1, passes))
    theta, cov = _compute_log_ratios(x, y, blocks, *ones)
    theta_star, cov_star = np.empty((resamples, k)), np.empty((resamples, k, k))
    chunk = max(1, _CHUNK // (k * clusters))
    for start in range(0, resamples, chunk):
        part = slice(start, start + chunk)
        theta_star[part], cov_star[part] = _compute_log_ratios(
            x, y, blocks, cluster_counts[part].astype(float), pass_counts[part].astype(float)
        )
    return BootstrapResult(theta[0], cov[0], theta_star, cov_star, clusters)


def _block_bounds(sizes: NDArray[np.integer[Any]]) -> tuple[tuple[int, int], ...]:
    """Return the start and end index of each stratum from the sizes of the strata."""
    return tuple(pairwise([0, *np.cumsum(sizes).tolist()]))


@lru_cache(maxsize=1)
def _draw_counts(blocks: Blocks, passes: int, resamples: int, seed: int) -> tuple[Counts, Counts]:
    """Return how often each cluster [B, C] and each pass [B, P] is drawn.

    C is the number of clusters, P the number of passes, and B the number of resamples. Clusters are
    drawn within strata. The result is cached, because wall time and decode time use the same draws.
    """
    rng, n = np.random.default_rng(seed), blocks[-1][1]
    # Use a small integer type. The draws of 40,000 questions would need 1.6 GB as float64.
    clusters = np.empty((resamples, n), dtype=np.min_scalar_type(n))
    for first, end in blocks:
        size = end - first
        chances = np.full(size, 1 / size)
        for start in range(0, resamples, _DRAW_BATCH):
            some = min(_DRAW_BATCH, resamples - start)
            drawn = rng.multinomial(size, chances, size=some)
            clusters[start : start + some, first:end] = drawn
    return clusters, rng.multinomial(passes, np.full(passes, 1 / passes), size=resamples)


def estimate_speedups(bootstrap: BootstrapResult, level: float = LEVEL) -> list[RatioEstimate]:
    """Return the speedup of each method with its two-sided bootstrap-t interval."""
    return [_estimate_ratio(bootstrap, index, level) for index in range(len(bootstrap.theta))]


def _estimate_ratio(bootstrap: BootstrapResult, index: int, level: float) -> RatioEstimate:
    theta, se = bootstrap.theta[index], np.sqrt(bootstrap.cov[index, index])
    ratio = float(np.exp(theta))
    if bootstrap.clusters < 2:
        return RatioEstimate(ratio, reason="one question alone has no spread")
    if se < _ZERO_SE:
        return RatioEstimate(ratio, reason="no variation between questions")
    t = studentize(
        bootstrap.theta_star[:, index] - theta, np.sqrt(bootstrap.cov_star[:, index, index])
    )
    undefined = np.isnan(t)
    if undefined.mean() > MAX_UNDEFINED:
        return RatioEstimate(ratio, reason="passes too incomplete to resample")
    tail = (1 - level) / 2
    low, high = np.quantile(t[~undefined], [tail, 1 - tail], method="inverted_cdf")
    with np.errstate(over="ignore"):
        bounds = np.exp(theta - np.array([high, low]) * se)
    if not (np.isfinite(bounds).all() and 0 < bounds[1] <= MAX_INTERVAL_RATIO * bounds[0]):
        return RatioEstimate(ratio, reason="too few questions for an interval")
    return RatioEstimate(ratio, float(bounds[0]), float(bounds[1]))


def studentize(difference: Floats, se: Floats) -> Floats:
    """Return the studentized differences: difference / se.

    If se is 0, return 0 for a difference of 0, and infinity for other differences.
    """
    spread = se > _ZERO_SE
    t = np.divide(difference, se, out=np.zeros_like(difference), where=spread)
    no_spread = ~spread & (np.abs(difference) > _ZERO_SE)
    t[no_spread] = np.copysign(np.inf, difference[no_spread])
    t[np.isnan(difference)] = np.nan
    return t


def _compute_log_ratios(
    x: Floats, y: Floats, blocks: Blocks, clusters: Floats, passes: Floats
) -> tuple[Floats, Floats]:
    """Return log ratios [B, k] and their covariances [B, k, k] in B resamples.

    Args:
        x: [passes, k, clusters], times of the baseline.
        y: [passes, k, clusters], times of the methods.
        clusters: [B, clusters], how often each cluster is in each resample.
        passes: [B, passes], how often each pass is in each resample.
    """
    n_passes = len(x)
    xc, yc = (np.tensordot(passes, z, axes=1) for z in (x, y))
    with np.errstate(divide="ignore", invalid="ignore"):
        theta = np.log((xc @ clusters[..., None])[..., 0])
        theta -= np.log((yc @ clusters[..., None])[..., 0])
    theta[~np.isfinite(theta)] = np.nan
    cov = _compute_jackknife_covariances(xc, yc, clusters, blocks)
    if n_passes > 1:
        xp, yp = (np.moveaxis(z @ clusters.T, 2, 0).swapaxes(1, 2) for z in (x, y))
        cov += _compute_jackknife_covariances(xp, yp, passes, ((0, n_passes),))
    return theta, cov


def _compute_jackknife_covariances(x: Floats, y: Floats, counts: Floats, blocks: Blocks) -> Floats:
    """Return the jackknife covariances [B, k, k] of log ratios of sums of times.

    Args:
        x, y: [B, k, U], times of the baseline and of the methods for each of U units. A unit is a
            cluster or a pass.
        counts: [B, U], how often each unit is in each resample.
        blocks: Start and end index of each stratum of units.
    """
    sums = [
        [z[..., first:end] @ counts[:, first:end, None] for first, end in blocks] for z in (x, y)
    ]
    totals = [np.sum(of_blocks, axis=0) for of_blocks in sums]
    cov = np.zeros((*x.shape[:2], x.shape[1]))
    for (first, end), *block_sums in zip(blocks, *sums, strict=True):
        n = end - first
        w, n_others = counts[:, None, first:end], max(n - 1, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Compute log(X without unit u / X), and the same for Y. The rest of the stratum gets
            # more weight.
            log_ratios, y_ratios = (
                z[..., first:end] * (-n / n_others / total)
                for z, total in zip((x, y), totals, strict=True)
            )
            log_ratios += 1 + block_sums[0] / n_others / totals[0]
            y_ratios += 1 + block_sums[1] / n_others / totals[1]
            log_ratios /= y_ratios
            np.log(log_ratios, out=log_ratios)
            all_finite = np.isfinite(log_ratios.sum())
        if not all_finite:
            log_ratios[~np.isfinite(log_ratios)] = 0.0  # without this unit, a sum is 0
        log_ratios -= log_ratios @ w.swapaxes(1, 2) / n
        log_ratios *= np.sqrt(w * ((n - 1) / n))
        cov += log_ratios @ log_ratios.swapaxes(1, 2)
    return cov


def _pool_strata(strata: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return strata numbered from 0. Strata that are too small to resample are joined."""
    _, index, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    small = sizes < _MIN_STRATUM
    if small.any():
        if sizes[small].sum() < _MIN_STRATUM and not small.all():
            small[np.argmin(np.where(small, sizes.max() + 1, sizes))] = True
        index = np.where(small[index], len(sizes), index)
    pooled: NDArray[np.int64] = np.unique(index, return_inverse=True)[1].astype(np.int64)
    return pooled


# ---- rare questions -----------------------------------------------------------------------------
# An interval depends on the questions in the run. Suppose that one question in fifty is far slower
# than the others. A run may contain none of them, and then its interval misses the true value
# (docs/explanations/statistics.md). If a run contains some, the functions below find them.

_FENCE = 3.0
"""Distance of the outer fences from the quartiles, in interquartile ranges (Tukey: Exploratory Data
Analysis, 1977). If log speedups are normal, 1 in 400,000 questions is outside of them."""
_DECISIVE = 0.5
"""Rare questions decide a speedup if they cause at least this share of its log variance."""
_MIN_QUESTIONS = 20
"""Minimum number of questions. With fewer, quartiles are uncertain, so false alarms are common."""


@dataclass(frozen=True, slots=True)
class RareQuestions:
    """Outliers among a method's questions that cause a large share of the variance of its speedup.

    count: Number of rare questions.
    questions: Number of all questions.
    speedup_without: Speedup without the rare questions.
    """

    count: int
    questions: int
    speedup_without: float


def find_rare_questions(times: PairedTimes) -> list[RareQuestions | None]:
    """Return the rare questions of each method.

    The entry is None if a method has no rare questions, or if they cause only a small share of the
    variance of its speedup.
    """
    return [
        _find_rare_questions(*sums)
        for sums in zip(times.baseline.sum(1), times.method.sum(1), strict=True)
    ]


def _find_rare_questions(x: Floats, y: Floats) -> RareQuestions | None:
    """Return the rare questions of one method, or None.

    Args:
        x: [questions], times of the baseline.
        y: [questions], times of the method.
    """
    paired = (x > 0) & (y > 0)
    x, y = x[paired], y[paired]
    if len(x) < _MIN_QUESTIONS:
        return None
    ratios = np.log(x / y)
    low, high = np.quantile(ratios, (0.25, 0.75))
    margin = _FENCE * (high - low)
    far = (ratios < low - margin) | (ratios > high + margin)
    # By the delta method, these are the questions' contributions to the variance of the log
    # speedup.
    parts = (x / x.sum() - y / y.sum()) ** 2
    spread = parts.sum()
    if not far.any() or spread < _ZERO_SE**2 or parts[far].sum() < _DECISIVE * spread:
        return None
    return RareQuestions(int(far.sum()), len(x), float(x[~far].sum() / y[~far].sum()))
