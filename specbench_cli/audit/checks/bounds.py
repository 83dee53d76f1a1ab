"""Bounds that hold whatever a method's idea is: a draft that is the target itself, one that cannot
be right, and for methods that copy, a text that repeats itself.

A fault that costs speed and leaves every output right shows here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specbench_cli.audit.cases import Case, sampling_of
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.head import TableBlockHead, TableParallel
from specbench_cli.audit.models.table import pair, random_table, successor_table, sure_table
from specbench_cli.audit.subject import COPIES, Subject, largest, longest, passed
from specbench_cli.engine.models.head import SequentialHead
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Draft, Step
from specbench_cli.engine.verify.sampling import Rule
from specbench_cli.engine.verify.tree import ROOT

RULES: tuple[Rule, ...] = ("greedy", "coupled", "rejection")
TURNS = 4
"""Tables for each variant and rule."""

SURE = 2
"""As many tables again whose laws leave little doubt."""


def check_bounds(subject: Subject) -> list[Finding]:
    """The bounds that apply to a method."""
    findings: list[Finding | None] = []
    if subject.drafts:
        findings += [_twin(subject), _useless(subject)]
    if subject.name in COPIES:
        findings.append(_repeats(subject))
    return [finding for finding in findings if finding is not None]


def _twin(subject: Subject) -> Finding | None:
    """Draft equal to target: all levels stand, and a full step commits one token more.

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


def _repeats(subject: Subject) -> Finding | None:
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


def _full(
    subject: Subject,
    check: str,
    cases: Iterator[tuple[MethodParams, Case]],
    look: str,
    *,
    by_tables: bool = False,
) -> Finding | None:
    """Every step of every case drafts something, has all of it stand, and adds a bonus where the
    method has one.

    Args:
        by_tables: cases in which something else than tables drafted are no cases.
    Returns:
        None where no case is left of some.
    """
    steps = committed = wrong = 0
    problem: Problem | None = None
    decoded = []
    seen = 0
    for params, case in cases:
        session = case.open()
        taken = list(subject.method(params).generate(session))
        seen += 1
        # Only those that read the tokens drafted so far know what the target chose.
        guess = any(not isinstance(head, SequentialHead) for head in session.stateless)
        guess |= any(isinstance(model, TableParallel | TableBlockHead) for model, _ in session.held)
        blind = guess and case.sampling.rule != "greedy"
        if not by_tables or (session.drafted_by_tables and not blind):
            decoded.append((params, case, taken))
    if seen and not decoded:
        return None
    # A draft need not share the noise of the coupled rule. One that does has its first token stand
    # in every step, whatever the table.
    alone = [
        params
        for params, case, taken in decoded
        if case.sampling.rule == "coupled" and not _first_stands(taken)
    ]
    for params, case, taken in decoded:
        if not _is_bound(taken, case) or (case.sampling.rule == "coupled" and params in alone):
            continue
        for number, step in enumerate(taken, start=1):
            assert step.draft is not None
            n, due = len(step.outcome.committed), step.draft.levels + subject.method.bonus
            steps, committed = steps + 1, committed + n
            full = n == due or (case.name == "equal" and n > 1 and _at_leaf(step.draft, step))
            if number < len(taken) and not (full and step.draft.levels):
                wrong += 1
                what = (
                    f"step {number} commits {n} of {due} tokens: {len(step.outcome.path)} of"
                    f" {step.draft.levels} draft tokens stand"
                )
                problem = problem or Problem(what, f"{passed(params)}; {case}", look)
    figure = {"steps": steps, "mat": committed / steps if steps else 0.0, "short_steps": wrong}
    return Finding(check, not wrong, figure, problem)


def _first_stands(taken: Sequence[Step]) -> bool:
    return all(step.outcome.path or not step.draft.levels for step in taken if step.draft)


def _is_bound(taken: Sequence[Step], case: Case) -> bool:
    """Whether every draft token must stand.

    Under a rule that draws, chance decides where tokens were chosen without a draw; of siblings
    that were drawn the first to be tested stands.
    """
    drafts = [step.draft for step in taken]
    if None in drafts:
        return False
    return not case.sampling.draws or all(
        draft.q is not None for draft in drafts if draft and draft.nodes
    )


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
