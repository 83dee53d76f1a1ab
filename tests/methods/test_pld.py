"""Prompt lookup: the author's rule compared with a scan, transformers' rule with its own code."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from methods.pld import Pld, PldParams


def lookup(texts, *, limit=100, eos=(), **params):
    """Return the drafts of one method object for each text in turn, each continuing the one
    before."""
    method = Pld(PldParams(**params))
    seen = SimpleNamespace(
        requests=[SimpleNamespace(stop=SimpleNamespace(eos=frozenset(eos)))], chain=list
    )
    method.start(seen)
    proposals = []
    for text in texts:
        seen.tokens = lambda text=text: list(text)
        proposals.append(method.propose(seen, limit))
    return proposals


def propose(text, **params):
    return lookup([text], **params)[0]


def scan_as_the_author(text, ngram, length):
    """github.com/apoorvumang/prompt-lookup-decoding, find_candidate_pred_tokens, over a list."""
    for n in range(min(ngram, len(text)), 0, -1):
        suffix = text[-n:]
        for start in range(len(text) - n + 1):
            if text[start : start + n] == suffix:
                begin, end = start + n, start + n + length
                if end <= len(text) and begin < len(text) - n:
                    return text[begin:end]
    return []


def scan_as_transformers(text, ngram, length, eos):
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(sorted(eos)) if eos else None,
        num_output_tokens=length,
        max_matching_ngram_size=ngram,
        max_length=10_000,
    )
    return generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
ngrams = st.integers(1, 5)
lengths = st.integers(1, 8)


# ---- examples -----------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("rule", ["author", "transformers"])
def test_the_draft_is_what_followed_the_earlier_occurrence(rule):
    assert propose([1, 2, 3, 4, 1, 2], ngram=2, length=2, rule=rule) == [3, 4]


def test_the_authors_rule_requires_a_whole_window():
    assert propose([1, 2, 3, 4, 1, 2], ngram=2, length=10, rule="author") == []


def test_the_transformers_rule_takes_a_shorter_window():
    text = [1, 2, 3, 4, 1, 2]
    assert propose(text, ngram=2, length=10, rule="transformers") == [3, 4, 1, 2]


def test_transformers_stops_before_an_eos():
    text = [1, 2, 3, 9, 4, 1, 2]
    assert propose(text, ngram=2, length=4, rule="transformers", eos=[9]) == [3]
    assert propose(text, ngram=2, length=4, rule="author", eos=[9]) == [3, 9, 4, 1]


def test_a_window_that_begins_with_eos_gives_no_draft_and_ends_the_search():
    text = [2, 5, 1, 2, 9, 4, 1, 2]
    assert propose(text, ngram=2, length=2, rule="transformers", eos=[9]) == []
    assert propose(text, ngram=1, length=2, rule="transformers", eos=[9]) == [5, 1]


def test_a_longer_suffix_is_preferred_to_an_earlier_occurrence_of_a_shorter_one():
    text = [2, 8, 8, 1, 2, 7, 7, 1, 2]
    assert propose(text, ngram=2, length=2) == [7, 7]
    assert propose(text, ngram=1, length=2) == [8, 8]


def test_the_earliest_of_several_occurrences_is_used():
    text = [1, 5, 5, 1, 6, 6, 1, 7, 7, 1]
    assert propose(text, ngram=1, length=2) == [5, 5]


@pytest.mark.parametrize("rule", ["author", "transformers"])
@pytest.mark.parametrize("text", [[1], [1, 2], [1, 2, 3, 4]])
def test_a_text_without_repetition_gives_no_draft(rule, text):
    assert propose(text, ngram=3, length=1, rule=rule) == []


@pytest.mark.parametrize("rule", ["author", "transformers"])
def test_a_draft_is_cut_at_the_limit(rule):
    text = [1, 2, 3, 4, 5, 1, 2]
    assert propose(text, ngram=2, length=3, limit=2, rule=rule) == [3, 4]
    assert propose(text, ngram=2, length=3, limit=0, rule=rule) == []


def test_the_previous_prompt_is_forgotten():
    method = Pld(PldParams(ngram=2, length=1))
    session = SimpleNamespace(tokens=lambda: [7, 8, 9, 7, 8], chain=list)
    method.start(session)
    assert method.propose(session, 5) == [9]
    session.tokens = lambda: [1, 2, 3, 7, 8]
    method.start(session)
    assert method.propose(session, 5) == []


@pytest.mark.parametrize("wrong", [{"ngram": 0}, {"length": 0}, {"rule": "latest"}, {"window": 3}])
def test_parameters_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValidationError):
        PldParams(**wrong)


# ---- rules --------------------------------------------------------------------------------------


@given(texts, ngrams, lengths)
@settings(max_examples=400)
def test_the_authors_rule_equals_the_authors_scan(text, ngram, length):
    assert propose(text, ngram=ngram, length=length) == scan_as_the_author(text, ngram, length)


@given(texts, ngrams, lengths, st.sets(st.integers(0, 3), max_size=2))
@settings(max_examples=1_000, deadline=None)
def test_the_transformers_rule_equals_transformers_own(text, ngram, length, eos):
    ours = propose(text, ngram=ngram, length=length, rule="transformers", eos=eos)
    assert ours == scan_as_transformers(text, ngram, length, eos)


@given(
    texts,
    st.lists(st.integers(1, 4), max_size=10),
    ngrams,
    lengths,
    st.sampled_from(["author", "transformers"]),
)
def test_a_growing_index_proposes_what_a_new_one_does(text, growth, ngram, length, rule):
    ends = [sum(growth[:i]) + 1 for i in range(len(growth) + 1)]
    prefixes = [text[:end] for end in ends]
    params = {"ngram": ngram, "length": length, "rule": rule}
    assert lookup(prefixes, **params) == [propose(prefix, **params) for prefix in prefixes]


@given(texts, ngrams, lengths, st.sampled_from(["author", "transformers"]))
def test_a_draft_follows_an_earlier_occurrence_of_the_suffix(text, ngram, length, rule):
    draft = propose(text, ngram=ngram, length=length, rule=rule)
    assert len(draft) <= length
    if draft:
        # Found by at least the last token: that token, then the draft, are in the text.
        found = [text[-1], *draft]
        starts = range(len(text) - len(found) + 1)
        assert any(text[at : at + len(found)] == found for at in starts)
        assert len(found) <= len(text)


# ---- in use -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["author", "transformers"])
def test_a_lookup_is_partly_accepted_where_a_model_repeats_itself(open_session, rule):
    method = Pld(PldParams(length=4, rule=rule))
    steps = [step for i in range(40) for step in method.generate(open_session(i))]
    assert sum(step.draft.levels == 0 for step in steps) > 10
    assert sum(len(step.outcome.path) == 4 for step in steps) > 10
    assert sum(len(step.outcome.path) < step.draft.levels for step in steps) > 10
