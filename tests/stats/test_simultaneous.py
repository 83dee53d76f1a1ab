"""Tests of significance groups, shown as letters: methods that share a letter do not differ."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.stats.bootstrap import PairedTimes, resample
from specbench_cli.stats.simultaneous import find_different_pairs, group_letters


def _matrix(k: int, *pairs: tuple[int, int]) -> np.ndarray:
    differ = np.zeros((k, k), dtype=bool)
    for a, b in pairs:
        differ[a, b] = differ[b, a] = True
    return differ


@pytest.mark.parametrize(
    ("differ", "expected"),
    [
        (_matrix(1), ["A"]),
        (_matrix(3), ["A", "A", "A"]),
        (_matrix(3, (0, 1), (0, 2), (1, 2)), ["A", "B", "C"]),
        (_matrix(3, (0, 2)), ["A", "AB", "B"]),
        (_matrix(3, (0, 1), (0, 2)), ["A", "B", "B"]),
        (_matrix(4, (0, 2), (0, 3), (1, 3)), ["A", "AB", "BC", "C"]),
        # Piepho's example: two middle methods may differ although the outer ones do not.
        (_matrix(3, (0, 1)), ["A", "B", "AB"]),
    ],
)
def test_letters_of_constructed_cases(differ, expected):
    assert group_letters(differ, range(len(differ))) == expected


def test_letter_a_goes_to_the_best_method():
    assert group_letters(_matrix(3, (0, 1), (0, 2), (1, 2)), order=[2, 0, 1]) == ["B", "C", "A"]


@given(st.integers(1, 7), st.data())
def test_methods_share_a_letter_exactly_if_they_do_not_differ(k, data):
    pairs = list(itertools.combinations(range(k), 2))
    differing = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    named = group_letters(_matrix(k, *differing), range(k))
    assert all(named)
    for a, b in pairs:
        assert bool(set(named[a]) & set(named[b])) == ((a, b) not in differing)


def _times(rng, ratios, n=48, spread=0.05) -> PairedTimes:
    baseline = rng.lognormal(0, 0.5, n)
    k = len(ratios)
    method = baseline / np.array(ratios)[:, None, None] * rng.lognormal(0, spread, (k, 1, n))
    return PairedTimes(np.broadcast_to(baseline, (k, 1, n)), method, np.arange(n) % 6)


def test_only_clearly_faster_methods_get_another_letter():
    times = _times(np.random.default_rng(0), [1.5, 1.5, 1.2])
    assert group_letters(find_different_pairs(resample(times)), [0, 1, 2]) == ["A", "A", "B"]


def test_baseline_is_compared_without_its_own_spread():
    times = _times(np.random.default_rng(1), [1.5, 1.001])
    own = times.baseline[:1]
    whole = PairedTimes(
        np.concatenate([times.baseline, own]), np.concatenate([times.method, own]), times.strata
    )
    assert group_letters(find_different_pairs(resample(whole)), [0, 1, 2]) == ["A", "B", "B"]


def test_one_question_shows_no_difference():
    times = _times(np.random.default_rng(3), [2.0, 1.0], n=1)
    assert not find_different_pairs(resample(times)).any()
