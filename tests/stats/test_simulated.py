"""Intervals hold the truth as often as they say, and equal methods are rarely told apart.

Tolerances are three standard errors of the simulation, on the safe side of what is promised;
benchmarks/statistics/simulated_intervals.py does the same at full size.
"""

from __future__ import annotations

import math

import pytest

from specbench_cli.stats.simulated import Setting, coverage, false_differences

REPLICATIONS = 700


def _error(rate: float, replications: int) -> float:
    return math.sqrt(rate * (1 - rate) / replications)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("questions", "families"), [(20, 5), (48, 6)])
def test_intervals_cover_93_to_97_percent_at_sigma_one_half(questions, families, passes):
    setting = Setting(questions=questions, families=families, passes=passes, process_spread=0.01)
    found = coverage(setting, REPLICATIONS, resamples=199)
    slack = 3 * _error(0.95, REPLICATIONS)
    assert 0.93 - slack <= found <= 0.97 + slack


@pytest.mark.parametrize(("questions", "families"), [(20, 5), (48, 6)])
def test_intervals_cover_90_percent_at_sigma_one(questions, families):
    setting = Setting(questions=questions, families=families, spread=1.0)
    found = coverage(setting, REPLICATIONS, resamples=199)
    assert found >= 0.90 - 3 * _error(0.90, REPLICATIONS)


def test_twelve_equal_methods_are_rarely_told_apart_though_some_pair_alone_mostly_would_be():
    setting = Setting(spread=0.1, common=0.25)
    together, alone = false_differences(setting, 12, 100, resamples=199)
    assert together <= 0.05 + 3 * _error(0.05, 100)
    assert alone == pytest.approx(0.74, abs=3 * _error(0.74, 100))
