"""Tests of the smallest speedup difference that a run detects."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.statistics.simulated_intervals import SimulationSettings
from specbench_cli.stats.bootstrap import PairedTimes, resample
from specbench_cli.stats.detectable import POWER, estimate_detectable_ratio
from specbench_cli.stats.simultaneous import find_different_pairs


def _found(speedup: float, setting: SimulationSettings, methods: int, replications: int) -> float:
    """Return how often the first method, which is faster, differs significantly from the second."""
    rng, found = np.random.default_rng(1), 0
    for _ in range(replications):
        times = setting.times(rng, methods)
        method = np.array(times.method)
        method[0] /= speedup
        drawn = resample(PairedTimes(times.baseline, method, times.strata), resamples=199)
        found += bool(find_different_pairs(drawn)[0, 1])
    return found / replications


@pytest.mark.parametrize(("questions", "families", "methods"), [(24, 6, 3), (48, 6, 5)])
def test_detectable_difference_is_found_with_the_stated_power(questions, families, methods):
    spread = 0.2
    setting = SimulationSettings(
        questions=questions,
        families=families,
        spread=spread / math.sqrt(2),
        vanilla_spread=0.0,
        common=0.3,
    )
    smallest = estimate_detectable_ratio(questions, methods, spread, families=families)
    assert _found(smallest, setting, methods, 200) == pytest.approx(POWER, abs=0.12)
    assert _found(smallest**0.5, setting, methods, 200) < 0.5


def test_more_questions_fewer_methods_and_less_spread_detect_less():
    base = estimate_detectable_ratio(48, 5, 0.25)
    assert 1 < estimate_detectable_ratio(96, 5, 0.25) < base
    assert 1 < estimate_detectable_ratio(48, 2, 0.25) < base
    assert 1 < estimate_detectable_ratio(48, 5, 0.1) < base


def test_detectable_difference_shrinks_with_the_square_root_of_questions():
    one, four = (
        estimate_detectable_ratio(200, 3, 0.25, families=6),
        estimate_detectable_ratio(800, 3, 0.25, families=6),
    )
    assert math.log(one) == pytest.approx(2 * math.log(four))


def test_nothing_is_detected_on_one_question():
    assert estimate_detectable_ratio(1, 3) is None
