"""The timing gate's statistics: what they find, what they leave alone.

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
from specbench_cli.stats.regression import MIN_PAIRS, MIN_PROMPTS, Series, shifts

REPLICATIONS = 30


def series(change, *, prompts=12, processes=1, noise=0.01, seed=0, figure="decode", apart=0.0):
    """Prompts that differ by far more than anything else."""
    rng = np.random.default_rng(seed)
    new = np.arange(2 * processes) >= processes
    values = rng.normal(0, 1, (prompts, 1)) + rng.normal(0, noise, (prompts, len(new)))
    return Series(figure, values + math.log(change) * new, new, apart)


def only(one, **how):
    (found,) = shifts([one], **how)
    return found


def test_change_is_found_though_prompts_differ_by_far_more():
    found = only(series(1.08))
    assert found.change == pytest.approx(math.log(1.08), abs=0.01)
    assert found.significant
    assert found.low > 0


def test_what_became_faster_is_found_below_zero():
    found = only(series(0.9))
    assert found.significant
    assert found.high < 0


def test_sides_that_do_not_differ_at_all_differ_by_nothing():
    found = only(series(1.0, noise=0.0))
    assert found.change == pytest.approx(0)
    assert not found.significant
    assert 0 < found.detects < 0.1


def test_one_hiccup_is_no_change():
    one = series(1.0)
    one.values[3, 1] += 1.0
    assert abs(only(one).change) < 0.02


def test_missing_prompts_take_nothing_from_the_change():
    one = series(1.08, prompts=12, processes=3)
    one.values[:4, 0] = one.values[6:, 5] = np.nan
    assert only(one).change == pytest.approx(math.log(1.08), abs=0.015)


@pytest.mark.parametrize("prompts", [0, MIN_PROMPTS - 1])
def test_too_few_prompts_in_common_prove_nothing(prompts):
    one = series(1.5)
    one.values[prompts:, 1] = np.nan
    assert only(one) is None


def test_side_without_process_proves_nothing():
    one = series(1.5)
    assert only(Series(one.figure, one.values[:, :1], one.new[:1])) is None
    assert shifts([]) == []


def test_series_that_cannot_be_judged_leaves_the_others_their_places():
    lost = series(1.0)
    lost.values[:] = np.nan
    first, none, last = shifts([series(1.08), lost, series(1.0, seed=1)])
    assert none is None
    assert first.significant
    assert not last.significant


def test_more_comparisons_ask_for_more():
    alone = only(series(1.0))
    many = shifts([series(1.0), *(series(1.0, seed=i, figure=i) for i in range(1, 30))])
    assert many[0].high - many[0].low > alone.high - alone.low


def test_machine_of_another_speed_is_believed_less():
    assert only(series(1.08)).significant
    assert not only(series(1.08, apart=0.3)).significant


def test_processes_that_differ_widen_the_interval():
    calm = series(1.0, processes=5)
    wild = Series(calm.figure, calm.values + np.tile([-0.05, 0.05], 5), calm.new)
    assert only(wild).detects > 1.5 * only(calm).detects


def test_more_processes_see_smaller_changes():
    assert only(series(1.0, processes=5)).detects < 0.7 * only(series(1.0)).detects


def test_nothing_below_the_tolerance_is_promised_to_be_found():
    found = only(series(1.0), above=math.log(1.3))
    assert found.detects > math.log(1.3)


def test_calm_of_a_row_with_few_prompts_is_not_believed():
    rows = [series(1.0, prompts=3, noise=0.1, seed=i) for i in range(8)]
    lucky = Series("decode", np.tile([0.0, 0.1], (3, 1)), rows[0].new)
    assert not shifts([lucky, *rows])[0].significant


def in_turn(change, *, pairs=8, phases=0.5, each=0.02, seed=0, disturbed=False):
    """Pairs of processes in phases of the machine that are far apart."""
    rng = np.random.default_rng(seed)
    new, pair = np.tile([False, True], pairs), np.repeat(np.arange(pairs), 2)
    process = np.repeat(rng.normal(0, phases, pairs), 2) + rng.normal(0, each, 2 * pairs)
    values = rng.normal(0, 1, (7, 1)) + rng.normal(0, 0.01, (7, 2 * pairs))
    values = values + process + math.log(change) * new
    return Series("draft forward", values, new, 0.0, pair, disturbed)


@pytest.mark.parametrize("disturbed", [False, True])
def test_pairs_see_through_phases_that_hide_a_change_from_two_sides(disturbed):
    one = in_turn(1.08, disturbed=disturbed)
    found, blind = only(one), only(replace(one, pair=None))
    assert found.change == pytest.approx(math.log(1.08), abs=0.025)
    assert found.significant and not blind.significant
    assert not only(in_turn(1.0, disturbed=disturbed)).significant


def test_pairs_that_scatter_are_believed_less():
    assert only(in_turn(1.0, each=0.1)).detects > 2 * only(in_turn(1.0)).detects - 1


def test_few_pairs_that_agree_by_chance_are_not_believed():
    """Processes that differ though their outputs repeat well: 0.4% is promised."""
    found = [only(in_turn(1.0, pairs=MIN_PAIRS, each=0.05, seed=seed)) for seed in range(200)]
    assert sum(one.significant for one in found) <= 4


def test_process_that_lost_its_partner_is_left_out():
    one = in_turn(1.0)
    one.values[:, 3] = np.nan
    one.values[:, 2] += 5.0
    assert abs(only(one).change) < 0.05


def test_fewer_pairs_than_that_prove_nothing():
    one = in_turn(1.5, pairs=MIN_PAIRS + 1)
    one.values[:, [1, 3]] = np.nan
    assert only(one) is None


@pytest.mark.parametrize("machine", [QUIET, BAD])
def test_same_program_raises_no_alarm(machine):
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
