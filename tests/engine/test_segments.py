"""Spans: where they end, and a ledger in which nothing goes missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.segments.rules import RandomSegment, SegmentParams
from specbench_cli.engine.segments.segments import Delimiter, mean_log_prob
from specbench_cli.engine.segments.token_accounting import TokenAccounting
from specbench_cli.engine.types import Draft

PIECES = [b"a", b"\n", b"\n\n", b".\n\n", b"b\n", b"\nc", b"", b"\n\nd"]
A, LINE, BREAK, STOP, BEFORE, BEHIND, NOTHING, INSIDE = range(len(PIECES))
WORDS = Vocabulary(PIECES)


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ([A, BREAK], True),
        ([A, LINE, LINE], True),
        ([A, STOP], True),
        ([BEFORE, LINE], True),
        ([BEFORE, BEHIND], True),
        ([A, INSIDE], True),
        ([LINE, NOTHING, LINE], True),
        ([A, LINE], False),
        ([LINE, A, LINE], False),
        ([BREAK, A], False),  # the delimiter is in the span, and its last token completes none
        ([], False),
    ],
)
def test_a_delimiter_is_found_however_the_tokenizer_cuts_it(ids, ends):
    assert Delimiter("\n\n", WORDS).ends(ids) is ends


@given(st.lists(st.integers(0, len(PIECES) - 1)))
def test_a_split_loses_nothing_and_each_span_but_the_last_ends_with_its_delimiter(ids):
    delimiter = Delimiter("\n\n", WORDS)
    spans = delimiter.split(ids)
    assert [token for span in spans for token in span] == ids
    texts = [WORDS.decode(span) for span in spans]
    for span, text in zip(spans, texts, strict=True):
        assert b"\n\n" not in WORDS.decode(span[:-1])
        assert b"\n\n" in text or span is spans[-1]


def test_an_empty_delimiter_and_ids_that_pad_the_vocabulary_end_nothing():
    assert not Delimiter("", WORDS).ends([A])
    assert not Delimiter("\n", WORDS).ends([len(PIECES) + 3])


def test_a_delimiter_is_typed_as_a_command_line_has_it():
    assert SegmentParams(delimiter=r"\n\n").delimiter == "\n\n"


def test_a_ledger_tells_each_count_once_and_says_what_is_open():
    ledger = TokenAccounting()
    ledger.record_generated("draft", 5)
    ledger.record_generated("target", 1)
    ledger.record_settled("draft", 3, 1)
    assert not ledger.balanced
    ledger.record_settled("draft", 0, 1)
    ledger.record_settled("target", 1, 0)
    ledger.record_scored(5)
    assert ledger.balanced
    assert ledger.take_new_counts() == {
        "draft_generated": 5,
        "draft_kept": 3,
        "draft_discarded": 2,
        "target_generated": 1,
        "target_kept": 1,
        "scored": 5,
    }
    assert ledger.take_new_counts() == {}
    ledger.record_generated("draft", 2)
    assert ledger.take_new_counts() == {"draft_generated": 2} and ledger["draft_generated"] == 7


def test_the_grade_is_the_mean_logarithm_of_the_span_in_the_target():
    rows = torch.tensor([[0.0, 0.0], [0.0, torch.log(torch.tensor(3.0))], [9.0, 9.0]])
    draft = Draft(torch.tensor([0, 1]))
    assert mean_log_prob(rows, draft) == pytest.approx((torch.tensor([0.5, 0.75]).log()).mean())
    impossible = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert mean_log_prob(impossible, Draft(torch.tensor([1, 0]))) == -torch.inf


def test_the_control_tosses_at_its_rate_and_knows_its_off_position():
    class Chance:
        def bernoulli(self, a):
            return torch.rand(a.shape, generator=self.generator) < a

    chance = Chance()
    chance.generator = torch.Generator().manual_seed(1)
    rule = RandomSegment(rate=0.3)
    tosses = [rule.judge(rule.random_grade(chance, torch.zeros(1))).accepted for _ in range(2000)]
    assert abs(sum(tosses) / 2000 - 0.3) < 4 * (0.3 * 0.7 / 2000) ** 0.5
    assert RandomSegment(rate=0.0).is_exact and not rule.is_exact
    assert str(rule) == "random(rate=0.3)"
