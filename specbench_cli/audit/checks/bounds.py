"""Acceptance bounds of any method: a draft that equals the target, and one that is never right.

Lookup methods also get a repeating text. Only these checks find faults that cost speed and leave
every output right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specbench_cli.audit.cases import LONG_VOCAB, PARTLY_EQUAL, RULES, Case, make_sampling
from specbench_cli.audit.checks.overlap import expected_accepted
from specbench_cli.audit.finding import Finding, Problem, format_distinct
from specbench_cli.audit.models.head import TableBlockHead, TableParallel
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import (
    make_table_pair,
    peaked_table,
    random_table,
    successor_table,
)
from specbench_cli.audit.reference import Reference
from specbench_cli.audit.subject import (
    LOOKUP_METHODS,
    AuditSubject,
    format_params,
    largest_number,
    max_draft_levels,
)
from specbench_cli.engine.models.head import SequentialHead
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Draft, Step
from specbench_cli.engine.verify.tree import ROOT

TABLES_PER_RULE = 4
"""Number of tables for each variant and rule."""

SLACK = 1e-6
"""Difference in accepted tokens that rounding explains, also with q in single precision."""

DEVIATIONS = 6
"""Allowed difference of a sum of acceptance tests, in standard deviations. The seeds are fixed."""

PEAKED_TABLES = 2
"""Number of additional tables with peaked distributions."""


def check_bounds(subject: AuditSubject) -> list[Finding]:
    """Check the bounds that apply to a method."""
    findings: list[Finding | None] = []
    if subject.uses_draft_model:
        twin, twins = _check_twin_draft(subject)
        findings += [twin, _check_mixed_draft(subject, twins), _check_useless_draft(subject)]
    if subject.name in LOOKUP_METHODS:
        findings.append(_check_repeating_text(subject)[0])
    return [finding for finding in findings if finding is not None]


def _check_twin_draft(subject: AuditSubject) -> tuple[Finding | None, Sequence[CaseRun]]:
    """Check that a draft equal to the target is accepted in full, plus a bonus token.

    If the method draws from a q that differs from the target's distribution, the expected number
    of accepted tokens is sum min(p, q).

    In a dynamic tree the likeliest path need not be the deepest, except for peaked distributions.
    It ends at a leaf, because a node's best child is expanded first. Stateless heads and parallel
    drafts predict what follows greedy tokens, so they equal the target in greedy decoding only.
    """
    return _check_full_acceptance(
        subject,
        "twin draft",
        _twin_cases(subject),
        "what the method feeds its draft (positions, tokens left out, stale rows; a head: features"
        " of another token) and, under the coupled rule, which output position it draws for"
        " (`session.pick(out, ahead)`); and whether full acceptance adds the bonus",
        by_tables=True,
    )


def _twin_cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, Case]]:
    for rule in RULES:
        for params in subject.lossless_params(rule):
            for turn in range(TABLES_PER_RULE):
                table = random_table(5, 300 + turn, 1.5)
                yield params, Case("equal", (table, table), make_sampling(rule, turn), budget=25)
                if rule == "greedy" and turn < PEAKED_TABLES:
                    table = peaked_table(5, 300 + turn)
                    yield params, Case("sure", (table, table), make_sampling(rule, turn), budget=25)


def _check_repeating_text(subject: AuditSubject) -> tuple[Finding | None, Sequence[CaseRun]]:
    """Check that a repeating text of any period is accepted in full after two periods."""
    return _check_full_acceptance(
        subject,
        "repeating text",
        _repeating_cases(subject),
        "where the copied text begins (directly after the occurrence, not a token later), and"
        " whether the newest tokens are indexed",
    )


def _repeating_cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, Case]]:
    for params in subject.lossless_params("greedy"):
        for period in (1, 2, 3, 5):
            follow = [(token + 1) % period if token < period else 0 for token in range(6)]
            table = successor_table(follow)
            rounds = 3 + max_draft_levels(params, default=5) // period
            prompt = tuple(range(period)) * rounds
            sampling = make_sampling("greedy", 0)
            yield params, Case("repeating", (table, table), sampling, prompt, budget=33)


@dataclass(frozen=True)
class CaseRun:
    """A case that a method decoded to its end.

    Attributes:
        session: the session, after its end.
        steps: the steps of the method.
        texts: for each step, the token ids before its draft.
    """

    params: MethodParams
    case: Case
    session: ObservedSession
    steps: Sequence[Step]
    texts: Sequence[Sequence[int]]

    @classmethod
    def decode(cls, subject: AuditSubject, params: MethodParams, case: Case) -> CaseRun:
        """Decode a case."""
        session, taken, texts = case.open(), list[Step](), list[Sequence[int]]()
        for step in subject.method(params).generate(session):
            text = tuple(session.tokens())
            taken.append(step)
            texts.append(text[: len(text) - len(step.outcome.committed)])
        return cls(params, case, session, taken, texts)

    @property
    def drafted_by_tables(self) -> bool:
        """True if tables drafted, and read the tokens that later draft tokens depend on.

        Only tables that read the tokens drafted so far can follow the target's choices.
        """
        guess = any(not isinstance(head, SequentialHead) for head in self.session.stateless_heads)
        guess |= any(
            isinstance(model, TableParallel | TableBlockHead)
            for model, _ in self.session.model_states
        )
        blind = guess and self.case.sampling.rule != "greedy"
        return self.session.drafted_by_tables and not blind

    def steps_with_draft(self) -> Iterator[tuple[int, Step, Sequence[int]]]:
        """Yield number, step and preceding text of each step with a draft, except the last step.

        A step without a draft is allowed.
        """
        for number, (step, text) in enumerate(zip(self.steps, self.texts, strict=True), start=1):
            if step.draft is not None and step.draft.nodes and number < len(self.steps):
                yield number, step, text

    @property
    def draft_differs_from_model(self) -> bool:
        """True if q of the first draft token differs from p, though draft and target are equal."""
        if not self.case.sampling.draws:
            return False
        reference = Reference(self.case.tables[0], self.case.sampling)
        return any(
            step.draft is not None
            and step.draft.q is not None
            and sum(map(min, reference.distribution(*text[-2:]), step.draft.q[0].tolist()))
            < 1 - SLACK
            for _, step, text in self.steps_with_draft()
        )

    @property
    def description(self) -> str:
        """Description of the case for messages."""
        return f"{format_params(self.params)}; {self.case}"


def _check_full_acceptance(
    subject: AuditSubject,
    check: str,
    cases: Iterator[tuple[MethodParams, Case]],
    look: str,
    *,
    by_tables: bool = False,
) -> tuple[Finding | None, Sequence[CaseRun]]:
    """Check that every draft is accepted in full, followed by a bonus if the method has one.

    Args:
        by_tables: leave out cases in which a draft did not come from tables.
    Returns:
        The finding (None if all cases were left out), and the runs that the bound applies to.
    """
    every = [CaseRun.decode(subject, params, case) for params, case in cases]
    decoded = [each for each in every if each.drafted_by_tables or not by_tables]
    if every and not decoded:
        return None, ()
    steps = committed = wrong = 0
    problem: Problem | None = None
    bound = [each for each in decoded if not by_tables or _must_accept_all(each, decoded)]
    for each in bound:
        for number, step, text in each.steps_with_draft():
            assert step.draft is not None
            if by_tables and all(forward.role != "draft" for forward in step.forwards):
                continue  # the draft came from another source
            n, due = len(step.outcome.committed), step.draft.levels + subject.method.bonus
            steps, committed = steps + 1, committed + n
            full = n == due or (
                each.case.name == "equal" and n > 1 and _ends_at_leaf(step.draft, step)
            )
            if not full and not _q_explains_rejection(each, step, text):
                wrong += 1
                what = (
                    f"step {number} commits {n} of {due} tokens: {len(step.outcome.path)} of"
                    f" {step.draft.levels} draft tokens are accepted"
                )
                problem = problem or Problem(what, each.description, look)
    if problem is None and (sums := _acceptance_error(bound)):
        wrong, problem = wrong + 1, Problem(sums, bound[0].description, look)
    figure = {"steps": steps, "mat": committed / steps if steps else 0.0, "short_steps": wrong}
    return Finding(check, not wrong, figure, problem), bound


def _must_accept_all(each: CaseRun, others: Sequence[CaseRun]) -> bool:
    """Return True if the draft of a case must be accepted in full, as its target would be.

    A draft may deliberately be worse than its model. Then its q differs from its model's, and its
    first token is sometimes rejected in greedy decoding too. A draft without a q must be accepted.
    Under the coupled rule a draft need not share the noise. In greedy decoding nothing excuses a
    draft that reads wrong rows, or one whose first token is accepted less often than a guess.
    """
    rule, vocab = each.case.sampling.rule, each.case.tables[0].shape[-1]
    alike = [other for other in others if other.params == each.params]
    if each.case.sampling.draws:
        return all(
            step.draft is None or step.draft.q is not None for _, step, _ in each.steps_with_draft()
        )
    first = [
        bool(step.outcome.path)
        for other in alike
        if other.case.sampling.rule == rule
        for _, step, _ in other.steps_with_draft()
    ]
    altered = any(other.draft_differs_from_model for other in alike)
    if rule == "coupled":
        return all(first) and not altered
    if not altered:
        return True
    return any(other.session.misread for other in alike) or sum(first) * vocab <= len(first)


def _q_explains_rejection(each: CaseRun, step: Step, text: Sequence[int]) -> bool:
    """Return True if the reported q explains a partial acceptance: it differs from p.

    Then sum min(p, q) is smaller than the draft length.
    """
    assert step.draft is not None
    if not each.case.sampling.draws or step.draft.q is None:
        return False
    reference = Reference(each.case.tables[0], each.case.sampling)
    return expected_accepted(reference, text, step) < step.outcome.tested - SLACK


def _acceptance_error(decoded: Sequence[CaseRun]) -> str | None:
    """Return an error if the accepted tokens do not match sum min(p, q) over all steps, else None.

    Only cases under the rejection rule count.
    """
    accepted, expected, tested = 0, 0.0, 0
    for each in decoded:
        if each.case.sampling.draws:
            reference = Reference(each.case.tables[0], each.case.sampling)
            for _, step, text in each.steps_with_draft():
                accepted += len(step.outcome.path)
                expected += expected_accepted(reference, text, step)
                tested += step.outcome.tested
    # The variance of an acceptance test is at most 1/4.
    if abs(accepted - expected) <= DEVIATIONS * (tested / 4) ** 0.5 + SLACK:
        return None
    seen, due = format_distinct(accepted, expected)
    return f"{seen} of {tested} tests accept, but sum min(p, q) is {due}"


def _check_mixed_draft(subject: AuditSubject, twins: Sequence[CaseRun]) -> Finding | None:
    """Check acceptance after rejected drafts, with a draft model that is right at some positions.

    In greedy decoding a method must accept as many draft tokens as the draft model predicts
    correctly, as it does when the draft equals the target. Steps without a draft forward are left
    out.
    """
    greedy = [each for each in twins if each.case.sampling.rule == "greedy"]
    steps = accepted = 0
    problem: Problem | None = None
    for params in {format_params(each.params): each.params for each in greedy}.values():
        for turn in range(TABLES_PER_RULE):
            tables = make_table_pair("mixed", LONG_VOCAB, seed=500 + 2 * turn)
            case = Case(PARTLY_EQUAL, tables, make_sampling("greedy", turn), budget=40)
            each = CaseRun.decode(subject, params, case)
            if not each.drafted_by_tables:
                continue
            for number, step, text in each.steps_with_draft():
                assert step.draft is not None
                if all(forward.role != "draft" for forward in step.forwards):
                    continue
                steps, accepted = steps + 1, accepted + len(step.outcome.path)
                due = min(_predicted_tokens(each, text), step.draft.levels)
                n = len(step.outcome.path)
                if n < due and not (n and _ends_at_leaf(step.draft, step)) and problem is None:
                    what = (
                        f"step {number} accepts {n} of {step.draft.levels} draft tokens, though the"
                        f" draft model predicts {due} of the target's tokens"
                    )
                    look = (
                        "the inputs of the draft after a rejected draft: rows, features and indices"
                        " of the previous step (`session.features`, `session.pending_tokens`)"
                    )
                    problem = Problem(what, each.description, look)
    if not steps:
        return None
    figure = {"steps": steps, "accepted": accepted}
    return Finding("mixed draft", problem is None, figure, problem)


def _predicted_tokens(each: CaseRun, text: Sequence[int]) -> int:
    """Return the number of tokens after a text that the draft's table predicts correctly."""
    case = each.case
    target, draft = (Reference(table, case.sampling) for table in case.tables)
    before, last = text[-2:]
    first = len(text) - len(case.prompt)
    for n, noise in enumerate(target.noise(case.prompt_id, case.budget)[first:]):
        token = target.choose_token(before, last, noise)
        if token != draft.choose_token(before, last, noise):
            return n
        before, last = last, token
    return case.budget


