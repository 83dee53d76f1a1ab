"""The back-off n-gram model: its distribution, its counts, and its most likely tokens."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.staged.ngram import KatzModel

VOCAB = 6
TEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=60)
CONTEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=4)
ORDERS = st.integers(1, 4)
DISCOUNTS = st.sampled_from([0.1, 0.5, 0.9])


def counted(text, order=3, discount=0.5, vocab=VOCAB):
    """A model of a text's n-grams."""
    model = KatzModel(vocab, order, discount)
    for at, token in enumerate(text):
        model.add(text[:at], token)
    return model


@given(TEXTS, CONTEXTS, ORDERS, DISCOUNTS)
@settings(max_examples=200, deadline=None)
def test_probabilities_sum_to_one_and_are_positive_after_every_context(text, context, order, d):
    distribution = counted(text, order, d).distribution(context)
    assert len(distribution) == VOCAB
    assert sum(distribution) == pytest.approx(1.0, abs=1e-12)
    # Discounted or backed off: nothing is impossible, unless all tokens were seen after a shorter
    # context, where counts speak for themselves (and are positive).
    assert min(distribution) > 0


@given(TEXTS, CONTEXTS, ORDERS, DISCOUNTS, st.integers(1, VOCAB))
@settings(max_examples=200, deadline=None)
def test_top_is_the_head_of_the_distribution(text, context, order, d, k):
    model = counted(text, order, d)
    distribution, top = model.distribution(context), model.top(context, k)
    assert len({token for token, _ in top}) == k
    for token, p in top:
        assert p == pytest.approx(distribution[token], abs=1e-12)
    assert [p for _, p in top] == pytest.approx(sorted(distribution, reverse=True)[:k], abs=1e-12)


def paths_of(model, context, depth):
    """Every continuation of at most `depth` tokens, with its probability."""
    found = {(): 1.0}
    level = [()]
    for _ in range(depth):
        level = [(*path, token) for path in level for token in range(VOCAB)]
        for path in level:
            found[path] = found[path[:-1]] * model.distribution([*context, *path[:-1]])[path[-1]]
    del found[()]
    return found


@given(TEXTS, CONTEXTS, st.integers(0, 12), st.integers(0, 3), st.sampled_from([0.0, 0.061]))
@settings(max_examples=40, deadline=None)
def test_a_tree_has_the_most_likely_continuations(text, context, nodes, depth, least):
    model = counted(text)
    tokens, parents = model.tree(context, nodes, depth, least)
    paths = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    every = paths_of(model, context, depth)
    due = sorted((p for p in every.values() if p > least), reverse=True)[:nodes]
    assert [every[path] for path in paths] == pytest.approx(due, abs=1e-12)


def test_seen_tokens_are_discounted_and_the_others_share_the_rest_as_the_shorter_context_says():
    model = counted([0, 1, 0, 1, 0, 2], order=2)
    # After 0: 1 twice, 2 once, of three; the rest, 2 x 0.5 / 3, goes to 0, 3, 4 and 5.
    distribution = model.distribution([0])
    assert distribution[1] == pytest.approx(1.5 / 3)
    assert distribution[2] == pytest.approx(0.5 / 3)
    plain = model.distribution([])
    assert plain[0] == pytest.approx(2.5 / 6)
    others = plain[0] + plain[3] + plain[4] + plain[5]
    for token in (0, 3, 4, 5):
        assert distribution[token] == pytest.approx(plain[token] / others / 3)


def test_an_unseen_context_counts_as_the_next_shorter_one():
    model = counted([0, 1, 2, 0, 1, 2])
    assert model.distribution([5, 1]) == model.distribution([1])
    assert model.distribution([5, 5]) == model.distribution([])
    assert model.top([5, 1], 2) == model.top([1], 2)


def test_without_counts_all_tokens_are_equally_likely():
    model = KatzModel(4)
    assert model.distribution([2, 3]) == [0.25] * 4
    assert model.top([2, 3], 3) == [(0, 0.25), (1, 0.25), (2, 0.25)]


def test_a_frequent_token_of_the_shorter_context_can_beat_a_rare_one_of_the_longer():
    # 0 1 was followed by four others, once each; 1 alone mostly by 5.
    text = [0, 1, 2, 0, 1, 3, 0, 1, 4, 0, 1, 0]
    model = counted([*text, *[4, 1, 5] * 20], vocab=8)
    assert model.top([0, 1], 1)[0][0] == 5
    assert model.top([0, 1], 5)[0][0] == 5


def test_where_every_token_was_seen_nothing_is_discounted():
    model = counted([0, 1, 1, 0, 1], order=1, vocab=2)
    assert model.distribution([]) == [0.4, 0.6]
    assert list(model.rank_tokens([])) == [(1, 0.6), (0, 0.4)]


def test_counting_is_incremental_and_in_order():
    text = [0, 1, 2, 0, 1, 3, 0, 1, 3]
    early = counted(text[:6])
    for at in range(6, len(text)):
        early.add(text[:at], text[at])
    assert early.distribution([0, 1]) == counted(text).distribution([0, 1])
    assert early.top([0, 1], 6) == counted(text).top([0, 1], 6)


def test_a_copy_is_independent():
    model = counted([0, 1, 2, 0, 1])
    twin = copy.deepcopy({"model": model})["model"]
    before = model.distribution([0, 1])
    assert twin.distribution([0, 1]) == before
    twin.add([0, 1], 5)
    assert model.distribution([0, 1]) == before != twin.distribution([0, 1])
