"""Tests of the upper bound on a failure rate."""

from __future__ import annotations

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.stats.failure_rate import upper_bound


def test_zero_failures_of_48_and_480_have_the_known_bounds():
    assert f"{upper_bound(0, 48):.1%}" == "6.1%"
    assert f"{upper_bound(0, 480):.2%}" == "0.62%"


@given(st.integers(1, 500), st.data())
def test_bound_is_the_clopper_pearson_bound(trials, data):
    failures = data.draw(st.integers(0, trials - 1))
    bound = upper_bound(failures, trials)
    assert scipy.stats.binom.cdf(failures, trials, bound) == pytest.approx(0.05, rel=1e-6)


def test_bound_is_1_without_trials_or_with_only_failures():
    assert upper_bound(0, 0) == upper_bound(7, 7) == 1.0


def test_impossible_counts_are_rejected():
    with pytest.raises(ValueError, match="5 failures of 4 trials"):
        upper_bound(5, 4)
