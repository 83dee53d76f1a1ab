"""Tests of eviction policies against the offline optimum, brute force and an ordered dict."""

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


def minimal_misses(trace, k):
    """Return the smallest possible number of misses, by trying every eviction at every miss."""

    @cache
    def misses_from(at, cached):
        if at == len(trace):
            return 0
        page = trace[at]
        if page in cached:
            return misses_from(at + 1, cached)
        if len(cached) < k:
            return 1 + misses_from(at + 1, cached | {page})
        return 1 + min(misses_from(at + 1, cached - {evicted} | {page}) for evicted in cached)

    return misses_from(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=14), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_belady_has_the_fewest_possible_misses(trace, k):
    assert optimal_eviction(trace, k)[0] == minimal_misses(trace, k)


@given(traces, sizes, bits)
@settings(max_examples=100, deadline=None)
def test_belady_misses_at_most_as_often_as_any_policy(trace, k, guesses):
    best = optimal_eviction(trace, k)[0]
    for policy in POLICIES.values():
        assert best <= count_misses(trace, k, policy())
        assert best <= count_misses(trace, k, policy(), guesses)


@given(traces, sizes)
@settings(max_examples=100, deadline=None)
def test_lru_evicts_like_an_ordered_dict(trace, k):
    cached, misses = OrderedDict(), 0
    for page in trace:
        misses += page not in cached
        cached[page] = True
        cached.move_to_end(page)
        if len(cached) > k:
            cached.popitem(last=False)
    policy = Lru()
    assert count_misses(trace, k, policy) == misses
    assert list(policy.predictions) == list(cached)


@given(traces, sizes)
@settings(max_examples=200, deadline=None)
def test_true_discard_bits_miss_as_often_as_the_optimum(trace, k):
    optimal_misses, true_bits = optimal_eviction(trace, k)
    assert count_misses(trace, k, DiscardBit(), true_bits) == optimal_misses


@given(traces, sizes)
@settings(max_examples=200, deadline=None)
def test_true_phase_bits_miss_each_clean_page_once(trace, k):
    misses = count_misses(trace, k, PhaseBit(), true_phase_bits(trace, k))
    assert misses == count_clean_pages(trace, k) <= 2 * optimal_eviction(trace, k)[0]


@given(traces, sizes, bits)
@settings(max_examples=100, deadline=None)
def test_wrong_phase_bits_miss_at_most_k_times_the_optimum(trace, k, guesses):
    assert count_misses(trace, k, PhaseBit(), guesses) <= k * optimal_eviction(trace, k)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_evicts_a_cached_page_and_repeats_its_choices(name):
    trace = [at * at % 11 for at in range(60)]
    runs = []
    for _ in range(2):
        policy, evicted = POLICIES[name](), []
        for page in trace:
            if page not in policy.predictions and len(policy.predictions) == 4:
                before = set(policy.predictions)
                evicted.append(policy.evict())
                assert evicted[-1] in before and evicted[-1] not in policy.predictions
            policy.request(page)
        runs.append(evicted)
    assert runs[0] == runs[1] and runs[0]


def test_a_repeated_page_survives_a_scan_with_a_discard_bit_but_not_with_lru():
    trace = [0, 1, 0, 1, *range(2, 9), 0, 1]
    assert count_misses(trace, 3, DiscardBit()) == 9
    assert count_misses(trace, 3, Lru()) == 11