def _ends_at_leaf(draft: Draft, step: Step) -> bool:
    """Return True if the accepted path ends at a leaf of the draft tree."""
    last = step.outcome.path[-1] if step.outcome.path else ROOT
    return draft.parents is not None and last not in draft.parents


def _check_useless_draft(subject: AuditSubject) -> Finding | None:
    """Check that no draft token is accepted if the target gives all of them probability 0."""
    steps = committed = seen = counted = 0
    problem: Problem | None = None
    for rule in RULES:
        for params in subject.lossless_params(rule):
            for turn in range(TABLES_PER_RULE):
                said = min(
                    16, max(4, largest_number(params))
                )  # enough tokens for the children of a node
                tables = make_table_pair("disjoint", 2 * said, seed=300 + 2 * turn)
                # With top-k or top-p fewer tokens than children could remain, and others would fill
                # up.
                sampling = replace(make_sampling(rule, turn), top_k=0, top_p=1.0)
                case = Case("disjoint", tables, sampling, prompt=(1, 0), budget=13)
                session = case.open()
                taken = list(subject.method(params).generate(session))
                seen += 1
                if not session.drafted_by_tables:
                    continue
                counted += 1
                for step in taken:
                    if all(forward.role != "draft" for forward in step.forwards):
                        continue  # the draft came from another source
                    steps, committed = steps + 1, committed + len(step.outcome.committed)
                    what = _describe_acceptance(step)
                    if what and problem is None:
                        where = f"{format_params(params)}; {case}"
                        look = "verification: these draft tokens have probability 0 in the target"
                        problem = Problem(what, where, look)
    if seen and not counted:
        return None
    figure = {"steps": steps, "mat": committed / steps if steps else 0.0}
    return Finding("useless draft", problem is None, figure, problem)


def _describe_acceptance(step: Step) -> str | None:
    stood = len(step.outcome.path)
    if not stood and len(step.outcome.committed) == 1 and step.outcome.tested <= 1:
        return None
    ids = step.draft.tokens.tolist() if step.draft else "?"
    return (
        f"{stood} of the draft {ids} are accepted, {step.outcome.tested} levels tested,"
        f" {len(step.outcome.committed)} tokens committed, but the target gives them probability"
        " 0"
    )
