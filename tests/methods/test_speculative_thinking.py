"""Tests of Speculative Thinking: which model writes which part, and the token accounting."""

from collections import Counter

import pytest

from methods.speculative_thinking import SpeculativeThinking, SpeculativeThinkingParams
from methods.vanilla import Vanilla
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.request import Request
from specbench_cli.engine.segments.token_accounting import unsettled_tokens
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, seed=3)
BUDGET = 24
SHORT = {"probe": 4, "checked": 5, "excess": 5, "limit": 1, "cap": 12, "delimiter": "\n"}


@pytest.fixture(scope="module")
def open_session(family):
    """Return a function that opens a session of the tiny pair.

    Every fifth token ends a line; others are words of doubt, verification or affirmation.
    """
    words = {0: b"\n", 1: b"wait ", 2: b"check ", 3: b"yes "}
    pieces = [words.get(token % 5, b"so ") for token in range(96)]
    vocabulary = Vocabulary(pieces, lambda text: [4, 9])

    def make(number, sampling=GREEDY, target="target", draft="near", prompt=(), budget=BUDGET):
        decoders = {"target": family.decoders[target], "draft": family.decoders[draft]}
        space = spaces.setdefault(
            (target, draft), Workspace(decoders, 96, token_vocabulary=vocabulary)
        )
        ids = tuple(prompt) or (*family.prompts[number % 40][number // 40 :], number)
        return Session(
            space, Request(f"tiny/{number}", 0, ids, StopRule(frozenset(), budget)), sampling
        )

    spaces = {}
    return make


def decode(session, **params):
    return list(SpeculativeThinking(SpeculativeThinkingParams(**SHORT | params)).generate(session))


def decode_vanilla(session):
    list(Vanilla().generate(session))
    return session.output()


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
def test_if_the_target_writes_everything_outputs_equal_those_of_vanilla(open_session, sampling):
    for number in range(48):
        expected, session = (
            decode_vanilla(open_session(number, sampling, budget=8)),
            open_session(number, sampling, budget=8),
        )
        decode(session, writer="target")
        assert session.output() == expected


@pytest.mark.parametrize(
    "silent", [{"affirm": "", "reflect": "", "verify": ""}, {"delimiter": ""}], ids=str
)
def test_without_words_or_without_paragraphs_the_draft_writes_alone(open_session, silent):
    for number in range(3):
        session = open_session(number, draft="far")
        steps = decode(session, **silent)
        prompt = [*session.tokens()[:-BUDGET], *session.output()[:1]]
        draft_output = decode_vanilla(
            open_session(number, target="far", prompt=prompt, budget=BUDGET - 1)
        )
        assert session.output()[1:-1] == draft_output[:-1]
        assert not any("takeovers" in step.extra for step in steps)


@pytest.mark.parametrize(
    ("text", "sign"),
    [("Yes, yes.", 1), ("wait, yes", -1), ("await", -1), ("so it is", 0), ("check", -1)],
)
def test_polarity_counts_words_inside_others_and_a_tie_is_doubt(text, sign):
    assert SpeculativeThinkingParams().polarity(text) == sign


def test_a_target_equal_to_the_draft_keeps_the_text(open_session):
    for number in range(4):
        expected = decode_vanilla(open_session(number, target="near", draft="near"))
        session = open_session(number, target="near", draft="near")
        decode(session, limit=50)
        assert session.output() == expected


@pytest.mark.parametrize("always", [False, True])
def test_the_token_accounting_counts_discarded_probes_and_inserted_words(open_session, always):
    total = Counter()
    for number in range(8):
        counts = Counter()
        for step in decode(open_session(number), always=always):
            counts.update(step.extra)
        assert set(unsettled_tokens(counts).values()) == {0}
        kept = counts["draft_kept"] + counts["target_kept"] + counts["method_kept"]
        assert kept == BUDGET
        total += counts
    assert total["takeovers"] and total["draft_discarded"] and total["method_kept"]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_decides_how_often_the_target_takes_over(open_session, rate):
    judged = 0
    for number in range(6):
        total = Counter()
        for step in decode(open_session(number), rate=rate, limit=50):
            total.update(step.extra)
        judged += total["spans"]
        assert total["stood"] == rate * total["spans"]
        assert total["takeovers"] == (1 - rate) * total["spans"]
        assert set(unsettled_tokens(total).values()) == {0}
    assert judged


def test_each_judged_segment_is_accepted_or_taken_over(open_session):
    total = Counter()
    for number in range(8):
        for step in decode(open_session(number)):
            total.update(step.extra)
    assert total["spans"] == total["stood"] + total["takeovers"]
    assert total["stood"] and total["takeovers"]
