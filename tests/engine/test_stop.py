"""The stop rule: EOS, stop string or budget, whichever comes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.sequence import StopRule


def letters(ids):
    return "".join(chr(ord("a") + i) for i in ids)


def rule(eos=(), budget=100, strings=()):
    return StopRule(frozenset(eos), budget, tuple(strings), letters)


def test_without_a_reason_to_stop_all_is_kept():
    assert rule().cut([1], [2, 3]) == (2, None)


def test_eos_is_kept_and_what_follows_is_not():
    assert rule(eos=[7]).cut([1], [2, 7, 7, 3]) == (2, "eos")


def test_any_of_several_eos_ids_ends_the_output():
    assert rule(eos=[7, 8]).cut([], [2, 8, 7]) == (2, "eos")


def test_the_budget_is_reached_exactly():
    assert rule(budget=3).cut([1], [2, 3, 4, 5]) == (2, "length")
    assert rule(budget=3).cut([1], [2, 3]) == (2, "length")
    assert rule(budget=3).cut([1], [2]) == (1, None)


def test_eos_at_the_last_place_of_the_budget_counts_as_eos():
    assert rule(eos=[7], budget=2).cut([1], [7, 3]) == (1, "eos")


def test_eos_behind_the_budget_is_not_seen():
    assert rule(eos=[7], budget=2).cut([1], [3, 7]) == (1, "length")


def test_a_stop_string_is_kept_with_the_token_that_completes_it():
    assert rule(strings=["bc"]).cut([], [0, 1, 2, 3]) == (3, "stop")


def test_a_stop_string_may_begin_in_what_was_committed_before():
    assert rule(strings=["abc"]).cut([0, 1], [2, 3]) == (1, "stop")


def test_a_stop_string_at_the_last_place_of_the_budget_counts_as_stop():
    assert rule(strings=["b"], budget=2).cut([0], [1, 1]) == (1, "stop")


def test_the_first_completed_of_several_stop_strings_ends_the_output():
    assert rule(strings=["cd", "bc"]).cut([], [0, 1, 2, 3]) == (3, "stop")


def test_eos_that_completes_a_stop_string_counts_as_eos():
    assert rule(eos=[1], strings=["b"]).cut([], [0, 1, 2]) == (2, "eos")


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(1, 12),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
)
def test_an_output_ends_at_the_same_token_however_it_is_cut_into_blocks(ids, budget, sizes):
    stop = rule(eos=[4], budget=budget, strings=["ba"])
    whole, reason = stop.cut([], ids)
    output, finish = [], None
    rest = list(ids)
    for size in sizes * len(ids):
        if finish or not rest:
            break
        block, rest = rest[:size], rest[size:]
        kept, finish = stop.cut(output, block)
        output += block[:kept]
    assert (len(output), finish) == (whole, reason)


def test_a_stop_string_without_a_decoder_of_ids_is_a_bug():
    with pytest.raises(AssertionError):
        StopRule(frozenset(), 4, ("a",)).cut([], [1])
