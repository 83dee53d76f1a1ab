"""Tests of the suffix tree against a naive count of substrings."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from methods.suffix.tree import StringPosition, SuffixTree

texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def count_strings(sequences, depth):
    """Return the number of occurrences of each string of 1 to `depth` tokens."""
    return Counter(
        tuple(text[at : at + n])
        for text in sequences
        for at in range(len(text))
        for n in range(1, min(depth, len(text) - at) + 1)
    )


def build_tree(sequences, depth, *, closed=True):
    tree = SuffixTree(depth)
    for number, text in enumerate(sequences):
        for token in text:
            tree.append(token)
        if closed or number + 1 < len(sequences):
            tree.close()
    return tree


def read_counts(tree, longest, vocab=3):
    """Return the tree's count of each of its strings, shorter than `longest` tokens."""
    found, unvisited = {}, [((), [])]
    while unvisited:
        string, points = unvisited.pop()
        for token in range(vocab):
            on = [each for each in tree.follow(points, token) if each[1] == len(string) + 1]
            if on:
                found[(*string, token)] = tree.count(on[0])
                unvisited.append(((*string, token), on))
    return {string: times for string, times in found.items() if len(string) < longest}


# ---- examples -----------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_end_of_the_text_counts_among_its_occurrences_and_the_score_is_the_sum():
    tree = build_tree([[1, 2, 3, 1, 2, 3, 1, 2]], 64, closed=False)
    by_length = {depth: (node, depth) for node, depth in tree.repeated}
    assert sorted(by_length) == [1, 2, 3, 4, 5]
    tokens, parents, score = tree.find_path(by_length[2], 2, 0.1)
    assert (tokens, parents) == ([3, 1], [-1, 0]) and score == pytest.approx(4 / 3)
    tokens, _, score = tree.find_path(by_length[5], 5, 0.1)
    assert (tokens, score) == ([3, 1, 2], 1.5)


def test_a_draft_tree_takes_the_likeliest_paths_first():
    tree = build_tree([[0, 1, 2], [0, 1, 1], [0, 1, 2], [0, 2, 2]], 8)
    (point,) = tree.follow([], 0)
    assert tree.find_tree(point, 4, 0.1, 8) == ([1, 2, 2, 1], [-1, 0, -1, 0], 1.75)
    assert tree.find_tree(point, 4, 0.3, 8)[0] == [1, 2]
    assert tree.find_tree(point, 4, 0.1, 1)[0] == [1, 2]


# ---- against brute force ------------------------------------------------------------------------


