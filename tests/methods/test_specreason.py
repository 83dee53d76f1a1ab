"""SpecReason: both ends of its threshold, what it grades, and what its ledger says."""

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
"""Ids that say 0 to 9."""
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
def opened(family, words):
    """A session of the tiny pair on one of 48 prompts."""

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


def vanillas(session):
    list(Vanilla().generate(session))
    return session.output()


def decode(session, **params):
    return list(SpecReason(SpecReasonParams(**params)).generate(session))


@pytest.mark.smoke
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
def test_with_a_threshold_above_the_best_grade_48_outputs_are_vanillas(opened, sampling):
    for number in range(48):
        due = vanillas(opened(number, sampling))
        session = opened(number, sampling)
        steps = decode(session, threshold=10, cap=5)
        assert session.output() == due
        assert not any("relaxed" in step.outcome.origin for step in steps)


def test_off_it_says_so_and_on_it_promises_nothing():
    off = SpecReason(SpecReasonParams(threshold=9.5))
    assert (off.guarantee("greedy"), off.guarantee("rejection")) == ("exact_tokens", "exact_law")
    assert SpecReason().guarantee("greedy") == "quality_only"
    assert SpecReason(SpecReasonParams(rate=0)).guarantee("greedy") == "exact_tokens"
    assert SpecReason(SpecReasonParams(rate=0.5, threshold=10)).accept.is_exact


def test_with_a_threshold_of_0_the_text_is_the_drafts_but_for_its_ends(opened):
    for number in range(6):
        session = opened(number, draft="far")
        steps = decode(session, threshold=0, cap=5)
        first = session.output()[:1]
        prompt = [*session.tokens()[: -len(session.output())], *first]
        alone = vanillas(opened(number, target="far", prompt=prompt, budget=BUDGET - 1))
        assert session.output()[1:-1] == alone[:-1]
        assert all(step.extra["stood"] for step in steps if "stood" in step.extra)


def test_drafts_inside_what_the_target_writes_change_no_token(opened):
    differ = 0
    for number in range(6):
        plain = opened(number)
        one, due = decode(plain, threshold=6), plain.output()
        drafted = opened(number)
        other = decode(drafted, threshold=6, length=3)
        assert drafted.output() == due
        differ += len(one) != len(other)
    assert differ


def test_steps_end_with_their_line_and_never_go_on_behind_it(opened, words):
    ended = 0
    for number in range(12):
        session = opened(number, budget=30)
        for step in decode(session, threshold=5, cap=9):
            said = [words.pieces[token] for token in step.outcome.committed]
            assert b".\n" not in said[:-1]
            ended += said[-1:] == [b".\n"]
    assert ended > 5


def test_the_first_steps_are_the_targets(opened):
    due, session = vanillas(opened(7)), opened(7)
    assert not any(step.draft.nodes for step in decode(session, threshold=0, first=BUDGET))
    assert session.output() == due


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)
@pytest.mark.parametrize(
    "grade",
    [*({"grade": each} for each in ("likelihood", "digit", "average")), {"rate": 0.5}],
    ids=lambda grade: str(*grade.values()),
)
def test_the_ledger_balances_and_is_the_texts(opened, sampling, grade):
    total = Counter()
    for number in range(4):
        session = opened(number, sampling)
        counts = Counter()
        for step in decode(session, **grade, threshold=5, length=2, cap=4):
            counts.update(step.extra)
        assert set(unsettled_tokens(counts).values()) == {0}
        assert counts["draft_kept"] + counts["target_kept"] == BUDGET
        total += counts
    assert total["draft_discarded"] and total["draft_kept"] and total["scored"]
    if grade == "digit":  # each question is read with the span that it is about
        assert total["scored"] > total["draft_generated"]


def test_a_question_leaves_the_targets_next_logits_as_they_were(opened):
    rows = []
    for asks in (False, True):
        session = opened(3)
        with torch.inference_mode():
            session.reserve(4)
            spans = Segments(session, "\n", 4)
            session.prefill()
            draft = spans.draft()
            logits = session.score(draft)
            if asks:
                spans.score_question([5, 6, 7])
            spans.verify_and_commit(draft, logits)
            rows.append(session.score(session.chain((1, 2))))
    assert torch.equal(*rows)


class Answers:
    """Asked a question, it says what it was told to."""

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
def test_a_grade_is_a_digit_or_the_mean_of_digits_and_anything_else_is_0(
    opened, words, how, likely, grade
):
    logits = torch.full((96,), -30.0)
    for token, value in likely.items():
        logits[token] = value
    method = SpecReason(SpecReasonParams(grade=how))
    method.question = [1]
    found = method.grade(opened(0), Answers(logits, words), None, logits[None])
    assert found == pytest.approx(grade, abs=1e-6)


@given(st.lists(st.floats(0, 9)), st.floats(0, 9), st.floats(0, 10))
def test_a_stricter_threshold_lets_no_logged_step_stand_that_fell(grades, one, other):
    lax, strict = sorted((one, other))
    for grade in grades:
        assert GradeRule(threshold=strict).accepts(grade) <= GradeRule(threshold=lax).accepts(grade)


def test_grades_that_were_logged_replay_to_the_same_decisions_and_stricter_ones_to_fewer(opened):
    logged = []
    for number in range(12):
        steps = decode(opened(number), threshold=4, cap=4)
        logged += [
            (step.extra["grade"], step.extra["stood"]) for step in steps if step.extra.get("spans")
        ]
    assert all((grade >= 4) == stood for grade, stood in logged)
    stands = [sum(GradeRule(threshold=t).accepts(grade) for grade, _ in logged) for t in range(11)]
    assert stands == sorted(stands, reverse=True) and stands[0] == len(logged) and stands[10] == 0
    assert 0 < stands[4] < len(logged)


class LaxGrade(GradeRule):
    """Judges otherwise than it says."""

    def judge(self, grade):
        return replace(self, accepted=True)


class Lax(SpecReason):
    """Lets steps stand whose grade is too low."""

    @property
    def accept(self):
        return LaxGrade(threshold=self.params.threshold)


def faults_of(method):
    subject = AuditSubject("specreason", method, (SpecReasonParams(cap=3, threshold=8),))
    found = run_checks(subject, {"states": check_bookkeeping})
    return {finding.check: finding.problem.what for finding in found if not finding.passed}


@pytest.mark.usefixtures("short_audit")
def test_the_audit_finds_what_a_ledger_lacks_and_a_step_that_stands_in_spite_of_its_grade(
    monkeypatch,
):
    assert faults_of(SpecReason) == {}
    assert "relaxed in a segment of grade" in faults_of(Lax)["counters"]
    settled = TokenAccounting.record_settled
    monkeypatch.setattr(
        TokenAccounting, "record_settled", lambda self, who, kept, _: settled(self, who, kept, 0)
    )
    assert "neither kept nor discarded" in faults_of(SpecReason)["counters"]
