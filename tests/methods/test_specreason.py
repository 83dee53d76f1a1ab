"""Tests of SpecReason: its thresholds, its grades and its token accounting."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.specreason import GradeRule, SpecReason, SpecReasonParams
from methods.vanilla import Vanilla
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.runner import run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.request import Request
from specbench_cli.engine.segments.segments import Segments
from specbench_cli.engine.segments.token_accounting import TokenAccounting, unsettled_tokens
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, seed=3)
REJECTION = Sampling("rejection", 0.8, seed=3)
BUDGET = 9
DIGITS = range(10, 20)
"""Ids of the digits 0 to 9."""
LINES = (1, 2, 3, 40, 41, 42, 70, 71)
"""Ids that end a line."""


@pytest.fixture(scope="module")
def words(family):
    pieces = [b"<%d>" % token for token in range(family.decoders["target"].vocab_size)]
    for digit, token in enumerate(DIGITS):
        pieces[token] = b"%d" % digit
    for token in LINES:
        pieces[token] = b".\n"
    return Vocabulary(pieces, lambda text: [token for token, _ in zip(DIGITS, text, strict=False)])


@pytest.fixture(scope="module")
def open_session(family, words):
    """Return a function that opens a session of the tiny pair on one of 48 prompts."""

    def make(number, sampling=GREEDY, *, target="target", draft="near", prompt=(), budget=BUDGET):
        decoders = {"target": family.decoders[target], "draft": family.decoders[draft]}
        key = target, draft
        if key not in spaces:
            spaces[key] = Workspace(decoders, 96, token_vocabulary=words)
        ids = tuple(prompt) or (*family.prompts[number % 40][number // 40 :], number)
        request = Request(f"tiny/{number}", 0, ids, StopRule(frozenset(), budget))
        return Session(spaces[key], request, sampling)

    spaces = {}
    return make


def decode_vanilla(session):
    list(Vanilla().generate(session))
    return session.output()


def decode(session, **params):
    return list(SpecReason(SpecReasonParams(**params)).generate(session))


@pytest.mark.smoke
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
def test_a_threshold_above_the_best_grade_gives_the_outputs_of_vanilla(open_session, sampling):
    for number in range(48):
        expected = decode_vanilla(open_session(number, sampling))
        session = open_session(number, sampling)
        steps = decode(session, threshold=10, cap=5)
        assert session.output() == expected
        assert not any("relaxed" in step.outcome.origin for step in steps)


def test_the_guarantee_is_exact_only_if_nothing_is_relaxed():
    off = SpecReason(SpecReasonParams(threshold=9.5))
    assert (off.guarantee("greedy"), off.guarantee("rejection")) == ("exact_tokens", "exact_law")
    assert SpecReason().guarantee("greedy") == "quality_only"
    assert SpecReason(SpecReasonParams(rate=0)).guarantee("greedy") == "exact_tokens"
    assert SpecReason(SpecReasonParams(rate=0.5, threshold=10)).accept.is_exact


def test_a_threshold_of_0_gives_the_output_of_the_draft(open_session):
    for number in range(6):
        session = open_session(number, draft="far")
        steps = decode(session, threshold=0, cap=5)
        first = session.output()[:1]
        prompt = [*session.tokens()[: -len(session.output())], *first]
        draft_output = decode_vanilla(
            open_session(number, target="far", prompt=prompt, budget=BUDGET - 1)
        )
        assert session.output()[1:-1] == draft_output[:-1]
        assert all(step.extra["stood"] for step in steps if "stood" in step.extra)


def test_token_level_drafts_in_the_targets_steps_keep_the_output(open_session):
    differ = 0
    for number in range(6):
        plain = open_session(number)
        one, expected = decode(plain, threshold=6), plain.output()
        drafted = open_session(number)
        other = decode(drafted, threshold=6, length=3)
        assert drafted.output() == expected
        differ += len(one) != len(other)
    assert differ


def test_a_step_ends_at_the_end_of_its_line(open_session, words):
    ended = 0
    for number in range(12):
        session = open_session(number, budget=30)
        for step in decode(session, threshold=5, cap=9):
            token_texts = [words.pieces[token] for token in step.outcome.committed]
            assert b".\n" not in token_texts[:-1]
            ended += token_texts[-1:] == [b".\n"]
    assert ended > 5


def test_the_target_writes_the_first_steps(open_session):
    expected, session = decode_vanilla(open_session(7)), open_session(7)
    assert not any(step.draft.nodes for step in decode(session, threshold=0, first=BUDGET))
    assert session.output() == expected


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)
@pytest.mark.parametrize(
    "grade",
    [*({"grade": each} for each in ("likelihood", "digit", "average")), {"rate": 0.5}],
    ids=lambda grade: str(*grade.values()),
)
def test_the_token_accounting_balances_and_matches_the_text(open_session, sampling, grade):
    total = Counter()
    for number in range(4):
        session = open_session(number, sampling)
        counts = Counter()
        for step in decode(session, **grade, threshold=5, length=2, cap=4):
            counts.update(step.extra)
        assert set(unsettled_tokens(counts).values()) == {0}
        assert counts["draft_kept"] + counts["target_kept"] == BUDGET
        total += counts
    assert total["draft_discarded"] and total["draft_kept"] and total["scored"]
    if grade == "digit":  # the question is scored together with its segment
        assert total["scored"] > total["draft_generated"]


def test_a_question_does_not_change_the_targets_next_logits(open_session):
    rows = []
    for asks_question in (False, True):
        session = open_session(3)
        with torch.inference_mode():
            session.reserve(4)
            segments = Segments(session, "\n", 4)
            session.prefill()
            draft = segments.draft()
            logits = session.score(draft)
            if asks_question:
                segments.score_question([5, 6, 7])
            segments.verify_and_commit(draft, logits)
            rows.append(session.score(session.chain((1, 2))))
    assert torch.equal(*rows)


class Answers:
    """Segments that answer each question with fixed logits."""

    def __init__(self, logits, words):
        self.logits, self.vocabulary = logits, words

    def score_question(self, question):
        return self.logits


@pytest.mark.parametrize(
    ("how", "likely", "grade"),
    [
        ("digit", {DIGITS[7]: 9.0, 50: 1.0}, 7.0),
        ("digit", {50: 9.0, DIGITS[7]: 8.0}, 0.0),  # the likeliest answer is no digit
        ("average", {DIGITS[8]: 9.0, DIGITS[6]: 9.0, 50: 9.0}, 7.0),
        ("average", dict.fromkeys(range(50, 60), 9.0), 0.0),
    ],
)
def test_a_grade_is_a_digit_or_a_mean_of_digits_and_otherwise_0(
    open_session, words, how, likely, grade
):
    logits = torch.full((96,), -30.0)
    for token, value in likely.items():
        logits[token] = value
    method = SpecReason(SpecReasonParams(grade=how))
    method.question = [1]
    findings = method.grade(open_session(0), Answers(logits, words), None, logits[None])
    assert findings == pytest.approx(grade, abs=1e-6)


@given(st.lists(st.floats(0, 9)), st.floats(0, 9), st.floats(0, 10))
def test_a_stricter_threshold_accepts_no_rejected_grade(grades, one, other):
    lax, strict = sorted((one, other))
    for grade in grades:
        assert GradeRule(threshold=strict).accepts(grade) <= GradeRule(threshold=lax).accepts(grade)


def test_logged_grades_reproduce_the_decisions(open_session):
    logged = []
    for number in range(12):
        steps = decode(open_session(number), threshold=4, cap=4)
        logged += [
            (step.extra["grade"], step.extra["stood"]) for step in steps if step.extra.get("spans")
        ]
    assert all((grade >= 4) == accepted for grade, accepted in logged)
    counts = [sum(GradeRule(threshold=t).accepts(grade) for grade, _ in logged) for t in range(11)]
    assert counts == sorted(counts, reverse=True) and counts[0] == len(logged) and counts[10] == 0
    assert 0 < counts[4] < len(logged)


class LaxGrade(GradeRule):
    """A rule that accepts grades below its own threshold."""

    def judge(self, grade):
        return replace(self, accepted=True)


class Lax(SpecReason):
    """A faulty SpecReason that accepts steps whose grade is too low."""

    @property
    def accept(self):
        return LaxGrade(threshold=self.params.threshold)


def find_faults(method):
    subject = AuditSubject("specreason", method, (SpecReasonParams(cap=3, threshold=8),))
    findings = run_checks(subject, {"states": check_bookkeeping})
    return {finding.check: finding.problem.what for finding in findings if not finding.passed}


@pytest.mark.usefixtures("short_audit")
def test_the_audit_finds_missing_tokens_and_wrongly_accepted_steps(
    monkeypatch,
):
    assert find_faults(SpecReason) == {}
    assert "relaxed in a segment of grade" in find_faults(Lax)["counters"]
    record_settled = TokenAccounting.record_settled
    monkeypatch.setattr(
        TokenAccounting,
        "record_settled",
        lambda self, who, kept, _: record_settled(self, who, kept, 0),
    )
    assert "neither kept nor discarded" in find_faults(SpecReason)["counters"]
