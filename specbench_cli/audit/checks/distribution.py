"""The output's distribution under rejection: exact, by walking all of a method's chance; and its
acceptance.

Leviathan et al. 2023 (arXiv:2211.17192), section 3.6 and appendix A.1: a draft token stands with
probability sum min(p, q), and whatever is committed follows p. Trees: see `overlap`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

from specbench_cli.audit.cases import (
    LONG_OUTPUT,
    Case,
    deep_cases,
    enumerated_cases,
    forked_case,
    history_cases,
    late_level_cases,
    late_token_case,
    wide_case,
)
from specbench_cli.audit.checks.overlap import expected_accepted
from specbench_cli.audit.enumeration import (
    ESTIMATE_EVERY,
    Distribution,
    InvalidDistribution,
    TooManyOutcomes,
    enumerate_outcomes,
    sum_weights,
    total_variation,
)
from specbench_cli.audit.finding import Finding, Problem, format_distinct
from specbench_cli.audit.reference import Reference
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Rule
from specbench_cli.engine.verify.random import Random

EXACT = 1e-9
"""Total variation, and tokens accepted, that sums of floating-point numbers explain."""

MOST = 500
"""Outcomes of one case that are walked; one that has more is walked under a top-k cut of 2, where
that leaves fewer, and left out (and counted) if there are still more."""

BUDGET: dict[Rule, int] = {"rejection": 4_000, "block": 1_000}
"""Outcomes of one method that are walked under a rule, shared out among its variants; cases beyond
are left out, and counted."""

DEEP: dict[Rule, int] = {"rejection": 2_000, "block": 400}
"""The same for cases whose chance is all in a draft's last level: walked until so many are done."""

DEEPEST = 8
"""Levels of such a draft at most, `AT_LEAST` at least."""

AT_LEAST = 5

LATE: dict[Rule, int] = {"rejection": 1_500, "block": 500}
"""The same limit for cases with late levels, late tokens and histories."""

FORKED = 1_000
"""Maximum number of outcomes that are enumerated for trees with two nodes in a level."""

TIED = 3
"""First level that is enumerated together with earlier levels."""

TRIES = 6
"""Number of parameter sets that are tried until a case has few enough outcomes."""

Output = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """All outcomes of one case.

    accepted, expected: draft tokens that stood, and that should have, in the mean; None where
    drafts are judged as blocks, which no sum over single levels describes.
    """

    case: Case
    params: MethodParams
    distribution: Distribution
    paths: int
    accepted: float
    expected: float | None
    stepped: bool

    @property
    def where(self) -> str:
        """The case in words."""
        return f"{format_params(self.params)}; {self.case}"


