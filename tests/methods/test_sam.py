"""SAM-Decoding: its drafts compared with a naive search, alone and with a draft model."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.sam.method import Sam, SamParams
from specbench_cli.engine.verify.sampling import Sampling

texts = st.lists(st.integers(0, 2), min_size=2, max_size=20)


def propose(text, *, earlier=(), limit=100, **params):
    memory = {}
    for output in (*earlier, text):
        method = Sam(SamParams(**params))
        seen = SimpleNamespace(memory=memory, finish=None, chain=list)
        seen.tokens = seen.output = lambda output=output: output
        seen.draft = lambda: SimpleNamespace(forward=lambda *_, **__: None)
        seen.pending_tokens = seen.new_state = lambda *_: None
        method.start(seen)
        draft = method.propose(seen, limit)
        seen.finish = "length"
        if output is not text:
            method.observe(seen, None)
    return draft


def naive_matches(text):
    """Return (length, first end) of every suffix that occurred before, longest first."""
    found = {}
    for n in range(len(text) - 1, 0, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if ends:
            found[n] = ends[0]
    return found


def naive_alone(text, length, factor):
    """The authors' samd_sam_only: n = min(n_predicts, 1 + int(match * alpha)) with the last token
    counted, behind the first end of the longest match and of no shorter one."""
    found = naive_matches(text)
    if not found:
        return []
    matched = max(found)
    n = min(1 + length, 1 + int(matched * factor))
    return text[found[matched] :][: n - 1]


def naive_with_model(text, length):
    """Follow the authors' samd: the longest match with enough tokens after it, or else the
    shortest."""
    ends = list(naive_matches(text).values())
    enough = [end for end in ends if len(text) - end >= length]
    return text[enough[0] if enough else min(ends) :][:length]


@pytest.mark.smoke
def test_the_draft_is_longer_for_longer_matches():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert propose(text, factor=2) == [3, 4, 5, 6]
    assert propose(text, factor=0.5) == [3]
    assert propose(text, factor=0) == []
    assert propose(text, length=2) == [3, 4]
    assert propose(text, limit=1) == [3]
    assert propose([1, 2, 3]) == []


def test_the_default_length_is_the_authors_40_without_the_last_committed_token():
    text = [*range(60), *range(20)]
    assert propose(text) == [*range(20, 59)]


@given(texts, st.integers(1, 9), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_the_draft_is_that_of_a_naive_search(text, length, factor):
    assert propose(text, length=length, factor=factor) == naive_alone(text, length, factor)


def test_alone_it_uses_the_longest_match_even_if_little_follows():
    text = [1, 2, 9, 9, 8, 1, 2, 2, 1, 2, 2]
    assert propose(text) == [1, 2, 2]  # behind "1 2 2", not the seven tokens behind "2"


@given(texts, st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_with_a_model_it_uses_a_shorter_match_if_too_little_follows(text, length):
    if naive_matches(text):
        draft = propose(text, length=length, beside="draft", threshold=1)
        assert draft == naive_with_model(text, length)


def test_earlier_outputs_are_drafted_from_up_to_their_ends():
    earlier = [[1, 2, 3, 4], [5, 6]]
    assert propose([9, 1, 2], earlier=earlier) == [3, 4]  # and not on into the next output
    assert propose([9, 5], earlier=earlier) == [6]
    assert propose([9, 1, 2], earlier=earlier, scope="prompt") == []
    assert propose([2, 7, 1, 2], earlier=earlier, factor=0.5) == [3]  # two tokens match, not one
    assert propose([1, 2, 8, 1, 2], earlier=earlier, factor=0.5) == [8]  # alike: the text's own


def test_a_full_memory_is_cleared():
    earlier = [[1, 2, 3, 4], [5, 6, 7]]
    assert propose([9, 1], earlier=earlier, memory=12, factor=1) == [2]
    assert propose([9, 1], earlier=earlier, memory=7, factor=1) == []
    assert propose([9, 5], earlier=earlier, memory=7, factor=1) == [6]


def test_with_a_model_the_match_length_decides_who_drafts(open_session, family):
    prompt = (5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7)
    drafters = {}
    for threshold in (1, 50):
        how = SamParams(beside="draft", threshold=threshold, length=4, drafted=3)
        session = open_session(prompt, Sampling(), budget=24)
        steps = list(Sam(how).generate(session))
        drafters[threshold] = [
            sum(f.role == "draft" for f in step.forwards) for step in steps if step.draft.nodes
        ]
    assert set(drafters[50]) <= {1, 2, 3} and len(drafters[50]) > 3
    assert 0 in drafters[1]
