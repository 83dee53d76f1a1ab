"""Bounds that hold whatever a method's idea is: a draft that is the target itself, one that cannot
be right, and for methods that copy, a text that repeats itself.

A fault that costs speed and leaves every output right shows here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specbench_cli.audit.cases import MIXED_VOCAB, PARTLY_EQUAL, Case, Watched, sampling_of
from specbench_cli.audit.checks.overlap import expected_accepted
from specbench_cli.audit.finding import Finding, Problem, format_distinct
from specbench_cli.audit.models.head import TableBlockHead, TableParallel
from specbench_cli.audit.models.table import pair, random_table, successor_table, sure_table
from specbench_cli.audit.reference import Reference
from specbench_cli.audit.subject import COPIES, Subject, largest, longest, passed
from specbench_cli.engine.models.head import SequentialHead
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Draft, Step
from specbench_cli.engine.verify.sampling import Rule
from specbench_cli.engine.verify.tree import ROOT

RULES: tuple[Rule, ...] = ("greedy", "coupled", "rejection")
TURNS = 4
"""Tables for each variant and rule."""

SLACK = 1e-6
"""Tokens accepted that rounding explains, of q in single precision too."""

DEVIATIONS = 6
"""Standard deviations by which a sum of tests may be off. The seeds are fixed."""

SURE = 2
"""As many tables again whose laws leave little doubt."""


def check_bounds(subject: Subject) -> list[Finding]:
    """The bounds that apply to a method."""
    findings: list[Finding | None] = []
    if subject.drafts:
        twin, twins = _twin(subject)
        findings += [twin, _mixed(subject, twins), _useless(subject)]
    if subject.name in COPIES:
        findings.append(_repeats(subject)[0])
    return [finding for finding in findings if finding is not None]


def _twin(subject: Subject) -> tuple[Finding | None, Sequence[CaseRun]]:
    """Draft equal to target: all levels stand, and a full step commits one token more.

    Where tokens are drawn from another q than the target's distribution, sum min(p, q) says how
    many stand.

    Of a tree that grows the likeliest path need not be the deepest, unless the laws leave little
    doubt; it ends at a leaf, since a node's best child comes before all its others. A head without
    a state foresees what follows the target's own choice, and a parallel draft what follows its own
    first one, so that they are no twins where tokens are drawn or noise decides.
    """
    return _full(
        subject,
        "twin draft",
        _twins(subject),
        "what the method feeds its draft (positions, tokens left out, stale rows; a head: features"
        " of another token) and, under the coupled rule, which output position it draws for"
        " (`session.pick(out, ahead)`); and whether full acceptance adds the bonus",
        by_tables=True,
    )


def _twins(subject: Subject) -> Iterator[tuple[MethodParams, Case]]:
    for rule in RULES:
        for params in subject.promising(rule):
            for turn in range(TURNS):
                table = random_table(5, 300 + turn, 1.5)
                yield params, Case("equal", (table, table), sampling_of(rule, turn), budget=25)
                if rule == "greedy" and turn < SURE:
                    table = sure_table(5, 300 + turn)
                    yield params, Case("sure", (table, table), sampling_of(rule, turn), budget=25)


def _repeats(subject: Subject) -> tuple[Finding | None, Sequence[CaseRun]]:
    """A text of any period is copied without end: after two rounds all levels stand."""
    return _full(
        subject,
        "repeating text",
        _cycles(subject),
        "where the copied text begins (behind the occurrence, not a token later) and whether the"
        " newest tokens are indexed",
    )


def _cycles(subject: Subject) -> Iterator[tuple[MethodParams, Case]]:
    for params in subject.promising("greedy"):
        for period in (1, 2, 3, 5):
            follow = [(token + 1) % period if token < period else 0 for token in range(6)]
            table = successor_table(follow)
            rounds = 3 + longest(params, otherwise=5) // period
            prompt = tuple(range(period)) * rounds
            sampling = sampling_of("greedy", 0)
            yield params, Case("repeating", (table, table), sampling, prompt, budget=33)


@dataclass(frozen=True)
class CaseRun:
    """A case that was decoded.

    Attributes:
        session: it has ended.
        taken: its steps.
        texts: the text that each step's draft follows.
    """

    params: MethodParams
    case: Case
    session: Watched
    taken: Sequence[Step]
    texts: Sequence[Sequence[int]]

    @classmethod
    def of(cls, subject: Subject, params: MethodParams, case: Case) -> CaseRun:
        """Decode a case."""
        session, taken, texts = case.open(), list[Step](), list[Sequence[int]]()
        for step in subject.method(params).generate(session):
            text = tuple(session.tokens())
            taken.append(step)
            texts.append(text[: len(text) - len(step.outcome.committed)])
        return cls(params, case, session, taken, texts)

    @property
    def by_tables(self) -> bool:
        """Whether tables drafted, and read what the tokens behind a draft's first one depend on.

        Only those that read the tokens drafted so far know what the target chose.
        """
        guess = any(not isinstance(head, SequentialHead) for head in self.session.stateless)
        guess |= any(
            isinstance(model, TableParallel | TableBlockHead) for model, _ in self.session.held
        )
        blind = guess and self.case.sampling.rule != "greedy"
        return self.session.drafted_by_tables and not blind

    def drafting(self) -> Iterator[tuple[int, Step, Sequence[int]]]:
        """Yield the steps that drafted something, but for the last one, with their numbers and the
        texts that they follow. A step without a draft is no fault."""
        for number, (step, text) in enumerate(zip(self.taken, self.texts, strict=True), start=1):
            if step.draft is not None and step.draft.nodes and number < len(self.taken):
                yield number, step, text

    @property
    def alters_q(self) -> bool:
        """Whether the first token of a draft is drawn from another distribution than the target's,
        though draft and target are one."""
        if not self.case.sampling.draws:
            return False
        reference = Reference(self.case.tables[0], self.case.sampling)
        return any(
            step.draft is not None
            and step.draft.q is not None
            and sum(map(min, reference.law(*text[-2:]), step.draft.q[0].tolist())) < 1 - SLACK
            for _, step, text in self.drafting()
        )

    @property
    def where(self) -> str:
        """The case in words."""
        return f"{passed(self.params)}; {self.case}"


def _full(
    subject: Subject,
    check: str,
    cases: Iterator[tuple[MethodParams, Case]],
    look: str,
    *,
    by_tables: bool = False,
) -> tuple[Finding | None, Sequence[CaseRun]]:
    """Check that every draft is accepted in full and followed by a bonus where the method has one.

    Args:
        by_tables: leave out cases in which something else than tables drafted.
    Returns:
        The finding, None where all cases were left out; and the decodings that have the bound.
    """
    every = [CaseRun.of(subject, params, case) for params, case in cases]
    decoded = [each for each in every if each.by_tables or not by_tables]
    if every and not decoded:
        return None, ()
    steps = committed = wrong = 0
    problem: Problem | None = None
    bound = [each for each in decoded if not by_tables or _is_twin(each, decoded)]
    for each in bound:
        for number, step, text in each.drafting():
            assert step.draft is not None
            if by_tables and all(forward.role != "draft" for forward in step.forwards):
                continue  # it drafted by something else
            n, due = len(step.outcome.committed), step.draft.levels + subject.method.bonus
            steps, committed = steps + 1, committed + n
            full = n == due or (each.case.name == "equal" and n > 1 and _at_leaf(step.draft, step))
            if not full and not _explained(each, step, text):
                wrong += 1
                what = (
                    f"step {number} commits {n} of {due} tokens: {len(step.outcome.path)} of"
                    f" {step.draft.levels} draft tokens stand"
                )
                problem = problem or Problem(what, each.where, look)
    if problem is None and (sums := _too_few(bound)):
        wrong, problem = wrong + 1, Problem(sums, bound[0].where, look)
    figure = {"steps": steps, "mat": committed / steps if steps else 0.0, "short_steps": wrong}
    return Finding(check, not wrong, figure, problem), bound


def _is_twin(each: CaseRun, others: Sequence[CaseRun]) -> bool:
    """Return True if the draft of a case must be accepted as its target is.

    A draft may be worse than its model on purpose: then its q is another distribution than its
    model's, and its first token may be rejected in greedy decoding, too. A draft without a q has no
    such excuse. Under the coupled rule a draft need not share the noise. In greedy decoding nothing
    excuses a draft that reads wrong rows, or one whose first token is accepted less often than a
    guess would be.
    """
    rule, vocab = each.case.sampling.rule, each.case.tables[0].shape[-1]
    alike = [other for other in others if other.params == each.params]
    if each.case.sampling.draws:
        return all(step.draft is None or step.draft.q is not None for _, step, _ in each.drafting())
    first = [
        bool(step.outcome.path)
        for other in alike
        if other.case.sampling.rule == rule
        for _, step, _ in other.drafting()
    ]
    altered = any(other.alters_q for other in alike)
    if rule == "coupled":
        return all(first) and not altered
    if not altered:
        return True
    return any(other.session.misread for other in alike) or sum(first) * vocab <= len(first)


def _explained(each: CaseRun, step: Step, text: Sequence[int]) -> bool:
    """Return True if q, as the draft reports it, is not the target's distribution: then less than
    the whole draft is accepted, by sum min(p, q)."""
    assert step.draft is not None
    if not each.case.sampling.draws or step.draft.q is None:
        return False
    reference = Reference(each.case.tables[0], each.case.sampling)
    return expected_accepted(reference, text, step) < step.outcome.tested - SLACK


def _too_few(decoded: Sequence[CaseRun]) -> str | None:
    """Compare the draft tokens accepted under rejection with sum min(p, q) over all steps."""
    accepted, expected, tested = 0, 0.0, 0
    for each in decoded:
        if each.case.sampling.draws:
            reference = Reference(each.case.tables[0], each.case.sampling)
            for _, step, text in each.drafting():
                accepted += len(step.outcome.path)
                expected += expected_accepted(reference, text, step)
                tested += step.outcome.tested
    # A test's variance is 1/4 at most.
    if abs(accepted - expected) <= DEVIATIONS * (tested / 4) ** 0.5 + SLACK:
        return None
    seen, due = format_distinct(accepted, expected)
    return f"{seen} of {tested} tests accept, where sum min(p, q) is {due}"


def _mixed(subject: Subject, twins: Sequence[CaseRun]) -> Finding | None:
    """Check what is accepted behind rejected drafts, where the draft model is right at times.

    What a method accepts of its target's twin in greedy decoding, it must accept of another draft
    as far as that says what the target does. Steps that run no draft are left out.
    """
    greedy = [each for each in twins if each.case.sampling.rule == "greedy"]
    steps = accepted = 0
    problem: Problem | None = None
    for params in {passed(each.params): each.params for each in greedy}.values():
        for turn in range(TURNS):
            tables = pair("mixed", MIXED_VOCAB, seed=500 + 2 * turn)
            case = Case(PARTLY_EQUAL, tables, sampling_of("greedy", turn), budget=40)
            each = CaseRun.of(subject, params, case)
            if not each.by_tables:
                continue
            for number, step, text in each.drafting():
                assert step.draft is not None
                if all(forward.role != "draft" for forward in step.forwards):
                    continue
                steps, accepted = steps + 1, accepted + len(step.outcome.path)
                due = min(_agreed(each, text), step.draft.levels)
                n = len(step.outcome.path)
                if n < due and not (n and _at_leaf(step.draft, step)) and problem is None:
                    what = (
                        f"step {number} accepts {n} of {step.draft.levels} draft tokens, though the"
                        f" draft model says what the target does for {due}"
                    )
                    look = (
                        "what the draft reads behind a rejected draft: rows, features and indices"
                        " of the step before (`session.features`, `session.since`)"
                    )
                    problem = Problem(what, each.where, look)
    if not steps:
        return None
    figure = {"steps": steps, "accepted": accepted}
    return Finding("mixed draft", problem is None, figure, problem)


def _agreed(each: CaseRun, text: Sequence[int]) -> int:
    """Return for how many tokens behind a text the draft's table says what the target's does."""
    case = each.case
    target, draft = (Reference(table, case.sampling) for table in case.tables)
    before, last = text[-2:]
    first = len(text) - len(case.prompt)
    for n, noise in enumerate(target.noise(case.prompt_id, case.budget)[first:]):
        token = target.choice(before, last, noise)
        if token != draft.choice(before, last, noise):
            return n
        before, last = last, token
    return case.budget


def _at_leaf(draft: Draft, step: Step) -> bool:
    """Whether all stood that was drafted behind the nodes that stood."""
    last = step.outcome.path[-1] if step.outcome.path else ROOT
    return draft.parents is not None and last not in draft.parents


def _useless(subject: Subject) -> Finding | None:
    """A draft that only says what the target cannot: one token a step, the right ones."""
    steps = committed = seen = counted = 0
    problem: Problem | None = None
    for rule in RULES:
        for params in subject.promising(rule):
            for turn in range(TURNS):
                said = min(16, max(4, largest(params)))  # enough for the children of a node
                tables = pair("disjoint", 2 * said, seed=300 + 2 * turn)
                # Cuts could leave less than a node's children, and others fill up.
                sampling = replace(sampling_of(rule, turn), top_k=0, top_p=1.0)
                case = Case("disjoint", tables, sampling, prompt=(1, 0), budget=13)
                session = case.open()
                taken = list(subject.method(params).generate(session))
                seen += 1
                if not session.drafted_by_tables:
                    continue
                counted += 1
                for step in taken:
                    if all(forward.role != "draft" for forward in step.forwards):
                        continue  # it drafted by something else
                    steps, committed = steps + 1, committed + len(step.outcome.committed)
                    what = _stood(step)
                    if what and problem is None:
                        where = f"{passed(params)}; {case}"
                        look = "verification: these draft tokens have probability 0 in the target"
                        problem = Problem(what, where, look)
    if seen and not counted:
        return None
    figure = {"steps": steps, "mat": committed / steps if steps else 0.0}
    return Finding("useless draft", problem is None, figure, problem)


def _stood(step: Step) -> str | None:
    stood = len(step.outcome.path)
    if not stood and len(step.outcome.committed) == 1 and step.outcome.tested <= 1:
        return None
    ids = step.draft.tokens.tolist() if step.draft else "?"
    return (
        f"{stood} of the draft {ids} stand, {step.outcome.tested} levels tested,"
        f" {len(step.outcome.committed)} tokens committed, though the target can say none of them"
    )
