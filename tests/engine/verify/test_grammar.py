"""Structured output: each node of a draft is masked as its own text would be, and the matcher is
left where the output is."""

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
"""What the grammar's texts are made of, a letter that it has not, and the end."""


def fresh():
    return llguidance.LLMatcher(BYTES, GRAMMAR)


def allowed_behind(text):
    """The ids allowed next, by a matcher that has read nothing but a text; None where the text is
    none of the grammar, or has ended."""
    matcher = fresh()
    if EOS in text or matcher.try_consume_tokens([*text]) < len(text):
        return None
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return {*np.flatnonzero(np.unpackbits(bits, bitorder="little")[: BYTES.vocab_size]).tolist()}


def told(rows):
    """The ids that each row allows."""
    return [{*row.isfinite().nonzero()[:, 0].tolist()} for row in rows]


@st.composite
def texts(draw, before=()):
    """A text of the grammar, not ended, that goes on from another."""
    text = list(before)
    for _ in range(draw(st.integers(0, 12))):
        going_on = sorted(allowed_behind(text) & {*LETTERS} - {EOS})
        if not going_on:
            break
        text.append(draw(st.sampled_from(going_on)))
    return text


@st.composite
def drafts(draw, text):
    """A tree of letters behind a text, most of which the grammar allows."""
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
def test_a_nodes_mask_is_that_of_its_text_read_afresh_also_behind_rejected_drafts(data):
    processing = GrammarMask(fresh(), [EOS]).begin()
    output = []
    for _ in range(3):  # the same matcher goes on, behind drafts of which something was rejected
        output = data.draw(texts(output))
        tokens, parents, paths = data.draw(drafts(output))
        rows = torch.zeros(len(tokens) + 1, BYTES.vocab_size)
        found = told(processing(rows, output, tokens, parents))
        every = set(range(BYTES.vocab_size))
        assert not rows.any()  # they are left as they are
        for row, path in enumerate(paths):
            due = allowed_behind(path)
            assert found[row] == (every if due is None else due), (output, path)


@given(st.data())
@settings(max_examples=20)
def test_a_picked_token_is_left_out_if_the_grammar_forbids_it_behind_the_picks_before_it(data):
    processing = GrammarMask(fresh(), [EOS]).begin()
    output = data.draw(texts())
    _, _, paths = data.draw(drafts(output))
    for path in paths:
        rows = torch.zeros(1, BYTES.vocab_size)
        (found,) = told(processing.process_draft(rows, output, path[len(output) :]))
        due = allowed_behind(path)
        assert found == (set(range(BYTES.vocab_size)) if due is None else due)
        (root,) = told(processing(rows, output, ()))  # the matcher is where the output is
        assert root == allowed_behind(output)


def test_a_draft_that_can_say_nothing_that_is_allowed_drafts_as_it_does():
    rows = torch.full((1, BYTES.vocab_size), -torch.inf)
    rows[0, ord("x")] = 1.0
    assert told(GrammarMask(fresh(), [EOS]).begin().process_draft(rows, (), ())) == [{ord("x")}]


@given(st.data())
@settings(max_examples=20)
def test_a_chain_is_a_tree_of_one_branch_and_an_output_read_at_once_is_one_read_by_steps(data):
    mask, text = GrammarMask(fresh(), [EOS]), data.draw(texts())
    rows = torch.zeros(len(text) + 1, BYTES.vocab_size)
    at_once = told(mask.process_output(rows, [*text, 0]))
    assert at_once == told(mask.begin()(rows, (), text, tuple(range(-1, len(text) - 1))))
    one_by_one, processing = [], mask.begin()
    for n in range(len(text) + 1):
        one_by_one += told(processing(rows[:1], text[:n], ()))
    assert at_once == one_by_one


def test_a_complete_text_can_only_end_and_by_any_of_the_ends():
    whole = list(b'{"a":[],"c":null}')
    padded, other = BYTES.vocab_size + 5, BYTES.vocab_size
    rows = GrammarMask(fresh(), [EOS, other]).begin()(torch.zeros(1, padded), whole, ())
    assert told(rows) == [{EOS, other}]


def test_rows_without_the_last_nodes_are_masked_as_far_as_they_go():
    text = list(b'{"a')
    rows = torch.zeros(3, BYTES.vocab_size)
    masked = GrammarMask(fresh(), [EOS]).process_output(rows, text)
    assert told(masked) == [{ord("{")}, {ord('"')}, {ord("a")}]


def test_an_output_that_the_grammar_forbids_is_the_methods_fault():
    processing = GrammarMask(fresh(), [EOS]).begin()
    with pytest.raises(MethodFault, match=r"does not allow token 120 at position 1 of the output"):
        processing(torch.zeros(1, BYTES.vocab_size), list(b"{x"), ())


def test_a_grammar_that_the_targets_tokens_cannot_spell_is_told():
    narrow = torch.zeros(1, ord("{"))  # of a target that has no such letter
    with pytest.raises(ArithmeticError, match="no token of the target can continue"):
        GrammarMask(fresh(), [0]).begin()(narrow, (), ())


# ---- in a session -------------------------------------------------------------------------------


def even(text):
    """Zeros and ones, and 2 that ends an even sum of them."""
    return {0, 1} if sum(text) % 2 else {0, 1, 2}


def test_a_method_that_decides_for_itself_is_found(open_session, random_table):
    sampling = Sampling(processor=GrammarMask(Matcher(even), [2]))
    session = open_session(random_table(4, 21), eos=(2,), sampling=sampling)
    session.prefill()
    draft = session.chain(())
    session.score(draft)
    session.commit(Outcome((), (3,), ("plain",), 0))  # which no text of the grammar has
    rows = session.score(draft)
    with pytest.raises(MethodFault, match="does not allow token 3 at position 1 of the output"):
        session.verify(draft, rows)


def test_an_accept_rule_has_no_say_under_a_grammar(open_session, random_table):
    class Lossy(Vanilla):
        accept = Threshold(0.0)

    sampling = Sampling(processor=GrammarMask(Matcher(even), [2]))
    session = open_session(random_table(3, 21), eos=(2,), sampling=sampling)
    with pytest.raises(MethodFault, match="it may keep some that the grammar forbids"):
        list(Lossy().generate(session))
