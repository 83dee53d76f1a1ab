"""Rare questions that decide a speedup are found, and equal questions are not."""

from __future__ import annotations

import numpy as np
import pytest

from specbench_cli.stats.bootstrap import PairedTimes, rare_questions


def paired(baseline, method):
    x, y = (np.asarray(z, float)[None, None] for z in (baseline, method))
    return PairedTimes(x, y, np.zeros(x.shape[-1], np.int64))


def usual(questions, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.lognormal(0, 0.5, questions)
    return x, x / 2 * rng.lognormal(0, 0.1, questions)


def test_a_question_that_is_far_slower_under_the_method_is_found():
    x, y = usual(48)
    y[[3, 7]] *= 20
    (found,) = rare_questions(paired(x, y))
    assert (found.count, found.questions) == (2, 48)
    rest = np.delete(np.arange(48), [3, 7])
    assert found.speedup_without == pytest.approx(x[rest].sum() / y[rest].sum())


def test_a_question_that_is_far_slower_under_the_baseline_is_found():
    x, y = usual(48)
    x[5] *= 20
    assert rare_questions(paired(x, y))[0].count == 1


def test_a_long_question_with_the_usual_speedup_is_not_rare():
    x, y = usual(48)
    x[5], y[5] = 20 * x[5], 20 * y[5]
    assert rare_questions(paired(x, y)) == [None]


def test_a_far_question_too_short_to_decide_is_left_out():
    x, y = usual(48)
    x[5], y[5] = 0.001, 0.02
    assert rare_questions(paired(x, y)) == [None]


def test_equal_times_and_missing_pairs_are_no_rare_questions():
    x, _ = usual(48)
    assert rare_questions(paired(x, x)) == [None]
    missing = np.where(np.arange(48) < 3, 0.0, x)
    assert rare_questions(paired(missing, missing * 1.5)) == [None]


def test_a_run_with_few_questions_has_no_rare_ones():
    x, y = usual(19)
    y[3] *= 20
    assert rare_questions(paired(x, y)) == [None]


def test_the_passes_of_a_question_are_one_question():
    x, y = usual(40)
    y[3] *= 20
    two = np.stack([x, x])[None], np.stack([y, y])[None]
    (found,) = rare_questions(PairedTimes(*two, np.zeros(40, np.int64)))
    assert (found.count, found.questions) == (1, 40)
