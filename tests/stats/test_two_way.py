"""Levels of processes: what noise leaves of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.stats.two_way import two_way, undisturbed

LEVELS = np.array([0.0, 0.08, 0.3, -0.1])


def disturbed(seed, prompts=7, levels=LEVELS, mean=0.1):
    """Times that exponential disturbances made longer."""
    rng = np.random.default_rng(seed)
    shape = prompts, len(levels)
    return rng.normal(0, 1, (prompts, 1)) + levels + rng.exponential(mean, shape)


def error(levels):
    return np.abs(levels - levels[0] - LEVELS).max()


@pytest.mark.parametrize("fit", [undisturbed, lambda values: two_way(values).levels])
def test_levels_without_noise_are_found_exactly(fit):
    values = disturbed(1, mean=0)
    values[2, 1] = values[5, 3] = np.nan
    assert error(fit(values)) == pytest.approx(0, abs=1e-9)


def test_what_only_ever_delays_is_told_from_levels_better_by_the_undisturbed_fit():
    levels = np.tile(LEVELS, 4)
    errors = []
    for seed in range(30):
        values = disturbed(seed, levels=levels)
        fits = undisturbed(values), two_way(values).levels
        errors.append([np.std(found - levels) for found in fits])
    ours, others = np.mean(errors, axis=0)
    assert ours < 0.75 * others


def test_two_processes_differ_by_the_median_of_prompts():
    values = disturbed(3, levels=LEVELS[:2])
    assert undisturbed(values)[1] == pytest.approx(np.median(values[:, 1] - values[:, 0]))


@given(st.integers(0, 1000), st.floats(-1, 1), st.integers(0, 3))
def test_shifting_a_process_shifts_its_level_and_no_other(seed, by, process):
    values = disturbed(seed)
    moved = values + by * (np.arange(4) == process)
    was, now = undisturbed(values), undisturbed(moved)
    was, now = was - was.mean(), now - now.mean()
    expected = was + by * (np.arange(4) == process) - by / 4
    assert np.abs(now - expected).max() < 1e-6