@given(st.lists(texts, min_size=1, max_size=4), st.integers(2, 9), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_string_is_counted_as_by_a_naive_search(sequences, depth, closed):
    tree = build_tree(sequences, depth, closed=closed)
    expected = count_strings(sequences, depth - 1)
    assert read_counts(tree, depth) == expected


@given(st.lists(texts, min_size=1, max_size=4), st.integers(2, 9), texts)
@settings(max_examples=200, deadline=None)
def test_following_a_text_finds_its_longest_suffix_that_occurs(sequences, depth, text):
    tree, expected = build_tree(sequences, depth, closed=False), count_strings(sequences, depth - 1)
    points = []
    for end, token in enumerate(text, start=1):
        points = tree.follow(points, token)
        suffixes = [tuple(text[end - n : end]) for n in range(min(end, depth - 1), 0, -1)]
        assert [d for _, d in points] == [len(s) for s in suffixes if expected[s]]
        assert [tree.count(point) for point in points] == [
            expected[s] for s in suffixes if expected[s]
        ]


@given(st.lists(texts, min_size=1, max_size=3), st.integers(2, 9), st.integers(0, 9))
@example([[1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1], 2 * [1, 0] + [1, 0, 1] + 2 * [1, 1, 1, 0] + [1]], 4, 3)
@settings(max_examples=200, deadline=None)
def test_a_path_follows_the_most_frequent_child(sequences, depth, n):
    tree, counts = build_tree(sequences, depth, closed=False), count_strings(sequences, depth)
    for node, length in tree.repeated:
        string = tuple(sequences[-1][-length:])
        tokens, _, score = tree.find_path((node, length), n, 0.2)
        p, total = 1.0, 0.0
        for at, token in enumerate(tokens):
            here = (*string, *tokens[:at])
            assert counts[(*here, token)] == max(counts[(*here, t)] for t in range(3))
            p = counts[(*here, token)] / counts[string]
            total += p
        assert score == pytest.approx(total) and (not tokens or p >= 0.2)
        after = [counts[(*string, *tokens, t)] for t in range(3)]
        room = len(string) + len(tokens) < depth and len(tokens) < n and max(after) > 0
        assert not room or max(after) / counts[string] < 0.2


@given(st.lists(texts, min_size=1, max_size=3), st.integers(2, 9), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_a_draft_tree_has_the_likeliest_nodes(sequences, depth, n):
    tree, counts = build_tree(sequences, depth, closed=False), count_strings(sequences, depth)
    for node, length in tree.repeated:
        string = tuple(sequences[-1][-length:])
        tokens, parents, score = tree.find_tree((node, length), n, 0.05, 99)
        paths = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(set(paths)) == len(paths)
        path_shares = {
            s[length:]: times / counts[string]
            for s, times in counts.items()
            if s[:length] == string and len(s) > length and times >= 0.05 * counts[string]
        }
        best = sorted(path_shares.values(), reverse=True)[:n]
        assert sorted((path_shares[path] for path in paths), reverse=True) == pytest.approx(best)
        assert score == pytest.approx(sum(best))


@given(st.lists(texts, min_size=2, max_size=5), st.integers(2, 9), st.data())
@settings(max_examples=300, deadline=None)
def test_evicted_sequences_are_removed_completely(sequences, depth, data):
    tree = build_tree(sequences, depth)
    most = data.draw(st.integers(0, sum(map(len, sequences))))
    tree.evict(most)
    kept = list(sequences)
    while kept and sum(map(len, kept)) > most:
        kept.pop(0)
    assert tree.num_tokens == sum(map(len, kept)) <= most
    assert read_counts(tree, depth) == count_strings(kept, depth - 1)
    nodes = len(tree._end_depth) - len(tree._free)
    assert nodes <= 1 + 2 * tree.num_tokens + depth * len(kept)
    fresh = build_tree(kept, depth)
    assert nodes == len(fresh._end_depth) - len(fresh._free)
    # The tree then grows like a fresh one.
    for token in sequences[0]:
        tree.append(token)
    assert read_counts(tree, depth) == count_strings([*kept, sequences[0]], depth - 1)


@given(st.lists(texts, min_size=2, max_size=6), st.integers(2, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_sequences_evicted_by_a_policy_are_removed_completely(sequences, depth, data):
    tree, kept, most = SuffixTree(depth, "lru"), {}, data.draw(st.integers(0, 40))
    for number, text in enumerate(sequences):
        for token in text:
            tree.append(token)
        tree.close()
        kept[number] = text
        used = data.draw(st.sampled_from(sorted(kept)))
        tree.use(used)
        kept[used] = kept.pop(used)
        tree.evict(most)
        while kept and sum(map(len, kept.values())) > most:
            kept.pop(next(iter(kept)))
        assert read_counts(tree, depth) == count_strings(kept.values(), depth - 1)
    for string in count_strings(kept.values(), depth - 1):
        points: list[StringPosition] = []
        for token in string:
            points = tree.follow(points, token)
        found, newest = (
            tree.find_sequence(points[0]),
            max(find_texts_with(string, dict(enumerate(sequences)))),
        )
        if newest in kept:
            assert found == newest
        else:
            assert found is None or found in find_texts_with(string, kept)


def find_texts_with(string, texts):
    """Return the numbers of the texts that contain a string."""
    n = len(string)
    return [
        number
        for number, text in texts.items()
        if any(tuple(text[at : at + n]) == string for at in range(len(text)))
    ]


events = st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 1, 1, 1, 2, "close"]))


@given(st.lists(events, max_size=60), st.integers(2, 9), st.integers(5, 60))
@settings(max_examples=500, deadline=None)
def test_sequences_that_grow_in_turns_are_all_counted(order, depth, most):
    tree, closed = SuffixTree(depth), []
    opened = {which: (tree.open(), []) for which in range(3)}
    for which, event in order:
        sequence, text = opened[which]
        if event != "close":
            tree.append(event, sequence)
            text.append(event)
        else:
            tree.close(sequence)
            closed += [text] if text else []
            opened[which] = tree.open(), []
            tree.evict(most)
            while closed and sum(map(len, [*closed, *(t for _, t in opened.values())])) > most:
                closed.pop(0)
        all_texts = [*closed, *(text for _, text in opened.values())]
        counts = count_strings(all_texts, depth)
        assert tree.num_tokens == sum(map(len, all_texts))
        for sequence, text in opened.values():
            found = {length: tree.count((node, length)) for node, length in sequence.repeated}
            assert list(found) == sorted(found, reverse=True)
            for n in range(1, min(len(text), depth - 1) + 1):
                suffix = tuple(text[-n:])
                assert found.get(n, counts[suffix]) == counts[suffix]
                followed = any(counts[(*suffix, token)] for token in range(3))
                assert n in found or not followed
    assert read_counts(tree, depth) == count_strings(
        [*closed, *(t for _, t in opened.values())], depth - 1
    )
    assert read_counts(copy.deepcopy(tree), depth) == read_counts(tree, depth)
    for sequence, _ in opened.values():
        tree.close(sequence)
    tree.evict(0)
    assert read_counts(tree, depth) == {} and len(tree._end_depth) - len(tree._free) == 1


@given(st.lists(events, max_size=60), st.integers(2, 9))
@settings(max_examples=200, deadline=None)
def test_a_path_continues_in_other_open_sequences(order, depth):
    tree = SuffixTree(depth)
    opened = {which: (tree.open(), []) for which in range(3)}
    for which, event in order:
        if event != "close":
            tree.append(event, opened[which][0])
            opened[which][1].append(event)
    counts = count_strings([text for _, text in opened.values()], depth)
    for sequence, text in opened.values():
        for point in sequence.repeated:
            string = tuple(text[-point[1] :])
            tokens, _, score = tree.find_path(point, depth, 0.2)
            total = 0.0
            for at, token in enumerate(tokens):
                here = (*string, *tokens[:at])
                assert counts[(*here, token)] == max(counts[(*here, t)] for t in range(3))
                total += counts[(*here, token)] / counts[string]
            assert score == pytest.approx(total)
            after = max(counts[(*string, *tokens, t)] for t in range(3))
            room = len(string) + len(tokens) < depth and after > 0
            assert not room or after / counts[string] < 0.2


@given(texts, texts, st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_a_copy_grows_independently(first, second, depth):
    tree = build_tree([first], depth, closed=False)
    twin = copy.deepcopy(tree)
    for token in second:
        twin.append(token)
    assert read_counts(tree, depth) == count_strings([first], depth - 1)
    assert read_counts(twin, depth) == count_strings([[*first, *second]], depth - 1)
