"""Checks of how many draft tokens a method accepts, with drafts of known quality.

A draft that equals the target must be accepted in full. A draft that is never right must not be
accepted at all. Lookup methods must accept a repeating text in full. These checks find faults that
make a method slow while its output is still right.
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
"""Number of tables for each parameter set and decoding rule."""

SLACK = 1e-6
"""Maximum difference in accepted tokens by rounding, if q is in single precision."""

DEVIATIONS = 6
"""Maximum difference of accepted tokens from the expected number, in standard deviations.

Random seeds are fixed, so a result is reproducible.
"""

PEAKED_TABLES = 2
"""Number of additional tables with peaked distributions."""


def check_bounds(subject: AuditSubject) -> list[Finding]:
    """Run those checks of this module that apply to the method's way of drafting."""
    findings: list[Finding | None] = []
    if subject.uses_draft_model:
        twin, twin_runs = _check_twin_draft(subject)
        findings += [twin, _check_mixed_draft(subject, twin_runs), _check_useless_draft(subject)]
    if subject.name in LOOKUP_METHODS:
        findings.append(_check_repeating_text(subject)[0])
    return [finding for finding in findings if finding is not None]


def _check_twin_draft(subject: AuditSubject) -> tuple[Finding | None, Sequence[CaseRun]]:
    """Check that a draft equal to the target is accepted in full, and that a bonus token follows.

    p is the target's distribution, q the draft's. A method may draw from a q that differs from p.
    Then
    the expected number of accepted tokens is sum min(p, q).

    In a dynamic tree, the accepted path may be shorter than the deepest path, but it ends at a
    leaf.
    A stateless head predicts several tokens at once, and assumes that the tokens before each are
    greedy. So its draft equals the target in greedy decoding only.
    """
    return _check_full_acceptance(
        subject,
        "twin draft",
        _twin_cases(subject),
        "the inputs of the draft: positions, missing tokens, stale rows; for a head, features of"
        " another token. Under the coupled rule, the output position of each draw"
        " (`session.pick(out, ahead)`). Full acceptance must add the bonus token",
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
        "the start of the copied text (directly after the match, not a token later), and whether"
        " the newest tokens are in the index",
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
    """A case with the steps that a method took to decode it.

    Attributes:
        params: parameters of the method.
        session: the session after decoding.
        texts: for each step, the token ids before its draft.
    """

    params: MethodParams
    case: Case
    session: ObservedSession
    steps: Sequence[Step]
    texts: Sequence[Sequence[int]]

    @classmethod
    def decode(cls, subject: AuditSubject, params: MethodParams, case: Case) -> CaseRun:
        """Decode a case with a method and return its steps."""
        session, taken, texts = case.open(), list[Step](), list[Sequence[int]]()
        for step in subject.method(params).generate(session):
            text = tuple(session.tokens())
            taken.append(step)
            texts.append(text[: len(text) - len(step.outcome.committed)])
        return cls(params, case, session, taken, texts)

    @property
    def drafted_by_tables(self) -> bool:
        """True if every draft came from a table that can predict the target's next tokens.

        A table cannot do this if it predicts several tokens at once while the target draws at
        random, because it does not know the tokens drawn in between.
        """
        predicts_ahead = any(
            not isinstance(head, SequentialHead) for head in self.session.stateless_heads
        )
        predicts_ahead |= any(
            isinstance(model, TableParallel | TableBlockHead)
            for model, _ in self.session.model_states
        )
        blind = predicts_ahead and self.case.sampling.rule != "greedy"
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
        """True if the first token of a draft has a q that differs from p, though draft and
        target are equal.
        """
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
        check: name of the finding.
        look: code to look at first if the check fails.
        by_tables: leave out cases in which a draft did not come from tables.

    Returns:
        The finding (None if all cases were left out), and the runs that had to accept all tokens.
    """
    all_runs = [CaseRun.decode(subject, params, case) for params, case in cases]
    runs = [run for run in all_runs if run.drafted_by_tables or not by_tables]
    if all_runs and not runs:
        return None, ()
    steps = committed = wrong = 0
    problem: Problem | None = None
    bound = [run for run in runs if not by_tables or _must_accept_all(run, runs)]
    for run in bound:
        for number, step, text in run.steps_with_draft():
            assert step.draft is not None
            if by_tables and all(forward.role != "draft" for forward in step.forwards):
                continue  # the step drafted without a draft model
            n, due = len(step.outcome.committed), step.draft.levels + subject.method.bonus
            steps, committed = steps + 1, committed + n
            full = n == due or (
                run.case.name == "equal" and n > 1 and _ends_at_leaf(step.draft, step)
            )
            if not full and not _q_explains_rejection(run, step, text):
                wrong += 1
                what = (
                    f"step {number} commits {n} of {due} tokens: {len(step.outcome.path)} of"
                    f" {step.draft.levels} draft tokens are accepted"
                )
                problem = problem or Problem(what, run.description, look)
    if problem is None and (sums := _acceptance_error(bound)):
        wrong, problem = wrong + 1, Problem(sums, bound[0].description, look)
    figure = {"steps": steps, "mat": committed / steps if steps else 0.0, "short_steps": wrong}
    return Finding(check, not wrong, figure, problem), bound


def _must_accept_all(run: CaseRun, others: Sequence[CaseRun]) -> bool:
    """Return True if the method must accept every draft token of a run.

    In this run, the draft model is equal to the target. A method may still draft on purpose from
    another distribution, for example at another temperature. Then it need not accept all tokens.
    How this is detected depends on the decoding rule of the run:

    - Rejection: q differs from p at the rejected token (`_q_explains_rejection`). A run with drafts
      without a q is not checked.
    - Coupled: some first draft tokens are rejected, which shows that the draft does not use the
      same noise.
    - Greedy: in a run with the same parameters under another decoding rule, q differs from p. The
      method must still accept all tokens if the draft reads rows at wrong positions, or is right
      less often than a random guess.

    Args:
        others: all runs, with all parameters and decoding rules.
    """
    rule, vocab = run.case.sampling.rule, run.case.tables[0].shape[-1]
    same_params = [other for other in others if other.params == run.params]
    if run.case.sampling.draws:
        return all(
            step.draft is None or step.draft.q is not None for _, step, _ in run.steps_with_draft()
        )
    first = [
        bool(step.outcome.path)
        for other in same_params
        if other.case.sampling.rule == rule
        for _, step, _ in other.steps_with_draft()
    ]
    altered = any(other.draft_differs_from_model for other in same_params)
    if rule == "coupled":
        return all(first) and not altered
    if not altered:
        return True
    return any(other.session.misread for other in same_params) or sum(first) * vocab <= len(first)


def _q_explains_rejection(run: CaseRun, step: Step, text: Sequence[int]) -> bool:
    """Return True if the reported q explains a partial acceptance: it differs from p.

    Then sum min(p, q) is smaller than the draft length.
    """
    assert step.draft is not None
    if not run.case.sampling.draws or step.draft.q is None:
        return False
    reference = Reference(run.case.tables[0], run.case.sampling)
    return expected_accepted(reference, text, step) < step.outcome.tested - SLACK


def _acceptance_error(runs: Sequence[CaseRun]) -> str | None:
    """Compare the number of accepted tokens with sum min(p, q) over all steps under rejection.

    Returns:
        A description of the difference if it is too large, else None.
    """
    accepted, expected, tested = 0, 0.0, 0
    for run in runs:
        if run.case.sampling.draws:
            reference = Reference(run.case.tables[0], run.case.sampling)
            for _, step, text in run.steps_with_draft():
                accepted += len(step.outcome.path)
                expected += expected_accepted(reference, text, step)
                tested += step.outcome.tested
    # A single test whether a token is accepted has a variance of at most 1/4.
    if abs(accepted - expected) <= DEVIATIONS * (tested / 4) ** 0.5 + SLACK:
        return None
    seen, due = format_distinct(accepted, expected)
    return f"{seen} of {tested} tests accept, but sum min(p, q) is {due}"


def _check_mixed_draft(subject: AuditSubject, twin_runs: Sequence[CaseRun]) -> Finding | None:
    """Check that a method drafts correctly after a rejected draft, in greedy decoding.

    The table of the draft model ("mixed") equals the target's table at some positions only. After
    each
    text, the method must accept as many draft tokens as this table predicts correctly.

    Args:
        twin_runs: runs with a draft equal to the target, in which every draft token was accepted.
            The
            check uses their parameters.
    """
    greedy = [run for run in twin_runs if run.case.sampling.rule == "greedy"]
    steps = accepted = 0
    problem: Problem | None = None
    for params in {format_params(run.params): run.params for run in greedy}.values():
        for turn in range(TABLES_PER_RULE):
            tables = make_table_pair("mixed", LONG_VOCAB, seed=500 + 2 * turn)
            case = Case(PARTLY_EQUAL, tables, make_sampling("greedy", turn), budget=40)
            run = CaseRun.decode(subject, params, case)
            if not run.drafted_by_tables:
                continue
            for number, step, text in run.steps_with_draft():
                assert step.draft is not None
                if all(forward.role != "draft" for forward in step.forwards):
                    continue
                steps, accepted = steps + 1, accepted + len(step.outcome.path)
                due = min(_predicted_tokens(run, text), step.draft.levels)
                n = len(step.outcome.path)
                if n < due and not (n and _ends_at_leaf(step.draft, step)) and problem is None:
                    what = (
                        f"step {number} accepts {n} of {step.draft.levels} draft tokens, though the"
                        f" draft model predicts {due} of the target's tokens"
                    )
                    look = (
                        "the inputs of the draft model after a rejected draft: stale rows, features"
                        " or indices (`session.features`, `session.pending_tokens`)"
                    )
                    problem = Problem(what, run.description, look)
    if not steps:
        return None
    figure = {"steps": steps, "accepted": accepted}
    return Finding("mixed draft", problem is None, figure, problem)


def _predicted_tokens(run: CaseRun, text: Sequence[int]) -> int:
    """Return the number of tokens after a text that the draft's table predicts correctly."""
    case = run.case
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
                n_tokens = min(
                    16, max(4, largest_number(params))
                )  # enough tokens for all children of a tree node
                tables = make_table_pair("disjoint", 2 * n_tokens, seed=300 + 2 * turn)
                # Switch top-k and top-p off. They could leave fewer tokens than a tree node has
                # children, and the method would then add other tokens.
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
                        continue  # the step drafted without a draft model
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
    n_accepted = len(step.outcome.path)
    if not n_accepted and len(step.outcome.committed) == 1 and step.outcome.tested <= 1:
        return None
    ids = step.draft.tokens.tolist() if step.draft else "?"
    return (
        f"{n_accepted} of the draft {ids} are accepted, {step.outcome.tested} levels tested,"
        f" {len(step.outcome.committed)} tokens committed, but the target gives them probability"
        " 0"
    )
