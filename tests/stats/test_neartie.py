"""Tests of the p-value of a number of near-ties, and of its bound for correct programs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from specbench_cli.stats.neartie import LEVEL, chance_of_any, upper_tail


@given(st.integers(0, 40), st.integers(0, 42), st.floats(0, 1))
def test_equal_probabilities_give_the_binomial_tail(n, found, chance):
    assert upper_tail(found, [chance] * n) == pytest.approx(binom.sf(found - 1, n, chance))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 8))
def test_unequal_probabilities_give_the_enumerated_tail(chances, found):
    outcomes = np.array(np.meshgrid(*[[0, 1]] * len(chances))).reshape(len(chances), -1)
    p = np.array(chances)[:, None]
    weights = np.where(outcomes == 1, p, 1 - p).prod(0)
    assert upper_tail(found, chances) == pytest.approx(weights[outcomes.sum(0) >= found].sum())


def test_no_near_tie_has_p_1():
    assert upper_tail(0, []) == 1.0
    assert upper_tail(0, [0.1, 0.2]) == 1.0


def test_a_near_tie_with_probability_0_has_p_0():
    assert upper_tail(1, []) == 0.0
    assert upper_tail(1, [0.0] * 10) == 0.0


def test_a_probability_above_1_is_rejected():
    with pytest.raises(ValueError, match="between 0 and 1"):
        upper_tail(1, [1.5])


def test_at_least_one_of_several_ties():
    assert chance_of_any([]) == 0.0
    assert chance_of_any([0.5, 0.5]) == 0.75


@pytest.mark.parametrize("distribution", ["uniform", "normal", "spike"])
def test_correct_programs_are_not_rejected(distribution):
    """Two programs with symmetric, unimodal rounding errors of at most the tolerance."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(300):
        gaps = rng.uniform(0, 5, size=400)
        errors = {
            "uniform": rng.uniform(-1, 1, 400),
            "normal": rng.normal(0, 0.3, 400).clip(-1, 1),
            "spike": np.where(rng.random(400) < 0.5, 0.0, rng.uniform(-1, 1, 400)),
        }[distribution]
        found = int((errors > gaps).sum())
        alarms += upper_tail(found, ((1 - gaps.clip(0, 1)) / 2).tolist()) < LEVEL
    assert alarms <= 2


def test_a_program_that_loses_every_tie_is_rejected():
    gaps = np.linspace(0, 1, 30)
    assert upper_tail(30, ((1 - gaps) / 2).tolist()) < LEVEL
