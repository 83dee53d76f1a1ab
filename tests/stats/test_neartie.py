"""How many near-ties rounding makes: exact tails, and a bound that holds for honest programs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from specbench_cli.stats.neartie import LEVEL, chance_of_any, upper_tail


@given(st.integers(0, 40), st.integers(0, 42), st.floats(0, 1))
def test_equal_chances_give_the_binomial_tail(n, found, chance):
    assert upper_tail(found, [chance] * n) == pytest.approx(binom.sf(found - 1, n, chance))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 8))
def test_unequal_chances_agree_with_every_outcome_counted(chances, found):
    outcomes = np.array(np.meshgrid(*[[0, 1]] * len(chances))).reshape(len(chances), -1)
    p = np.array(chances)[:, None]
    weights = np.where(outcomes == 1, p, 1 - p).prod(0)
    assert upper_tail(found, chances) == pytest.approx(weights[outcomes.sum(0) >= found].sum())


def test_nothing_found_is_never_too_many():
    assert upper_tail(0, []) == 1.0
    assert upper_tail(0, [0.1, 0.2]) == 1.0


def test_a_near_tie_where_none_can_be_is_impossible():
    assert upper_tail(1, []) == 0.0
    assert upper_tail(1, [0.0] * 10) == 0.0


def test_a_chance_beyond_one_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        upper_tail(1, [1.5])


def test_one_of_several():
    assert chance_of_any([]) == 0.0
    assert chance_of_any([0.5, 0.5]) == 0.75


@pytest.mark.parametrize("distribution", ["uniform", "normal", "spike"])
def test_honest_programs_are_not_accused(distribution):
    """Two programs that round by symmetric, unimodal errors within the reach."""
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


def test_a_program_that_loses_every_tie_is_found_out():
    gaps = np.linspace(0, 1, 30)
    assert upper_tail(30, ((1 - gaps) / 2).tolist()) < LEVEL
