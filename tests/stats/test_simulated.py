"""Tests of the coverage of intervals and of the false positive rate, by simulation.

Tolerances are three standard errors of the simulation, on the safe side of what is promised;
benchmarks/statistics/simulated_intervals.py does the same at full size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.statistics.simulated_intervals import (
    SimulationSettings,
    coverage,
    coverage_details,
    false_differences,
)

REPLICATIONS = 700


def _error(rate: float, replications: int) -> float:
    return math.sqrt(rate * (1 - rate) / replications)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("questions", "families"), [(20, 5), (48, 6)])
def test_intervals_cover_93_to_97_percent_at_sigma_one_half(questions, families, passes):
    setting = SimulationSettings(
        questions=questions, families=families, passes=passes, process_spread=0.01
    )
    found = coverage(setting, REPLICATIONS, resamples=199)
    slack = 3 * _error(0.95, REPLICATIONS)
    assert 0.93 - slack <= found <= 0.97 + slack


@pytest.mark.parametrize(("questions", "families"), [(20, 5), (48, 6)])
def test_intervals_cover_90_percent_at_sigma_one(questions, families):
    setting = SimulationSettings(questions=questions, families=families, spread=1.0)
    found = coverage(setting, REPLICATIONS, resamples=199)
    assert found >= 0.90 - 3 * _error(0.90, REPLICATIONS)


RARE = 200


@pytest.mark.parametrize("spread", [0.25, 0.5])
def test_intervals_are_too_high_with_rare_slow_questions_and_most_runs_warn(spread):
    setting = SimulationSettings(questions=120, spread=spread, rare=0.02)
    found = coverage_details(setting, RARE, resamples=199)
    assert found.above > 5 * found.below
    assert found.covered / found.with_interval <= 0.85 + 3 * _error(0.85, RARE)
    met_one = 1 - 0.98**120
    assert found.warned >= 0.9 * met_one - 3 * _error(0.9 * met_one, RARE)
    assert found.covered_warned >= 0.93 - 3 * _error(0.93, RARE)
    assert found.covered_unwarned < 0.5


@pytest.mark.parametrize(
    "setting",
    [SimulationSettings(), SimulationSettings(spread=1.0), SimulationSettings(questions=20)],
)
def test_runs_without_rare_questions_rarely_warn(setting):
    assert coverage_details(setting, RARE, resamples=19).warned <= 0.02


def test_questions_slow_for_all_methods_do_not_change_intervals():
    setting = SimulationSettings(rare=0.02, rare_for_all=True)
    found = coverage_details(setting, REPLICATIONS, resamples=199)
    assert found.covered / found.with_interval >= 0.93 - 3 * _error(0.93, REPLICATIONS)


def test_twelve_equal_methods_rarely_have_a_significant_difference():
    setting = SimulationSettings(spread=0.1, common=0.25)
    together, alone = false_differences(setting, 12, 100, resamples=199)
    assert together <= 0.05 + 3 * _error(0.05, 100)
    assert alone == pytest.approx(0.74, abs=3 * _error(0.74, 100))


def test_true_speedup_of_a_setting_is_the_limit_of_many_questions():
    for setting in (
        SimulationSettings(spread=0.25, rare=0.02),
        SimulationSettings(spread=0.25, rare=0.02, rare_for_all=True),
        SimulationSettings(spread=0.25, student=4.0),
    ):
        many = replace(setting, questions=400_000, families=1)
        times = many.times(np.random.default_rng(0), 1)
        found = np.log(times.baseline.sum() / times.method.sum())
        assert found == pytest.approx(setting.log_speedup, abs=0.02)
