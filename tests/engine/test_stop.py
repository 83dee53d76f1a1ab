"""The stop rule: EOS, stop string or budget, whichever comes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.sequence import StopRule


def decode_letters(ids):
    return "".join(chr(ord("a") + i) for i in ids)


def rule(eos=(), budget=100, strings=()):
    return StopRule(frozenset(eos), budget, tuple(strings), decode_letters)


@pytest.mark.parametrize(
    ("stop", "output", "new", "kept"),
    [
        pytest.param({}, [1], [2, 3], (2, None), id="no reason to stop"),
        pytest.param({"eos": [7]}, [1], [2, 7, 7, 3], (2, "eos"), id="eos"),
        pytest.param({"eos": [7, 8]}, [], [2, 8, 7], (2, "eos"), id="any of several eos"),
        pytest.param({"budget": 3}, [1], [2, 3, 4, 5], (2, "length"), id="beyond the budget"),
        pytest.param({"budget": 3}, [1], [2, 3], (2, "length"), id="exactly the budget"),
        pytest.param({"budget": 3}, [1], [2], (1, None), id="below the budget"),
        pytest.param({"eos": [7], "budget": 2}, [1], [7, 3], (1, "eos"), id="eos ends the budget"),
        pytest.param({"eos": [7], "budget": 2}, [1], [3, 7], (1, "length"), id="eos behind it"),
        pytest.param({"strings": ["bc"]}, [], [0, 1, 2, 3], (3, "stop"), id="stop string"),
        pytest.param({"strings": ["abc"]}, [0, 1], [2, 3], (1, "stop"), id="begun before"),
        pytest.param({"strings": ["b"], "budget": 2}, [0], [1, 1], (1, "stop"), id="at the budget"),
        pytest.param({"strings": ["cd", "bc"]}, [], [0, 1, 2, 3], (3, "stop"), id="first of two"),
        pytest.param(
            {"eos": [1], "strings": ["b"]}, [], [0, 1, 2], (2, "eos"), id="eos and string"
        ),
    ],
)
def test_an_output_is_cut_at_its_first_reason_to_stop(stop, output, new, kept):
    assert rule(**stop).truncate(output, new) == kept


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(1, 12),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
)
def test_an_output_ends_at_the_same_token_for_any_blocks(ids, budget, sizes):
    stop = rule(eos=[4], budget=budget, strings=["ba"])
    whole, reason = stop.truncate([], ids)
    output, finish = [], None
    rest = list(ids)
    for size in sizes * len(ids):
        if finish or not rest:
            break
        block, rest = rest[:size], rest[size:]
        kept, finish = stop.truncate(output, block)
        output += block[:kept]
    assert (len(output), finish) == (whole, reason)


def test_a_stop_string_without_a_detokenizer_is_a_bug():
    with pytest.raises(AssertionError):
        StopRule(frozenset(), 4, ("a",)).truncate([], [1])
