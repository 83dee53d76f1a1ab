"""Exact check of output distribution and acceptance under the rejection and block rules.

All outcomes of random decoding are enumerated on small tables (`audit.enumeration`).

Leviathan et al. 2023 (arXiv:2211.17192), section 3.6 and appendix A.1: a draft token is accepted
with probability sum min(p, q), and committed tokens follow p. For trees see `overlap`.
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
"""Total variation, and difference of accepted tokens, that rounding explains."""

MAX_OUTCOMES = 500
"""Maximum number of outcomes of a case. A case with more outcomes is tried again with top-k 2, and
left out (and counted) if there are still more."""

OUTCOME_BUDGET: dict[Rule, int] = {"rejection": 4_000, "block": 1_000}
"""Maximum number of outcomes of a method by rule, distributed over its variants. Further cases are
left out, and counted."""

DEEP_BUDGET: dict[Rule, int] = {"rejection": 2_000, "block": 400}
"""Maximum number of outcomes of a method, for cases that are random only in the last draft
level."""

MAX_DEEP_LEVELS = 8
"""Maximum number of draft levels in such a case."""

MIN_DEEP_LEVELS = 5
"""Minimum number of draft levels in such a case."""

LATE_BUDGET: dict[Rule, int] = {"rejection": 1_500, "block": 500}
"""Maximum number of outcomes of a method, for cases that are random late in a draft or in a
text."""

MAX_FORKED_OUTCOMES = 1_000
"""Maximum number of outcomes of a case for draft trees, in which the text forks (`forked_case`)."""

FIRST_LATE_LEVEL = 3
"""First draft level that is tested by cases with randomness late in a draft."""

MAX_TRIES = 6
"""Maximum number of parameter sets to try for a case, until it has at most `MAX_OUTCOMES`."""

Output = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EnumeratedCase:
    """Enumerated outcomes of one case.

    Attributes:
        outcomes: number of outcomes.
        params: parameters of the method.
        distribution: probability of each output.
        accepted: mean number of accepted draft tokens.
        expected: expected number of accepted tokens, sum min(p, q). None under the block rule.
        has_steps: whether any step was taken.
    """

    case: Case
    params: MethodParams
    distribution: Distribution
    outcomes: int
    accepted: float
    expected: float | None
    has_steps: bool

    @property
    def description(self) -> str:
        """Description of the case for messages."""
        return f"{format_params(self.params)}; {self.case}"


def check_distribution(subject: AuditSubject) -> list[Finding]:
    """Check the joint distribution of the first tokens, and the number of accepted tokens.

    The distribution must equal the target's to 1e-9, and the accepted tokens sum min(p, q). If no
    case of a rule could be enumerated, the finding is not passed, with `shown` False.
    """
    enumerated: list[EnumeratedCase] = []
    left_out, too_large, rules_not_shown = 0, 0, list[str]()
    for rule, budget in OUTCOME_BUDGET.items():
        n, left_out_before = len(enumerated), left_out
        variants = list(_lossless_params(subject, rule, few_outcomes=True))
        left = {format_params(params): budget // len(variants) for params in variants}
        for params, case in _cases(subject, rule):
            share = format_params(params)
            due = left[share] > 0
            result = _enumerate_case(subject, params, case) if due else None
            if result is None and due:
                left[share] -= MAX_OUTCOMES  # the enumeration stopped at the limit
                if case.sampling.top_k != 2 and not case.is_narrow:
                    narrow = replace(case, sampling=replace(case.sampling, top_k=2))
                    result = _enumerate_case(subject, params, narrow)
            if result is None:
                left_out, too_large = left_out + 1, too_large + due
            else:
                enumerated.append(result)
                left[share] -= result.outcomes
        deep, left_out_too = _enumerate_deep_cases(subject, rule)
        enumerated, left_out = [*enumerated, *deep], left_out + left_out_too
        late, not_walked = _enumerate_late_cases(subject, rule)
        enumerated, left_out = [*enumerated, *late], left_out + len(not_walked)
        if left_out > left_out_before and not any(result.has_steps for result in enumerated[n:]):
            rules_not_shown.append(rule)
        else:
            rules_not_shown += [f"{rule}, {what}" for what in not_walked]
    if not enumerated and not left_out:
        return []
    distribution = _distribution_finding(enumerated, left_out, rules_not_shown)
    if left_out:
        why = (
            f"{too_large} cases have more than {MAX_OUTCOMES} outcomes; {left_out - too_large} were"
            " skipped because the parameters of the method share a limit on outcomes that was"
            " reached, or because they are deep or late cases that are too large"
        )
        distribution = replace(distribution, left_out=why)
    findings = [distribution]
    if any(result.expected for result in enumerated):
        findings.append(_acceptance_finding(enumerated))
    return findings


def _enumerate_deep_cases(subject: AuditSubject, rule: Rule) -> tuple[list[EnumeratedCase], int]:
    """Enumerate cases with the deepest drafts and the largest vocabulary.

    Returns:
        (enumerated cases, number of cases that were left out).
    """
    enumerated: list[EnumeratedCase] = []
    left_out, budget = 0, DEEP_BUDGET.get(rule, 0)
    whole = (
        subject.uses_head or subject.method(subject.variants[0]).learns
    )  # heads and learning methods read whole tables, which is slow
    short = [] if whole else islice(_lossless_params(subject, rule, few_outcomes=True), 1)
    cases: list[tuple[MethodParams, Sequence[Case]]]
    cases = [(params, [wide_case(rule)]) for params in short]
    for params in _lossless_params(subject, rule, single_changes=True):
        if max_draft_levels(params) >= MIN_DEEP_LEVELS:
            large, small = deep_cases(rule, min(max_draft_levels(params), MAX_DEEP_LEVELS))
            cases.append((params, [small] if params in subject.single_changes else [large, small]))
    for params, smaller in cases:
        tried = (_enumerate_case(subject, params, case) for case in smaller if budget > 0)
        result = next((result for result in tried if result is not None), None)
        if result is None:
            left_out += 1
        else:
            enumerated.append(result)
        budget -= ESTIMATE_EVERY * len(smaller) if result is None else result.outcomes
    return enumerated, left_out


def _enumerate_late_cases(
    subject: AuditSubject, rule: Rule
) -> tuple[list[EnumeratedCase], list[str]]:
    """Enumerate decisions late in a draft, late in a text, and after accepted or rejected drafts.

    Returns:
        (enumerated cases, names of the cases that had too many outcomes with all parameters).
    """
    everything = list(_lossless_params(subject, rule, single_changes=True))
    drafts = [params for params in everything if max_draft_levels(params) >= FIRST_LATE_LEVEL]
    drafts[1:] = sorted(drafts[1:], key=lambda params: _relative_size(params, drafts[0]))
    due: list[tuple[str, Case, Sequence[MethodParams]]] = []
    if drafts:
        deepest = min(max_draft_levels(drafts[0]), MAX_DEEP_LEVELS)
        for name, case in late_level_cases(rule, deepest):
            # Test all levels with those parameter sets that give deep drafts. The other sets test
            # one level each.
            due.append(
                (name, case, [params for params in drafts if max_draft_levels(params) >= deepest])
            )
    few_outcomes = list(_lossless_params(subject, rule, few_outcomes=True))
    short: Sequence[MethodParams] = few_outcomes or everything
    shapes = {format_params(params): params for params in (*everything[:1], *short)}.values()
    trees = [params for params in shapes if rule == "rejection" and _draws_trees(subject, params)]
    due = [*(("", forked_case(rule), [params]) for params in trees), *due]
    if short:
        output = subject.exceed_constants(LONG_OUTPUT, 200)
        due += [("steps after rejected drafts", case, short) for case in history_cases(rule)]
        due.append((f"outputs of {output} tokens", late_token_case(rule, output), short))
    for turn, params in enumerate(drafts[1:]):
        levels = list(late_level_cases(rule, min(max_draft_levels(params), MAX_DEEP_LEVELS)))
        due.append(("", levels[turn % len(levels)][1], [params]))
    enumerated: list[EnumeratedCase] = []
    missed: dict[str, None] = {}
    left = LATE_BUDGET.get(rule, 0)
    large: list[MethodParams] = []
    for name, case, fit in due:
        result = None
        for params in [each for each in fit if each not in large][:MAX_TRIES]:
            if result is None and left > 0:
                result = _enumerate_case(subject, params, case)
                left -= MAX_OUTCOMES // 10 if result is None else result.outcomes
                large += [params] if result is None and case.name == "track" else []
        if result is not None:
            enumerated.append(result)
        elif left > 0 and name and not _draws_trees(subject, fit[0]):
            missed[name] = None  # a draft tree has many outcomes even if its model is certain
    return enumerated, list(missed)


def _relative_size(params: MethodParams, default: MethodParams) -> float:
    """Return how much larger integer parameters are than the defaults, as the product of the
    ratios.
    """
    values, size = default.model_dump(), 1.0
    for name, value in params.model_dump().items():
        if type(value) is int and type(values[name]) is int:
            size *= (value + 1) / (values[name] + 1)
    return size


def _cases(subject: AuditSubject, rule: Rule) -> Iterator[tuple[MethodParams, Case]]:
    """Yield each case with every variant of the parameters.

    Each variant starts with another case. So all cases are tested even if time allows only few
    pairs.
    """
    variants = list(_lossless_params(subject, rule, few_outcomes=True))
    cases = []
    for turn, params in enumerate(variants):
        due = list(enumerated_cases(rule, include_costly=max_draft_levels(params) < 2))
        first = turn % len(due)
        cases.append([*due[first:], *due[:first]])
    for row in zip_longest(*cases):
        for params, case in zip(variants, row, strict=True):
            if case is not None:
                yield params, case


def _lossless_params(subject: AuditSubject, rule: Rule, **which: bool) -> Iterator[MethodParams]:
    """Yield parameters that are lossless under a rule. The block rule supports chains only."""
    for params in subject.lossless_params(rule, **which):
        if rule != "block" or not _draws_trees(subject, params):
            yield params


def _draws_trees(subject: AuditSubject, params: MethodParams) -> bool:
    case = next(enumerated_cases("rejection", include_costly=False))
    return any(
        step.draft is not None and step.draft.parents is not None
        for step in subject.method(params).generate(case.open())
    )


NO_TOKEN = -1
"""Token id that marks a draw from an invalid distribution."""


def _enumerate_case(
    subject: AuditSubject, params: MethodParams, case: Case
) -> EnumeratedCase | None:
    reference = Reference(case.tables[0], case.sampling)
    other = case.sampling.rule != "rejection"
    kept = case.warm_up(subject.method(params)) or {"workspace": case.create_workspace()}
    saved_memory = kept["memory"].save() if "memory" in kept else None

    stepped = False

    def run(random: Random) -> tuple[Output, int, float]:
        nonlocal other, stepped
        if saved_memory is not None:  # every outcome starts from the same memory
            kept["memory"].restore(saved_memory)
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
            return (*session.output()[: case.length], NO_TOKEN), accepted, expected
        return tuple(session.output()[: case.length]), accepted, expected

    try:
        found = list(
            enumerate_outcomes(run, MAX_FORKED_OUTCOMES if case.name == "forked" else MAX_OUTCOMES)
        )
    except TooManyOutcomes:
        return None
    distribution = sum_weights((output, weight) for (output, _, _), weight in found)
    accepted = sum(weight * n_accepted for (_, n_accepted, _), weight in found)
    expected = sum(weight * n_expected for (_, _, n_expected), weight in found)
    return EnumeratedCase(
        case, params, distribution, len(found), accepted, None if other else expected, stepped
    )


def _distribution_finding(
    enumerated: list[EnumeratedCase], left_out: int, rules_not_shown: Sequence[str]
) -> Finding:
    measured = [
        (total_variation(result.distribution, _target_distribution(result.case)), result)
        for result in enumerated
    ]
    figure: Mapping[str, float] = {
        **({"total_variation": max(tv for tv, _ in measured)} if measured else {}),
        "outcomes": sum(result.outcomes for result in enumerated),
        "cases": len(enumerated),
        "cases_left_out": left_out,
    }
    wrong = [(tv, result) for tv, result in measured if tv > EXACT]
    if not wrong and rules_not_shown:
        what = (
            f"not shown under {' and '.join(rules_not_shown)}: each case has more than"
            f" {MAX_OUTCOMES} outcomes, and was left out"
        )
        look = (
            "unnecessary random draws of the method. If there are none, lower the bounds of its"
            " parameters so that short drafts are possible"
        )
        problem = Problem(what, f"all {left_out} cases", look)
        return Finding("distribution", False, figure, problem, shown=False)
    if not wrong:
        return Finding("distribution", True, figure)
    tv, worst = max(wrong, key=lambda pair: pair[0])
    truth = _target_distribution(worst.case)
    token = _first_wrong_token(worst.distribution, truth)
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
        "distribution",
        False,
        figure,
        Problem(what, worst.description, _suggest_cause(wrong, measured, token)),
    )


def _target_distribution(case: Case) -> Distribution:
    length = min(case.length, case.budget)
    return Reference(case.tables[0], case.sampling).joint_distribution(
        case.prompt, case.eos, length
    )


def _first_wrong_token(distribution: Distribution, truth: Distribution) -> int:
    """Return the first output position, from 1, at which the two distributions differ."""
    longest_output = max(len(str_) for str_ in map(_as_tuple, {*distribution, *truth}))
    for n in range(1, longest_output + 1):
        actual, due = (
            sum_weights((_as_tuple(o)[:n], w) for o, w in x.items()) for x in (distribution, truth)
        )
        if total_variation(actual, due) > EXACT:
            return n
    return longest_output


def _as_tuple(output: object) -> Output:
    assert isinstance(output, tuple)
    return output


def _suggest_cause(
    wrong: list[tuple[float, EnumeratedCase]],
    measured: list[tuple[float, EnumeratedCase]],
    token: int,
) -> str:
    """Return which code of the method to look at first. It depends on the cases that are wrong."""
    right = [result for tv, result in measured if tv <= EXACT]
    cases = [result.case for _, result in wrong]
    if token == 1:
        return "the prefill, because the first token does not depend on verification"
    if all(case.eos for case in cases) and any(not result.case.eos for result in right):
        return "tokens after an EOS inside a draft: none may be committed"
    if _is_warped_only(cases) and any(not _is_warped_only([result.case]) for result in right):
        return (
            "a distribution to which temperature, top-k and top-p were not applied: get p from"
            " `session.warp`, and each drawn token with its q from `session.pick`"
        )
    return (
        "q, which must be the distribution that each draft token was drawn from (`session.pick`"
        " returns the token and its q; None for tokens chosen without a draw). Also check that a"
        " draft does not depend on later draws and, if the method has its own verification, the"
        " residual distribution and the bonus token"
    )


def _is_warped_only(cases: list[Case]) -> bool:
    plain = [c.sampling for c in cases]
    return all(s.temperature != 1.0 or s.top_k or s.top_p < 1.0 for s in plain)


def _acceptance_finding(enumerated: list[EnumeratedCase]) -> Finding:
    levels = [result for result in enumerated if result.expected is not None]
    errors = [(abs(w.accepted - w.expected), w) for w in levels if w.expected is not None]
    error, worst = max(errors, key=lambda pair: pair[0])
    figure = {
        "error": error,
        "accepted": sum(result.accepted for result in levels),
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
        "the q that verification gets: a wrong q, or none for drawn tokens, reduces acceptance even"
        " if the output distribution is right"
        if share < 0
        else "the counts of tested and accepted levels; more than sum min(p, q) cannot be accepted"
    )
    return Finding("acceptance", False, figure, Problem(what, worst.description, look))
