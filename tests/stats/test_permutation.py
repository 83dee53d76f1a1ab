"""Tests of the paired permutation test: exact p-values, its level, and its power."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.stats.permutation import SignFlipTest, run_sign_flip_test


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=8))
def test_few_clusters_have_an_exact_p_value(values):
    found = run_sign_flip_test([[float(value)] for value in values])
    signs = itertools.product((-1, 1), repeat=len(values))
    sums = [abs(sum(s * v for s, v in zip(sign, values, strict=True))) for sign in signs]
    p = np.mean([total >= abs(sum(values)) for total in sums])
    assert found == SignFlipTest(pytest.approx(np.mean(values)), pytest.approx(p), len(values))


def test_no_difference_at_all_has_p_1():
    assert run_sign_flip_test([[0.0]] * 40) == SignFlipTest(0.0, 1.0, 40)


def test_no_pairs_give_none():
    assert run_sign_flip_test([]) is None
    assert run_sign_flip_test([[], []]) is None


def test_differences_of_a_cluster_change_sign_together():
    """Five equal differences in one cluster have the p-value of a single difference."""
    assert run_sign_flip_test([[1.0] * 5]) == SignFlipTest(1.0, 1.0, 1)


def test_the_sampled_test_has_its_level():
    rng = np.random.default_rng(3)
    rejected = [
        run_sign_flip_test(rng.normal(size=(20, 1)).tolist(), draws=499, seed=i).p <= 0.05
        for i in range(400)
    ]
    assert 6 <= sum(rejected) <= 36  # 99.9% of Binomial(400, 0.05)


def test_a_shift_has_a_small_p_value():
    shifted = np.random.default_rng(3).normal(1.0, 1.0, size=(30, 1))
    found = run_sign_flip_test(shifted.tolist())
    assert found.p < 0.001
    assert found.difference == pytest.approx(shifted.mean())


def test_the_same_seed_gives_the_same_p():
    values = np.random.default_rng(5).normal(0.3, 1.0, size=(30, 1)).tolist()
    assert run_sign_flip_test(values) == run_sign_flip_test(values)
