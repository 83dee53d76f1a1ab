"""Tests of finding level shifts in a series, with few false alarms."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.stats.changes import MIN_SEGMENT, find_exact_changes, find_level_shifts

SERIES = 200
NOISE = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy-tailed": lambda rng, n: rng.standard_cauchy(size=n),
    "tied": lambda rng, n: rng.integers(0, 3, size=n).astype(float),
}


@pytest.mark.parametrize("n", [6, 10, 24])
@pytest.mark.parametrize("kind", NOISE)
def test_false_alarms_stay_within_the_level(kind, n):
    rng = np.random.default_rng(n)
    n_false_alarms = sum(
        bool(find_level_shifts(NOISE[kind](rng, n), level=0.05, draws=99, seed=i))
        for i in range(SERIES)
    )
    error = (0.05 * 0.95 / SERIES) ** 0.5
    assert n_false_alarms / SERIES <= 0.05 + 3 * error


def test_a_step_is_found_with_its_position_and_levels():
    rng = np.random.default_rng(1)
    series = np.r_[rng.normal(1.40, 0.01, 12), rng.normal(1.30, 0.01, 8)]
    (found,) = find_level_shifts(series)
    assert found.index == 12
    assert found.before == pytest.approx(1.40, abs=0.01)
    assert found.after == pytest.approx(1.30, abs=0.01)
    assert found.p <= 0.01


def test_two_steps_are_two_changes_with_the_level_between_them():
    rng = np.random.default_rng(2)
    series = rng.normal(0, 0.01, 45) + np.repeat([1.0, 1.2, 1.1], 15)
    assert [found.index for found in find_level_shifts(series)] == [15, 30]
    assert (
        find_level_shifts(series)[0].after
        == find_level_shifts(series)[1].before
        == pytest.approx(1.2, abs=0.01)
    )


def test_one_outlier_neither_makes_nor_hides_a_change():
    rng = np.random.default_rng(3)
    series = rng.normal(1.4, 0.01, 24)
    series[9] = 9.0
    assert find_level_shifts(series) == []
    series[12:] -= 0.1
    assert [found.index for found in find_level_shifts(series)] == [12]


def test_a_change_of_two_sigma_in_thirty_runs_has_80_percent_power():
    rng = np.random.default_rng(4)
    found = 0
    for i in range(60):
        series = rng.normal(size=30)
        series[15:] += 2
        found += any(
            abs(s.index - 15) <= 3 for s in find_level_shifts(series, level=0.01, draws=399, seed=i)
        )
    assert found >= 48


@pytest.mark.parametrize("series", [[], [1.0], [1, 1, 1, 2, 2], [3.0] * 20])
def test_too_few_or_equal_values_have_no_changes(series):
    assert find_level_shifts(series, level=0.2) == []


def test_few_values_have_no_changes():
    assert find_level_shifts([1.0] * 4 + [2.0] * 4) == []
    assert [found.index for found in find_level_shifts([1.0] * 9 + [2.0] * 3)] == [9]


def test_a_clear_change_is_found_after_three_runs():
    rng = np.random.default_rng(5)
    series = rng.normal(1.4, 0.01, 23)
    series[20:] -= 0.1
    assert [found.index for found in find_level_shifts(series, level=0.003)] == [20]


def test_series_without_noise_changes_at_every_difference():
    found = find_exact_changes([3.0, 3.0, 4.0, 4.0, 3.5])
    assert [(s.index, s.before, s.after, s.p) for s in found] == [(2, 3, 4, 0), (4, 4, 3.5, 0)]
    assert find_exact_changes([0.1 + 0.2, 0.3]) == []
    assert find_exact_changes([]) == []


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.integers(0, 9))
def test_changes_are_ordered_and_invariant_to_scale(values, seed):
    found = find_level_shifts(values, level=0.5, draws=49, seed=seed)
    ends = [0, *(s.index for s in found), len(values)]
    assert all(b - a >= MIN_SEGMENT for a, b in pairwise(ends)) or not found
    scaled = find_level_shifts([2 * v for v in values], level=0.5, draws=49, seed=seed)
    assert [s.index for s in scaled] == [s.index for s in found]
