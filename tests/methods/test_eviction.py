"""Policies of eviction: against the offline optimum, brute force, and functools' LRU."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies.eviction import (
    count_clean_pages,
    count_misses,
    optimal_eviction,
    true_phase_bits,
)
from methods.suffix.eviction import POLICIES, DiscardBit, Lru, PhaseBit

traces = st.lists(st.integers(0, 6), max_size=40)
sizes = st.integers(1, 5)
bits = st.lists(st.booleans(), min_size=40, max_size=40)


def fewest(trace, k):
    """Misses at least, by trying every page to take out at every miss."""

    @cache
    def from_(at, held):
        if at == len(trace):
            return 0
        page = trace[at]
        if page in held:
            return from_(at + 1, held)
        if len(held) < k:
            return 1 + from_(at + 1, held | {page})
        return 1 + min(from_(at + 1, held - {out} | {page}) for out in held)

    return from_(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=14), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_no_way_to_evict_misses_less_than_belady(trace, k):
    assert optimal_eviction(trace, k)[0] == fewest(trace, k)


@given(traces, sizes, bits)
@settings(max_examples=100, deadline=None)
def test_belady_misses_no_more_than_any_policy_with_any_predictions(trace, k, guesses):
    best = optimal_eviction(trace, k)[0]
    for policy in POLICIES.values():
        assert best <= count_misses(trace, k, policy())
        assert best <= count_misses(trace, k, policy(), guesses)


@given(traces, sizes)
@settings(max_examples=100, deadline=None)
def test_lru_is_that_of_an_ordered_dict(trace, k):
    held, due = OrderedDict(), 0
    for page in trace:
        due += page not in held
        held[page] = True
        held.move_to_end(page)
        if len(held) > k:
            held.popitem(last=False)
    policy = Lru()
    assert count_misses(trace, k, policy) == due
    assert list(policy.predictions) == list(held)


@given(traces, sizes)
@settings(max_examples=200, deadline=None)
def test_true_discard_bits_miss_as_often_as_the_optimum(trace, k):
    missed, true_bits = optimal_eviction(trace, k)
    assert count_misses(trace, k, DiscardBit(), true_bits) == missed


@given(traces, sizes)
@settings(max_examples=200, deadline=None)
def test_true_phase_bits_miss_each_clean_page_once_and_at_most_twice_the_optimum(trace, k):
    missed = count_misses(trace, k, PhaseBit(), true_phase_bits(trace, k))
    assert missed == count_clean_pages(trace, k) <= 2 * optimal_eviction(trace, k)[0]


@given(traces, sizes, bits)
@settings(max_examples=100, deadline=None)
def test_phase_bits_that_are_wrong_cost_no_more_than_marking_may(trace, k, guesses):
    assert count_misses(trace, k, PhaseBit(), guesses) <= k * optimal_eviction(trace, k)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_takes_out_a_page_that_it_holds_the_same_in_every_run(name):
    trace = [at * at % 11 for at in range(60)]
    runs = []
    for _ in range(2):
        policy, out = POLICIES[name](), []
        for page in trace:
            if page not in policy.predictions and len(policy.predictions) == 4:
                before = set(policy.predictions)
                out.append(policy.evict())
                assert out[-1] in before and out[-1] not in policy.predictions
            policy.request(page)
        runs.append(out)
    assert runs[0] == runs[1] and runs[0]


def test_what_was_asked_for_again_outlives_a_scan_under_one_predicted_bit_and_not_under_lru():
    trace = [0, 1, 0, 1, *range(2, 9), 0, 1]
    assert count_misses(trace, 3, DiscardBit()) == 9
    assert count_misses(trace, 3, Lru()) == 11
