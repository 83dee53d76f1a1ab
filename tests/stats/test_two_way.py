"""Tests of estimating the speed level of each process from noisy times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.stats.two_way import fit_lower_envelope, fit_two_way

LEVELS = np.array([0.0, 0.08, 0.3, -0.1])


def make_disturbed(seed, prompts=7, levels=LEVELS, mean=0.1):
    """Return times with exponentially distributed delays."""
    rng = np.random.default_rng(seed)
    shape = prompts, len(levels)
    return rng.normal(0, 1, (prompts, 1)) + levels + rng.exponential(mean, shape)


def largest_error(levels):
    return np.abs(levels - levels[0] - LEVELS).max()


@pytest.mark.parametrize("fit", [fit_lower_envelope, lambda values: fit_two_way(values).levels])
def test_levels_without_noise_are_found_exactly(fit):
    values = make_disturbed(1, mean=0)
    values[2, 1] = values[5, 3] = np.nan
    assert largest_error(fit(values)) == pytest.approx(0, abs=1e-9)


def test_lower_envelope_is_better_for_times_with_delays():
    levels = np.tile(LEVELS, 4)
    errors = []
    for seed in range(30):
        values = make_disturbed(seed, levels=levels)
        fits = fit_lower_envelope(values), fit_two_way(values).levels
        errors.append([np.std(found - levels) for found in fits])
    ours, others = np.mean(errors, axis=0)
    assert ours < 0.75 * others


def test_two_processes_differ_by_the_median_over_prompts():
    values = make_disturbed(3, levels=LEVELS[:2])
    assert fit_lower_envelope(values)[1] == pytest.approx(np.median(values[:, 1] - values[:, 0]))


@given(st.integers(0, 1000), st.floats(-1, 1), st.integers(0, 3))
def test_shifting_a_process_shifts_its_level_and_no_other(seed, by, process):
    values = make_disturbed(seed)
    moved = values + by * (np.arange(4) == process)
    was, now = fit_lower_envelope(values), fit_lower_envelope(moved)
    was, now = was - was.mean(), now - now.mean()
    expected = was + by * (np.arange(4) == process) - by / 4
    assert np.abs(now - expected).max() < 1e-6
