"""Tests of the mean of paired score differences and of its clustered interval."""

import numpy as np
import pytest

from specbench_cli.stats.difference import mean_difference


def test_the_mean_is_over_all_pairs() -> None:
    found = mean_difference([1.0, 0.0, 0.0, -1.0, 1.0], list("aabbb"))
    assert found.mean == pytest.approx(0.2)


def test_one_cluster_has_no_interval() -> None:
    found = mean_difference([1.0, 0.0], ["a", "a"])
    assert (found.low, found.high) == (None, None)


def test_equal_differences_have_an_interval_of_width_zero() -> None:
    found = mean_difference([0.5] * 6, list("aabbcc"))
    assert (found.low, found.mean, found.high) == (0.5, 0.5, 0.5)


def test_the_interval_has_95_percent_coverage() -> None:
    rng = np.random.default_rng(0)
    names = [f"cluster {i // 10}" for i in range(200)]
    hits = 0
    for trial in range(300):
        shared = np.repeat(rng.normal(0, 0.2, 20), 10)
        found = mean_difference(
            list(shared + rng.normal(0.3, 0.5, 200)), names, resamples=400, seed=trial
        )
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.3 <= found.high
    assert 0.91 <= hits / 300 <= 0.985


def test_pairs_of_one_cluster_are_not_independent() -> None:
    rng = np.random.default_rng(1)
    values = list(np.repeat(rng.normal(0, 1, 10), 20))
    clustered = mean_difference(values, [f"{i // 20}" for i in range(200)])
    alone = mean_difference(values, [f"{i}" for i in range(200)])
    assert clustered.low is not None
    assert clustered.high is not None
    assert alone.low is not None
    assert alone.high is not None
    assert clustered.high - clustered.low > 3 * (alone.high - alone.low)
