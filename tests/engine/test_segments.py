"""Reasoning segments: where they end, and the accounting of their tokens."""

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
        ([BREAK, A], False),  # the delimiter is in the segment, but not only in its last token
        ([], False),
    ],
)
def test_a_delimiter_is_found_for_any_tokenization(ids, ends):
    assert Delimiter("\n\n", WORDS).ends(ids) is ends


@given(st.lists(st.integers(0, len(PIECES) - 1)))
def test_a_split_keeps_all_tokens_and_each_segment_but_the_last_ends_with_its_delimiter(ids):
    delimiter = Delimiter("\n\n", WORDS)
    spans = delimiter.split(ids)
    assert [token for span in spans for token in span] == ids
    texts = [WORDS.decode(span) for span in spans]
    for span, text in zip(spans, texts, strict=True):
        assert b"\n\n" not in WORDS.decode(span[:-1])
        assert b"\n\n" in text or span is spans[-1]


def test_an_empty_delimiter_and_padding_ids_end_nothing():
    assert not Delimiter("", WORDS).ends([A])
    assert not Delimiter("\n", WORDS).ends([len(PIECES) + 3])


def test_a_delimiter_may_be_typed_with_escapes():
    assert SegmentParams(delimiter=r"\n\n").delimiter == "\n\n"


def test_accounting_reports_each_count_once_and_whether_it_is_balanced():
    accounting = TokenAccounting()
    accounting.record_generated("draft", 5)
    accounting.record_generated("target", 1)
    accounting.record_settled("draft", 3, 1)
    assert not accounting.balanced
    accounting.record_settled("draft", 0, 1)
    accounting.record_settled("target", 1, 0)
    accounting.record_scored(5)
    assert accounting.balanced
    assert accounting.take_new_counts() == {
        "draft_generated": 5,
        "draft_kept": 3,
        "draft_discarded": 2,
        "target_generated": 1,
        "target_kept": 1,
        "scored": 5,
    }
    assert accounting.take_new_counts() == {}
    accounting.record_generated("draft", 2)
    assert (
        accounting.take_new_counts() == {"draft_generated": 2}
        and accounting["draft_generated"] == 7
    )


def test_the_grade_is_the_segments_mean_log_probability_in_the_target():
    rows = torch.tensor([[0.0, 0.0], [0.0, torch.log(torch.tensor(3.0))], [9.0, 9.0]])
    draft = Draft(torch.tensor([0, 1]))
    assert mean_log_prob(rows, draft) == pytest.approx((torch.tensor([0.5, 0.75]).log()).mean())
    impossible = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert mean_log_prob(impossible, Draft(torch.tensor([1, 0]))) == -torch.inf


def test_the_control_accepts_at_its_rate_and_knows_its_off_position():
    class FixedRandom:
        def bernoulli(self, a):
            return torch.rand(a.shape, generator=self.generator) < a

    chance = FixedRandom()
    chance.generator = torch.Generator().manual_seed(1)
    rule = RandomSegment(rate=0.3)
    tosses = [rule.judge(rule.random_grade(chance, torch.zeros(1))).accepted for _ in range(2000)]
    assert abs(sum(tosses) / 2000 - 0.3) < 4 * (0.3 * 0.7 / 2000) ** 0.5
    assert RandomSegment(rate=0.0).is_exact and not rule.is_exact
    assert str(rule) == "random(rate=0.3)"
