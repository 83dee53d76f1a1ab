"""Tests of the statistics of the timing gate, which compares the times of two sides.

benchmarks/statistics/false_alarms.py does the simulation at full size.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.statistics.false_alarms import (
    BAD,
    QUIET,
    ComparisonSize,
    find_slowdowns,
    simulate_comparison,
)
from specbench_cli.stats.regression import (
    MIN_PAIRS,
    MIN_PROMPTS,
    RegressionSeries,
    estimate_slowdowns,
)

REPLICATIONS = 30


def make_series(change, *, prompts=12, processes=1, noise=0.01, seed=0, figure="decode", apart=0.0):
    """Return simulated times of two sides, with large differences between prompts."""
    rng = np.random.default_rng(seed)
    new = np.arange(2 * processes) >= processes
    values = rng.normal(0, 1, (prompts, 1)) + rng.normal(0, noise, (prompts, len(new)))
    return RegressionSeries(figure, values + math.log(change) * new, new, apart)


def estimate_one(one, **options):
    (found,) = estimate_slowdowns([one], **options)
    return found


def test_change_is_found_despite_larger_differences_between_prompts():
    found = estimate_one(make_series(1.08))
    assert found.log_ratio == pytest.approx(math.log(1.08), abs=0.01)
    assert found.significant
    assert found.low > 0


def test_faster_side_has_a_negative_change():
    found = estimate_one(make_series(0.9))
    assert found.significant
    assert found.high < 0


def test_equal_sides_have_a_change_of_zero():
    found = estimate_one(make_series(1.0, noise=0.0))
    assert found.log_ratio == pytest.approx(0)
    assert not found.significant
    assert 0 < found.detectable < 0.1


def test_one_outlier_is_no_change():
    one = make_series(1.0)
    one.values[3, 1] += 1.0
    assert abs(estimate_one(one).log_ratio) < 0.02


def test_missing_prompts_do_not_change_the_estimate():
    one = make_series(1.08, prompts=12, processes=3)
    one.values[:4, 0] = one.values[6:, 5] = np.nan
    assert estimate_one(one).log_ratio == pytest.approx(math.log(1.08), abs=0.015)


@pytest.mark.parametrize("prompts", [0, MIN_PROMPTS - 1])
def test_too_few_common_prompts_give_no_estimate(prompts):
    one = make_series(1.5)
    one.values[prompts:, 1] = np.nan
    assert estimate_one(one) is None


def test_side_without_a_process_gives_no_estimate():
    one = make_series(1.5)
    assert estimate_one(RegressionSeries(one.figure, one.values[:, :1], one.is_new[:1])) is None
    assert estimate_slowdowns([]) == []


def test_series_without_an_estimate_keeps_the_order_of_the_others():
    lost = make_series(1.0)
    lost.values[:] = np.nan
    first, none, last = estimate_slowdowns([make_series(1.08), lost, make_series(1.0, seed=1)])
    assert none is None
    assert first.significant
    assert not last.significant


def test_more_comparisons_widen_the_interval():
    alone = estimate_one(make_series(1.0))
    many = estimate_slowdowns(
        [make_series(1.0), *(make_series(1.0, seed=i, figure=i) for i in range(1, 30))]
    )
    assert many[0].high - many[0].low > alone.high - alone.low


def test_different_machine_speed_lowers_significance():
    assert estimate_one(make_series(1.08)).significant
    assert not estimate_one(make_series(1.08, apart=0.3)).significant


def test_processes_that_differ_widen_the_interval():
    calm = make_series(1.0, processes=5)
    wild = RegressionSeries(calm.figure, calm.values + np.tile([-0.05, 0.05], 5), calm.is_new)
    assert estimate_one(wild).detectable > 1.5 * estimate_one(calm).detectable


def test_more_processes_detect_smaller_changes():
    assert (
        estimate_one(make_series(1.0, processes=5)).detectable
        < 0.7 * estimate_one(make_series(1.0)).detectable
    )


def test_detectable_change_is_at_least_the_tolerance():
    found = estimate_one(make_series(1.0), tolerance=math.log(1.3))
    assert found.detectable > math.log(1.3)


def test_low_noise_of_few_prompts_does_not_narrow_the_interval():
    rows = [make_series(1.0, prompts=3, noise=0.1, seed=i) for i in range(8)]
    lucky = RegressionSeries("decode", np.tile([0.0, 0.1], (3, 1)), rows[0].is_new)
    assert not estimate_slowdowns([lucky, *rows])[0].significant


def make_paired_series(change, *, pairs=8, phases=0.5, each=0.02, seed=0, disturbed=False):
    """Return simulated times of pairs of processes, with large differences between pairs."""
    rng = np.random.default_rng(seed)
    new, pair = np.tile([False, True], pairs), np.repeat(np.arange(pairs), 2)
    process = np.repeat(rng.normal(0, phases, pairs), 2) + rng.normal(0, each, 2 * pairs)
    values = rng.normal(0, 1, (7, 1)) + rng.normal(0, 0.01, (7, 2 * pairs))
    values = values + process + math.log(change) * new
    return RegressionSeries("draft forward", values, new, 0.0, pair, disturbed)


@pytest.mark.parametrize("disturbed", [False, True])
def test_pairs_find_a_change_hidden_by_slow_phases(disturbed):
    one = make_paired_series(1.08, disturbed=disturbed)
    found, blind = estimate_one(one), estimate_one(replace(one, pair=None))
    assert found.log_ratio == pytest.approx(math.log(1.08), abs=0.025)
    assert found.significant and not blind.significant
    assert not estimate_one(make_paired_series(1.0, disturbed=disturbed)).significant


def test_scatter_between_pairs_widens_the_interval():
    assert (
        estimate_one(make_paired_series(1.0, each=0.1)).detectable
        > 2 * estimate_one(make_paired_series(1.0)).detectable - 1
    )


def test_few_pairs_that_agree_by_chance_are_not_significant():
    """Processes may differ by more than their outputs within a process suggest."""
    found = [
        estimate_one(make_paired_series(1.0, pairs=MIN_PAIRS, each=0.05, seed=seed))
        for seed in range(200)
    ]
    assert sum(one.significant for one in found) <= 4


def test_unpaired_process_is_left_out():
    one = make_paired_series(1.0)
    one.values[:, 3] = np.nan
    one.values[:, 2] += 5.0
    assert abs(estimate_one(one).log_ratio) < 0.05


def test_too_few_pairs_give_no_estimate():
    one = make_paired_series(1.5, pairs=MIN_PAIRS + 1)
    one.values[:, [1, 3]] = np.nan
    assert estimate_one(one) is None


@pytest.mark.parametrize("machine", [QUIET, BAD])
def test_equal_programs_rarely_raise_an_alarm(machine):
    rng = np.random.default_rng(5)
    assert not any(
        find_slowdowns(simulate_comparison(machine, ComparisonSize(), rng))
        for _ in range(REPLICATIONS)
    )


def test_draft_eight_percent_slower_is_found_on_a_quiet_machine():
    rng = np.random.default_rng(6)
    found = [
        find_slowdowns(simulate_comparison(QUIET, ComparisonSize(), rng, draft=1.08))
        for _ in range(REPLICATIONS)
    ]
    hit = sum(any(figure == "draft forward" for figure, _ in one) for one in found)
    assert hit >= 0.85 * REPLICATIONS
    assert not any(row >= ComparisonSize().drafting for one in found for _, row in one)


def test_method_eight_percent_slower_is_found_with_three_processes():
    rng = np.random.default_rng(7)
    size = ComparisonSize(prompts=12, processes=3)
    found = [find_slowdowns(simulate_comparison(QUIET, size, rng, method=1.08)) for _ in range(15)]
    assert sum(any(row == 0 for _, row in one) for one in found) >= 13
