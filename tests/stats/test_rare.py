"""Tests of finding rare questions that decide a speedup."""

from __future__ import annotations

import numpy as np
import pytest

from specbench_cli.stats.bootstrap import PairedTimes, find_rare_questions


def make_times(baseline, method):
    x, y = (np.asarray(z, float)[None, None] for z in (baseline, method))
    return PairedTimes(x, y, np.zeros(x.shape[-1], np.int64))


def make_usual_times(questions, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.lognormal(0, 0.5, questions)
    return x, x / 2 * rng.lognormal(0, 0.1, questions)


def test_a_question_that_is_far_slower_under_the_method_is_found():
    x, y = make_usual_times(48)
    y[[3, 7]] *= 20
    (found,) = find_rare_questions(make_times(x, y))
    assert (found.count, found.questions) == (2, 48)
    rest = np.delete(np.arange(48), [3, 7])
    assert found.speedup_without == pytest.approx(x[rest].sum() / y[rest].sum())


def test_a_question_that_is_far_slower_under_the_baseline_is_found():
    x, y = make_usual_times(48)
    x[5] *= 20
    assert find_rare_questions(make_times(x, y))[0].count == 1


def test_a_long_question_with_the_usual_speedup_is_not_rare():
    x, y = make_usual_times(48)
    x[5], y[5] = 20 * x[5], 20 * y[5]
    assert find_rare_questions(make_times(x, y)) == [None]


def test_a_deviating_but_short_question_is_not_rare():
    x, y = make_usual_times(48)
    x[5], y[5] = 0.001, 0.02
    assert find_rare_questions(make_times(x, y)) == [None]


def test_equal_times_and_missing_pairs_are_not_rare():
    x, _ = make_usual_times(48)
    assert find_rare_questions(make_times(x, x)) == [None]
    missing = np.where(np.arange(48) < 3, 0.0, x)
    assert find_rare_questions(make_times(missing, missing * 1.5)) == [None]


def test_a_run_with_few_questions_has_no_rare_ones():
    x, y = make_usual_times(19)
    y[3] *= 20
    assert find_rare_questions(make_times(x, y)) == [None]


def test_passes_of_a_question_count_as_one_question():
    x, y = make_usual_times(40)
    y[3] *= 20
    two = np.stack([x, x])[None], np.stack([y, y])[None]
    (found,) = find_rare_questions(PairedTimes(*two, np.zeros(40, np.int64)))
    assert (found.count, found.questions) == (1, 40)