def check_distribution(subject: AuditSubject) -> list[Finding]:
    """The joint distribution of the first tokens, to 1e-9; and what is accepted, against sum min(p,
    q).

    A rule for which no case could be enumerated is a finding of its own: nothing is shown of it.
    """
    walks: list[Walk] = []
    left_out, too_large, unseen = 0, 0, list[str]()
    for rule, budget in BUDGET.items():
        n, so_far = len(walks), left_out
        variants = list(_promising(subject, rule, few_outcomes=True))
        left = {format_params(params): budget // len(variants) for params in variants}
        for params, case in _cases(subject, rule):
            share = format_params(params)
            due = left[share] > 0
            walked = _walk(subject, params, case) if due else None
            if walked is None and due:
                left[share] -= MOST  # walked in vain
                if case.sampling.top_k != 2 and not case.is_narrow:
                    narrow = replace(case, sampling=replace(case.sampling, top_k=2))
                    walked = _walk(subject, params, narrow)
            if walked is None:
                left_out, too_large = left_out + 1, too_large + due
            else:
                walks.append(walked)
                left[share] -= walked.paths
        deep, left_out_too = _deep(subject, rule)
        walks, left_out = [*walks, *deep], left_out + left_out_too
        late, not_walked = _late_walks(subject, rule)
        walks, left_out = [*walks, *late], left_out + len(not_walked)
        if left_out > so_far and not any(walked.stepped for walked in walks[n:]):
            unseen.append(rule)
        else:
            unseen += [f"{rule}, {what}" for what in not_walked]
    if not walks and not left_out:
        return []
    distribution = _distribution(walks, left_out, unseen)
    if left_out:
        why = (
            f"{too_large} cases have more than {MOST} outcomes; {left_out - too_large} were skipped"
            " because the parameters of the method share a limit on outcomes that was reached, or"
            " because they are deep or late cases that are too large"
        )
        distribution = replace(distribution, left_out=why)
    findings = [distribution]
    if any(walked.expected for walked in walks):
        findings.append(_acceptance(walks))
    return findings


def _deep(subject: AuditSubject, rule: Rule) -> tuple[list[Walk], int]:
    """Walks of the longest drafts and of the largest vocabulary, and how many were left out."""
    walks: list[Walk] = []
    left_out, budget = 0, DEEP.get(rule, 0)
    whole = (
        subject.uses_head or subject.method(subject.variants[0]).learns
    )  # who reads tables whole
    short = [] if whole else islice(_promising(subject, rule, few_outcomes=True), 1)
    cases: list[tuple[MethodParams, Sequence[Case]]]
    cases = [(params, [wide_case(rule)]) for params in short]
    for params in _promising(subject, rule, single_changes=True):
        if max_draft_levels(params) >= AT_LEAST:
            large, small = deep_cases(rule, min(max_draft_levels(params), DEEPEST))
            cases.append((params, [small] if params in subject.single_changes else [large, small]))
    for params, smaller in cases:
        tried = (_walk(subject, params, case) for case in smaller if budget > 0)
        walked = next((walk for walk in tried if walk is not None), None)
        if walked is None:
            left_out += 1
        else:
            walks.append(walked)
        budget -= ESTIMATE_EVERY * len(smaller) if walked is None else walked.paths
    return walks, left_out


def _late_walks(subject: AuditSubject, rule: Rule) -> tuple[list[Walk], list[str]]:
    """Enumerate decisions late in a draft, late in a text, and after accepted or rejected drafts.

    Returns:
        The walks, and the names of the cases that no parameters could enumerate.
    """
    everything = list(_promising(subject, rule, single_changes=True))
    drafts = [params for params in everything if max_draft_levels(params) >= TIED]
    drafts[1:] = sorted(drafts[1:], key=lambda params: _size(params, drafts[0]))
    due: list[tuple[str, Case, Sequence[MethodParams]]] = []
    if drafts:
        deepest = min(max_draft_levels(drafts[0]), DEEPEST)
        for name, case in late_level_cases(rule, deepest):
            # A few parameter sets cover each level here. The others get one level each, below.
            due.append(
                (name, case, [params for params in drafts if max_draft_levels(params) >= deepest])
            )
    few_outcomes = list(_promising(subject, rule, few_outcomes=True))
    short: Sequence[MethodParams] = few_outcomes or everything
    shapes = {format_params(params): params for params in (*everything[:1], *short)}.values()
    trees = [params for params in shapes if rule == "rejection" and _draws_trees(subject, params)]
    due = [*(("", forked_case(rule), [params]) for params in trees), *due]
    if short:
        output = subject.exceed_constants(LONG_OUTPUT, 200)
        due += [("steps after rejected drafts", case, short) for case in history_cases(rule)]
        due.append((f"outputs of {output} tokens", late_token_case(rule, output), short))
    for turn, params in enumerate(drafts[1:]):
        levels = list(late_level_cases(rule, min(max_draft_levels(params), DEEPEST)))
        due.append(("", levels[turn % len(levels)][1], [params]))
    walks: list[Walk] = []
    missed: dict[str, None] = {}
    left = LATE.get(rule, 0)
    large: list[MethodParams] = []
    for name, case, fit in due:
        walked = None
        for params in [each for each in fit if each not in large][:TRIES]:
            if walked is None and left > 0:
                walked = _walk(subject, params, case)
                left -= MOST // 10 if walked is None else walked.paths
                large += [params] if walked is None and case.name == "track" else []
        if walked is not None:
            walks.append(walked)
        elif left > 0 and name and not _draws_trees(subject, fit[0]):
            missed[name] = None  # trees draw siblings even if their model is certain
    return walks, list(missed)


def _size(params: MethodParams, default: MethodParams) -> float:
    """Return the product of all integer parameters, each relative to its default."""
    values, size = default.model_dump(), 1.0
    for name, value in params.model_dump().items():
        if type(value) is int and type(values[name]) is int:
            size *= (value + 1) / (values[name] + 1)
    return size


def _cases(subject: AuditSubject, rule: Rule) -> Iterator[tuple[MethodParams, Case]]:
    """Case by case, each with every variant; each variant begins with another, so that where the
    budget is short they meet them all together."""
    variants = list(_promising(subject, rule, few_outcomes=True))
    cases = []
    for turn, params in enumerate(variants):
        due = list(enumerated_cases(rule, include_costly=max_draft_levels(params) < 2))
        first = turn % len(due)
        cases.append([*due[first:], *due[:first]])
    for row in zip_longest(*cases):
        for params, case in zip(variants, row, strict=True):
            if case is not None:
                yield params, case


def _promising(subject: AuditSubject, rule: Rule, **which: bool) -> Iterator[MethodParams]:
    """Parameters that promise something under a rule; the block rule takes chains only."""
    for params in subject.lossless_params(rule, **which):
        if rule != "block" or not _draws_trees(subject, params):
            yield params


def _draws_trees(subject: AuditSubject, params: MethodParams) -> bool:
    case = next(enumerated_cases("rejection", include_costly=False))
    return any(
        step.draft is not None and step.draft.parents is not None
        for step in subject.method(params).generate(case.open())
    )


UNDRAWN = -1
"""Stands, in an output, for a token that had no distribution to be drawn from."""


def _walk(subject: AuditSubject, params: MethodParams, case: Case) -> Walk | None:
    reference = Reference(case.tables[0], case.sampling)
    other = case.sampling.rule != "rejection"
    kept = case.warm_up(subject.method(params)) or {"workspace": case.create_workspace()}
    learnt = kept["memory"].save() if "memory" in kept else None

    stepped = False

    def run(random: Random) -> tuple[Output, int, float]:
        nonlocal other, stepped
        if learnt is not None:  # every outcome begins with the same version
            kept["memory"].restore(learnt)
        session = case.open(random=random, **kept)
        accepted, expected = 0, 0.0
        try:
            for step in subject.method(params).generate(session):
                accepted, stepped = accepted + len(step.outcome.path), True
                if step.draft is None:
                    other = True
                elif not other:
                    text = session.tokens()
                    before = text[: len(text) - len(step.outcome.committed)]
                    expected += expected_accepted(reference, before, step)
                if len(session.output()) >= case.length:
                    break
        except InvalidDistribution:
            return (*session.output()[: case.length], UNDRAWN), accepted, expected
        return tuple(session.output()[: case.length]), accepted, expected

    try:
        found = list(enumerate_outcomes(run, FORKED if case.name == "forked" else MOST))
    except TooManyOutcomes:
        return None
    distribution = sum_weights((output, weight) for (output, _, _), weight in found)
    accepted = sum(weight * stood for (_, stood, _), weight in found)
    expected = sum(weight * should for (_, _, should), weight in found)
    return Walk(
        case, params, distribution, len(found), accepted, None if other else expected, stepped
    )


def _distribution(walks: list[Walk], left_out: int, unseen: Sequence[str]) -> Finding:
    measured = [
        (total_variation(walked.distribution, _truth(walked.case)), walked) for walked in walks
    ]
    figure: Mapping[str, float] = {
        **({"total_variation": max(tv for tv, _ in measured)} if measured else {}),
        "outcomes": sum(walked.paths for walked in walks),
        "cases": len(walks),
        "cases_left_out": left_out,
    }
    wrong = [(tv, walked) for tv, walked in measured if tv > EXACT]
    if not wrong and unseen:
        what = (
            f"not shown under {' and '.join(unseen)}: each case has more outcomes than the {MOST}"
            " that are walked, and was left out"
        )
        look = (
            "draws that decide nothing, or more of them than tokens need; else give its parameters"
            " lower bounds that allow short drafts"
        )
        problem = Problem(what, f"all {left_out} cases", look)
        return Finding("distribution", False, figure, problem, shown=False)
    if not wrong:
        return Finding("distribution", True, figure)
    tv, worst = max(wrong, key=lambda pair: pair[0])
    truth = _truth(worst.case)
    token = _first_wrong(worst.distribution, truth)
    output = max(
        {*worst.distribution, *truth},
        key=lambda o: abs(worst.distribution.get(o, 0) - truth.get(o, 0)),
    )
    seen, due = format_distinct(worst.distribution.get(output, 0.0), truth.get(output, 0.0))
    what = (
        f"the distribution of the output is not the target's: total variation {tv:.3g},"
        f" allowed {EXACT:g};"
        f" {len(wrong)} of {len(measured)} cases. Wrong from output token {token} on: {output}"
        f" has probability {seen}, but {due} under the target"
    )
    return Finding(
        "distribution", False, figure, Problem(what, worst.where, _look(wrong, measured, token))
    )


def _truth(case: Case) -> Distribution:
    length = min(case.length, case.budget)
    return Reference(case.tables[0], case.sampling).joint_distribution(
        case.prompt, case.eos, length
    )


def _first_wrong(distribution: Distribution, truth: Distribution) -> int:
    """The first output token, from 1, up to which the two distributions differ."""
    longest_output = max(len(str_) for str_ in map(_as_tuple, {*distribution, *truth}))
    for n in range(1, longest_output + 1):
        begun, due = (
            sum_weights((_as_tuple(o)[:n], w) for o, w in x.items()) for x in (distribution, truth)
        )
        if total_variation(begun, due) > EXACT:
            return n
    return longest_output


def _as_tuple(output: object) -> Output:
    assert isinstance(output, tuple)
    return output


def _look(wrong: list[tuple[float, Walk]], measured: list[tuple[float, Walk]], token: int) -> str:
    """Where to look first, from which cases are wrong and which are right."""
    right = [walked for tv, walked in measured if tv <= EXACT]
    cases = [walked.case for _, walked in wrong]
    if token == 1:
        return "the prefill: verification has decided nothing yet"
    if all(case.eos for case in cases) and any(not walked.case.eos for walked in right):
        return "what comes behind an EOS inside a draft: nothing may"
    if _is_warped_only(cases) and any(not _is_warped_only([walked.case]) for walked in right):
        return (
            "a distribution without the temperature and the cuts: take p from"
            " `session.warp`, and each drawn"
            " token with its q from `session.pick`"
        )
    return (
        "q, which must be the very distribution that each draft token was drawn from"
        " (`session.pick` gives"
        " both; None for tokens chosen without a draw); whether what was drafted depends on what"
        " was drawn later; and, if the method verifies by itself, its residual and bonus"
    )


def _is_warped_only(cases: list[Case]) -> bool:
    plain = [c.sampling for c in cases]
    return all(s.temperature != 1.0 or s.top_k or s.top_p < 1.0 for s in plain)


def _acceptance(walks: list[Walk]) -> Finding:
    levels = [walked for walked in walks if walked.expected is not None]
    errors = [(abs(w.accepted - w.expected), w) for w in levels if w.expected is not None]
    error, worst = max(errors, key=lambda pair: pair[0])
    figure = {
        "error": error,
        "accepted": sum(walked.accepted for walked in levels),
        "cases": len(levels),
    }
    if error <= EXACT:
        return Finding("acceptance", True, figure)
    share = worst.accepted - (worst.expected or 0.0)
    seen, due = format_distinct(worst.accepted, worst.expected or 0.0)
    what = (
        f"{seen} draft tokens are accepted on average, but sum min(p, q) over the tested levels (of"
        f" a tree, over its siblings in turn) is {due}"
    )
    look = (
        "the q handed to verification: a wrong one, or none for drawn tokens, costs acceptance even"
        " where the distribution stays right"
        if share < 0
        else "the counts of tested and accepted levels; more than sum min(p, q) cannot stand"
    )
    return Finding("acceptance", False, figure, Problem(what, worst.where, look))
