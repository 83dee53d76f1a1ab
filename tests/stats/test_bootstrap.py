"""Tests of bootstrap-t intervals of speedups, and of the reasons why an interval is missing."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specbench_cli.stats.bootstrap import PairedTimes, RatioEstimate, estimate_speedups, resample


def _interval(baseline, method, strata=None, **options) -> RatioEstimate:
    baseline, method = np.atleast_2d(baseline), np.atleast_2d(method)
    if strata is None:
        strata = np.zeros(baseline.shape[1], dtype=int)
    return estimate_speedups(
        resample(PairedTimes(baseline[None], method[None], strata), **options)
    )[0]


def _lognormal_pair(rng, n: int) -> tuple[np.ndarray, np.ndarray]:
    baseline = rng.lognormal(0, 0.5, n)
    return baseline, baseline / 1.3 * rng.lognormal(0, 0.15, n)


def test_speedup_is_ratio_of_sums():
    estimate = _interval([3.0, 5.0, 4.0, 8.0], [2.0, 2.0, 3.0, 3.0])
    assert estimate.ratio == pytest.approx(2.0)


def test_unequal_processes_widen_the_interval():
    rng = np.random.default_rng(3)
    baseline, method = _lognormal_pair(rng, 48)
    steady = np.repeat(method[None], 5, 0)
    drifting = steady * np.array([0.85, 0.95, 1.0, 1.05, 1.15])[:, None]
    baseline = np.repeat(baseline[None], 5, 0)
    narrow, wide = _interval(baseline, steady), _interval(baseline, drifting)
    assert np.log(wide.high / wide.low) > 1.5 * np.log(narrow.high / narrow.low)


def test_agrees_with_scipy_on_one_plain_stratum():
    baseline, method = _lognormal_pair(np.random.default_rng(4), 80)
    ours = _interval(baseline, method)
    theirs = scipy.stats.bootstrap(
        (baseline, method),
        lambda x, y, axis: np.log(x.sum(axis) / y.sum(axis)),
        paired=True,
        method="BCa",
        rng=np.random.default_rng(5),
    )
    low, high = np.exp(theirs.confidence_interval)
    assert ours.low == pytest.approx(low, abs=0.01)
    assert ours.high == pytest.approx(high, abs=0.01)


def test_jackknife_error_agrees_with_scipy_standard_error():
    baseline, method = _lognormal_pair(np.random.default_rng(6), 200)
    times = PairedTimes(baseline[None, None], method[None, None], np.zeros(200, dtype=int))
    drawn = resample(times, resamples=10)
    theirs = scipy.stats.bootstrap(
        (baseline, method),
        lambda x, y, axis: np.log(x.sum(axis) / y.sum(axis)),
        paired=True,
        method="percentile",
        rng=np.random.default_rng(7),
    )
    assert np.sqrt(drawn.cov[0, 0]) == pytest.approx(theirs.standard_error, rel=0.05)


def test_variance_equals_the_jackknife_over_questions_and_processes():
    rng = np.random.default_rng(12)
    strata = np.repeat([0, 1], [5, 7])
    x = rng.lognormal(0, 0.5, (1, 3, 12))
    y = x * rng.lognormal(0, 0.3, (1, 3, 12))
    expected = 0.0
    for stratum in (0, 1):
        own = np.flatnonzero(strata == stratum)
        left = []
        for out in own:
            w = np.ones(12)
            w[own] = len(own) / (len(own) - 1)
            w[out] = 0
            left.append(np.log((x * w).sum() / (y * w).sum()))
        expected += (len(own) - 1) / len(own) * np.sum((left - np.mean(left)) ** 2)
    left = [np.log(np.delete(x, p, 1).sum() / np.delete(y, p, 1).sum()) for p in range(3)]
    expected += 2 / 3 * np.sum((left - np.mean(left)) ** 2)
    drawn = resample(PairedTimes(x, y, strata), resamples=1)
    assert drawn.cov[0, 0] == pytest.approx(expected)


def test_differences_between_families_do_not_widen_a_stratified_interval():
    rng = np.random.default_rng(8)
    strata = np.repeat([0, 1], 24)
    baseline = rng.lognormal(0, 0.1, 48)
    method = baseline / np.where(strata, 2.0, 1.0) * rng.lognormal(0, 0.02, 48)
    stratified, pooled = _interval(baseline, method, strata), _interval(baseline, method)
    assert np.log(stratified.high / stratified.low) < 0.5 * np.log(pooled.high / pooled.low)


def test_families_of_one_question_are_pooled():
    baseline, method = _lognormal_pair(np.random.default_rng(9), 12)
    alone, pooled = _interval(baseline, method, np.arange(12)), _interval(baseline, method)
    assert alone == pooled


def test_same_seed_gives_same_interval():
    pair = _lognormal_pair(np.random.default_rng(10), 20)
    assert _interval(*pair, seed=3) == _interval(*pair, seed=3)
    assert _interval(*pair, seed=3) != _interval(*pair, seed=4)


@pytest.mark.parametrize(
    ("baseline", "method", "reason"),
    [
        ([3.0], [2.0], "one question alone has no spread"),
        ([3.0, 6.0, 9.0], [2.0, 4.0, 6.0], "no variation between questions"),
        ([3.0, 6.0], [2.0, 5.0], "too few questions for an interval"),
    ],
)
def test_degenerate_case_has_a_ratio_and_a_reason_for_the_missing_interval(
    baseline, method, reason
):
    estimate = _interval(baseline, method)
    assert estimate.low is None
    assert estimate.high is None
    assert estimate.ratio == pytest.approx(sum(baseline) / sum(method))
    assert estimate.reason == reason


def test_incomplete_pass_gives_no_interval():
    baseline, method = (
        np.repeat(z[None], 2, 0) for z in _lognormal_pair(np.random.default_rng(11), 20)
    )
    baseline[1, 1:] = method[1, 1:] = 0
    assert _interval(baseline, method).reason == "passes too incomplete to resample"


def test_method_without_pairs_is_rejected():
    with pytest.raises(ValueError, match="at least one pair"):
        _interval([0.0, 0.0], [0.0, 0.0])


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 30), st.integers(0, 1000), st.floats(0.2, 5), st.integers(1, 6))
@example(n=4, seed=178, factor=1.0, families=1)  # a bound beyond the largest float
def test_interval_contains_the_ratio_and_scales_with_the_method(n, seed, factor, families):
    baseline, method = _lognormal_pair(np.random.default_rng(seed), n)
    strata = np.arange(n) % families
    one = _interval(baseline, method, strata, resamples=299)
    other = _interval(baseline, method / factor, strata, resamples=299)
    assert other.ratio == pytest.approx(one.ratio * factor)
    if one.low is not None and other.low is not None:
        assert other.low == pytest.approx(one.low * factor, rel=1e-6)
        assert one.low < one.high
