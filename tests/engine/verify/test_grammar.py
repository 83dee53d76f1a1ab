"""Structured output: each draft node is masked by its own text, and the matcher stays at the
output."""

from __future__ import annotations

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.vanilla import Vanilla
from specbench_cli.engine.types import Outcome
from specbench_cli.engine.verify.accept import Threshold
from specbench_cli.engine.verify.grammar import GrammarMask
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.errors import MethodFault
from tests.engine.verify.contexts import Matcher

BYTES = llguidance.LLTokenizer("byte")
EOS = BYTES.eos_token
SCHEMA = """{"type": "object", "x-guidance": {"whitespace_flexible": false},
 "properties": {"a": {"type": "array", "items": {"enum": [0, 1, 10, "b"]}}, "c": {"const": null}},
 "required": ["a"], "additionalProperties": false}"""
GRAMMAR = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
LETTERS = [*sorted(set(b'{"abc":[10],null}x')), EOS]
"""Characters of the grammar, one letter that it lacks, and the end token."""


def fresh():
    return llguidance.LLMatcher(BYTES, GRAMMAR)


def allowed_behind(text):
    """Return the ids allowed next by a fresh matcher, or None if the text is invalid or ended."""
    matcher = fresh()
    if EOS in text or matcher.try_consume_tokens([*text]) < len(text):
        return None
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return {*np.flatnonzero(np.unpackbits(bits, bitorder="little")[: BYTES.vocab_size]).tolist()}


def allowed_ids(rows):
    """Return the ids that each row allows."""
    return [{*row.isfinite().nonzero()[:, 0].tolist()} for row in rows]


@st.composite
def texts(draw, before=()):
    """Generate a valid, unfinished text that continues another."""
    text = list(before)
    for _ in range(draw(st.integers(0, 12))):
        going_on = sorted(allowed_behind(text) & {*LETTERS} - {EOS})
        if not going_on:
            break
        text.append(draw(st.sampled_from(going_on)))
    return text


@st.composite
def drafts(draw, text):
    """Generate a tree of letters after a text. The grammar allows most of them."""
    tokens, parents, paths = [], [], {ROOT: text}
    for node in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(ROOT, node - 1))
        fit = sorted((allowed_behind(paths[parent]) or set()) & {*LETTERS})
        choice = fit if fit and draw(st.integers(0, 3)) else LETTERS
        tokens.append(draw(st.sampled_from(choice)))
        parents.append(parent)
        paths[node] = [*paths[parent], tokens[-1]]
    return tokens, tuple(parents), list(paths.values())


@settings(max_examples=30)
@given(st.data())
def test_a_nodes_mask_is_that_of_a_fresh_matcher_also_after_rejected_drafts(data):
    processing = GrammarMask(fresh(), [EOS]).begin()
    output = []
    for _ in range(3):  # the same matcher continues after rejected drafts
        output = data.draw(texts(output))
        tokens, parents, paths = data.draw(drafts(output))
        rows = torch.zeros(len(tokens) + 1, BYTES.vocab_size)
        found = allowed_ids(processing(rows, output, tokens, parents))
        every = set(range(BYTES.vocab_size))
        assert not rows.any()  # such rows are not masked
        for row, path in enumerate(paths):
            due = allowed_behind(path)
            assert found[row] == (every if due is None else due), (output, path)


@given(st.data())
@settings(max_examples=20)
def test_a_picked_token_is_dropped_if_the_grammar_forbids_it_after_the_earlier_picks(data):
    processing = GrammarMask(fresh(), [EOS]).begin()
    output = data.draw(texts())
    _, _, paths = data.draw(drafts(output))
    for path in paths:
        rows = torch.zeros(1, BYTES.vocab_size)
        (found,) = allowed_ids(processing.process_draft(rows, output, path[len(output) :]))
        due = allowed_behind(path)
        assert found == (set(range(BYTES.vocab_size)) if due is None else due)
        (root,) = allowed_ids(processing(rows, output, ()))  # the matcher is at the output
        assert root == allowed_behind(output)


def test_a_draft_without_an_allowed_token_is_not_masked():
    rows = torch.full((1, BYTES.vocab_size), -torch.inf)
    rows[0, ord("x")] = 1.0
    assert allowed_ids(GrammarMask(fresh(), [EOS]).begin().process_draft(rows, (), ())) == [
        {ord("x")}
    ]


@given(st.data())
@settings(max_examples=20)
def test_a_chain_is_a_tree_of_one_branch_and_an_output_may_be_read_in_parts(data):
    mask, text = GrammarMask(fresh(), [EOS]), data.draw(texts())
    rows = torch.zeros(len(text) + 1, BYTES.vocab_size)
    at_once = allowed_ids(mask.process_output(rows, [*text, 0]))
    assert at_once == allowed_ids(mask.begin()(rows, (), text, tuple(range(-1, len(text) - 1))))
    one_by_one, processing = [], mask.begin()
    for n in range(len(text) + 1):
        one_by_one += allowed_ids(processing(rows[:1], text[:n], ()))
    assert at_once == one_by_one


def test_a_complete_text_allows_only_the_end_tokens():
    whole = list(b'{"a":[],"c":null}')
    padded, other = BYTES.vocab_size + 5, BYTES.vocab_size
    rows = GrammarMask(fresh(), [EOS, other]).begin()(torch.zeros(1, padded), whole, ())
    assert allowed_ids(rows) == [{EOS, other}]


def test_rows_without_the_last_nodes_are_masked():
    text = list(b'{"a')
    rows = torch.zeros(3, BYTES.vocab_size)
    masked = GrammarMask(fresh(), [EOS]).process_output(rows, text)
    assert allowed_ids(masked) == [{ord("{")}, {ord('"')}, {ord("a")}]


def test_an_output_that_the_grammar_forbids_is_the_methods_fault():
    processing = GrammarMask(fresh(), [EOS]).begin()
    with pytest.raises(MethodFault, match=r"does not allow token 120 at position 1 of the output"):
        processing(torch.zeros(1, BYTES.vocab_size), list(b"{x"), ())


def test_a_grammar_that_the_targets_tokens_cannot_spell_is_refused():
    narrow = torch.zeros(1, ord("{"))  # a target without this letter
    with pytest.raises(ArithmeticError, match="no token of the target can continue"):
        GrammarMask(fresh(), [0]).begin()(narrow, (), ())


# ---- in a session -------------------------------------------------------------------------------


def even(text):
    """Zeros and ones. Token 2 may end the text if their sum is even."""
    return {0, 1} if sum(text) % 2 else {0, 1, 2}


def test_a_method_that_decides_for_itself_is_found(open_session, random_table):
    sampling = Sampling(processor=GrammarMask(Matcher(even), [2]))
    session = open_session(random_table(4, 21), eos=(2,), sampling=sampling)
    session.prefill()
    draft = session.chain(())
    session.score(draft)
    session.commit(Outcome((), (3,), ("plain",), 0))  # no text of the grammar has it
    rows = session.score(draft)
    with pytest.raises(MethodFault, match="does not allow token 3 at position 1 of the output"):
        session.verify(draft, rows)


def test_an_accept_rule_is_ignored_under_a_grammar(open_session, random_table):
    class Lossy(Vanilla):
        accept = Threshold(0.0)

    sampling = Sampling(processor=GrammarMask(Matcher(even), [2]))
    session = open_session(random_table(3, 21), eos=(2,), sampling=sampling)
    with pytest.raises(MethodFault, match="it may keep some that the grammar forbids"):
        list(Lossy().generate(session))
