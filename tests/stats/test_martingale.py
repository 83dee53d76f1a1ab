"""Tests of the p-value of a likelihood's deviation: it is never too small."""

import math

import numpy as np
import pytest

from specbench_cli.stats.martingale import LEVEL, TILTS, bound_chance

DISTRIBUTION = np.array([0.7, 0.2, 0.07, 0.02, 0.01])
STEPS = np.log(DISTRIBUTION) - (DISTRIBUTION * np.log(DISTRIBUTION)).sum()
CUMULANTS = [math.log((DISTRIBUTION * np.exp(t * STEPS)).sum()) for t in TILTS]


def bound_for(total, n):
    return bound_chance(total, [n * each for each in CUMULANTS])


def test_no_deviation_has_p_1():
    assert bound_for(0.0, 100) == 1.0


@pytest.mark.parametrize("n", [5, 50, 500])
def test_false_positive_rate_is_at_most_the_level(n):
    drawn = np.random.default_rng(n).choice(STEPS, (4000, n), p=DISTRIBUTION).sum(1)
    ps = np.array([bound_for(total, n) for total in drawn])
    for level in (0.5, 0.1, 0.01):
        assert (ps <= level).mean() <= level


def test_p_value_falls_with_the_number_of_outputs_of_another_distribution():
    other = DISTRIBUTION**2 / (DISTRIBUTION**2).sum()
    each = (other * STEPS).sum()
    ps = [bound_for(n * each, n) for n in (100, 400)]
    assert ps[1] < LEVEL < ps[0] < 1
    assert bound_for(-400 * each, 400) < LEVEL


def test_p_value_is_close_to_the_normal_tail_for_many_tokens():
    n, variance = 10_000, (DISTRIBUTION * STEPS**2).sum()
    p = bound_for(8.0 * math.sqrt(n * variance), n)
    assert math.exp(-32) < p < 1e-10
