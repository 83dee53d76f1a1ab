"""The suffix array, compared with a search of all positions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.engine.drafting.suffix_array import SuffixArray

END = 3
SEVERAL = st.lists(st.lists(st.integers(0, END - 1), max_size=20), min_size=1, max_size=4)
STRING = st.lists(st.integers(0, END - 1), min_size=1, max_size=5)


def continuations(texts, string, length):
    """Return the sorted continuations of all occurrences, filled up with END."""
    n = len(string)
    found = [
        text[at + n : at + n + length]
        for text in texts
        for at in range(len(text) - n + 1)
        if text[at : at + n] == string
    ]
    # A text that ends is followed by END, which is the greatest token.
    return sorted([*way, *[END] * (length - len(way))] for way in found)


@given(SEVERAL, STRING, st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_all_occurrences_are_found_with_their_continuations(texts, string, length):
    array = SuffixArray(*SuffixArray.sort(texts, END))
    found = array.find(string)
    due = continuations(texts, string, length)
    assert len(found) == len(due)
    assert array.continuations(found, len(string), length, most=1000).tolist() == due


def test_many_occurrences_are_sampled_at_even_distances():
    array = SuffixArray(*SuffixArray.sort([[0, token] for token in range(1, 21)], 21))
    found = array.find([0])
    assert array.continuations(found, 1, 1, most=20)[:, 0].tolist() == list(range(1, 21))
    assert array.continuations(found, 1, 1, most=5)[:, 0].tolist() == [1, 5, 9, 13, 17]
    assert array.continuations(found, 1, 1, most=7)[:, 0].tolist() == [1, 4, 7, 10, 13, 16, 19]


def test_tokens_of_a_large_vocabulary_are_not_truncated():
    texts = [[65_535, 70_000, 1], [127_999, 65_535, 70_000]]
    tokens, order = SuffixArray.sort(texts, 128_000)
    array = SuffixArray(tokens, order)
    assert array.continuations(array.find([65_535]), 1, 2, most=9).tolist() == [
        [70_000, 1],
        [70_000, 128_000],
    ]
    assert not array.find([65_535, 1])
    assert tokens.dtype.itemsize == 4 and SuffixArray.sort(texts[:0], 65_535)[0].dtype.itemsize == 2
