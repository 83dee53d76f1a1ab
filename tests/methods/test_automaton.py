"""The suffix automaton, compared with a naive search."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.sam.automaton import START, SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=30)


def holds(text, string):
    return any(text[at : at + len(string)] == string for at in range(len(text) - len(string) + 1))


def longest(text, read):
    """Return the longest suffix of the read tokens that occurs in a text."""
    return next(n for n in range(len(read), -1, -1) if holds(text, read[len(read) - n :]))


def first_end(text, string):
    n = len(string)
    return next(at + n for at in range(len(text)) if text[at : at + n] == string)


def grown(text):
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


@pytest.mark.smoke
def test_the_continuation_of_a_match_is_that_of_its_first_occurrence():
    automaton = grown([1, 2, 3, 1, 2, 4])
    match = automaton.follow(automaton.follow(START, 1), 2)
    assert match[1] == 2 and automaton.get_continuation(match, 2) == [3, 1]
    assert automaton.get_continuation(START, 2) == []


@given(texts, texts)
@settings(max_examples=300, deadline=None)
def test_a_match_is_the_longest_suffix_that_occurs(text, read):
    automaton, match = grown(text), START
    for end, token in enumerate(read, start=1):
        match = automaton.follow(match, token)
        due = longest(text, read[:end])
        assert match[1] == due
        if due:
            first = first_end(text, read[end - due : end])
            assert automaton.get_continuation(match, 5) == text[first : first + 5]
    n = max(1, len(text))
    assert len(automaton._link) <= 2 * n
    assert sum(map(len, automaton._next)) <= 3 * n


@given(texts)
@settings(max_examples=200, deadline=None)
def test_a_token_looked_up_before_its_insertion_does_not_find_itself(text):
    automaton, match = SuffixAutomaton(), START
    for end, token in enumerate(text):
        match = automaton.follow(match, token)
        before = text[:end]
        due = next(n for n in range(end + 1, -1, -1) if holds(before, text[end + 1 - n : end + 1]))
        assert match[1] == due
        automaton.append(token)
        if due:
            first = first_end(text, text[end + 1 - due : end + 1])
            assert automaton.get_continuation(match, 4) == text[first : min(end + 1, first + 4)]


@given(st.lists(st.tuples(texts, texts), max_size=4))
@settings(max_examples=200, deadline=None)
def test_a_match_stays_valid_while_other_texts_split_states(turns):
    automaton, match, several, read = SuffixAutomaton(), START, [], []
    for text, more in turns:
        automaton.add(text)
        several.append(text)
        known = read[len(read) - match[1] :]
        for token in more:
            read.append(token)
            known.append(token)
            match = automaton.follow(match, token)
            due = max(longest(each, known) for each in several)
            assert match[1] == due
            if due:
                string = read[len(read) - due :]
                own = next(each for each in several if holds(each, string))
                first = first_end(own, string)
                assert automaton.get_continuation(match, 9) == own[first : first + 9]
            known = known[len(known) - due :]


@given(texts, st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_shorter_suffixes_are_used_if_the_continuation_is_too_short(text, least):
    automaton, match = SuffixAutomaton(), START
    for token in text:
        match = automaton.follow(match, token)
        automaton.append(token)
    if not match[1]:
        return
    behind = {n: len(text) - first_end(text, text[len(text) - n :]) for n in range(1, match[1] + 1)}
    enough = [n for n in behind if behind[n] >= least]
    found = automaton.get_continuation(match, least, min_tokens=least)
    assert len(found) == (least if enough else max(behind.values()))


@given(st.lists(texts, max_size=3), texts)
@settings(max_examples=100, deadline=None)
def test_no_match_crosses_from_one_text_into_the_next(several, read):
    automaton, match = SuffixAutomaton(), START
    for text in several:
        automaton.add(text)
    for end, token in enumerate(read, start=1):
        match = automaton.follow(match, token)
        assert match[1] == max((longest(text, read[:end]) for text in several), default=0)
        if match[1]:
            string = read[end - match[1] : end]
            own = next(text for text in several if holds(text, string))
            first = first_end(own, string)
            assert automaton.get_continuation(match, 9) == own[first : first + 9]


@given(texts, texts)
@settings(max_examples=50, deadline=None)
def test_a_copy_is_independent(first, second):
    automaton = grown(first)
    twin = copy.deepcopy(automaton)
    for token in second:
        twin.append(token)
    for each, text in ((automaton, first), (twin, [*first, *second])):
        match = START
        for end, token in enumerate(second, start=1):
            match = each.follow(match, token)
            assert match[1] == longest(text, second[:end])
