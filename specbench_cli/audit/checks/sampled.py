"""Goodness-of-fit test of long outputs that are sampled with the real random generator.

Enumeration of outcomes replaces the generator by a script. This check tests the generator itself.
The target is a Markov chain, so the tokens after each token are independent draws from one
distribution, however many tokens a step commits. The check uses Pearson's statistic over all rows
of the transition matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from scipy.stats import chi2

from specbench_cli.audit.cases import Case
from specbench_cli.audit.finding import Finding, Problem, format_distinct
from specbench_cli.audit.models.table import random_table
from specbench_cli.audit.reference import Reference
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.verify.sampling import Sampling

TOKENS = 4_000
"""Number of sampled tokens."""

MIN_P_VALUE = 1e-6
"""Minimum p-value to pass. The seed is fixed, so the result is reproducible."""


INDEPENDENT_DRAWS: dict[str, dict[str, Any]] = {
    "pass 2": {"pass_": 2},
    "seed 1": {"seed": 1},
    "another prompt's name": {"prompt_id": "table/1"},
}
"""Changes that must give an independent output."""

REDRAWN_TOKENS = 100
"""Number of tokens that are compared. Two independent outputs of this length are never equal."""


FLAT_TEMPERATURE = 3.0
"""Sampling temperature of these outputs. At a low one, both could repeat one likely token."""


def check_generator(subject: AuditSubject) -> list[Finding]:
    """Test one long sample, and that another pass, seed or prompt gives an independent output.

    The parameters are those with the longest draft.
    """
    chosen = max(subject.lossless_params("rejection"), key=max_draft_levels, default=None)
    if chosen is None:
        return []
    p, counts, case = sample_transitions(subject, chosen, seed=0, tokens=TOKENS)
    figure = {"p_value": p, "tokens": sum(map(sum, counts))}
    if p < MIN_P_VALUE:
        return [_alarm_finding(figure, counts, case, chosen)]
    first = _sample_output(subject, chosen, case)
    for name, changed in INDEPENDENT_DRAWS.items():
        if _sample_output(subject, chosen, case, **changed) == first:
            what = f"{name} gives the same {len(first)} tokens as pass 1 with seed 0"
            look = (
                "the random seed, which must depend on (seed, prompt, turn, pass): `session.random`"
            )
            problem = Problem(what, f"{format_params(chosen)}; {case}", look)
            return [Finding("generator", False, figure, problem)]
    return [Finding("generator", True, figure)]


def _sample_output(
    subject: AuditSubject,
    params: MethodParams,
    case: Case,
    pass_: int = 1,
    seed: int = 0,
    prompt_id: str = "table/0",
) -> Sequence[int]:
    """Return a sampled output of `REDRAWN_TOKENS` tokens for a pass, a seed and a prompt."""
    distribution = replace(case.sampling, seed=seed, temperature=FLAT_TEMPERATURE)
    session = replace(case, sampling=distribution, budget=REDRAWN_TOKENS, prompt_id=prompt_id).open(
        pass_=pass_
    )
    for _ in subject.method(params).generate(session):
        pass
    return session.output()


def sample_transitions(
    subject: AuditSubject, params: MethodParams, *, seed: int, tokens: int
) -> tuple[float, list[list[int]], Case]:
    """Sample an output and test its transitions.

    Returns:
        (p-value, counts [V][V] of a token after a token, the case).
    """
    vocab = 3
    tables = [random_table(vocab, 41 + which, 1.2) for which in range(2)]
    target, draft = (table[:1].expand(vocab, -1, -1) for table in tables)
    distribution = Sampling("rejection", 0.9, seed=seed)
    case = Case("Markov", (target, draft), distribution, prompt=(1, 0), budget=tokens)
    session = case.open()
    for _ in subject.method(params).generate(session):
        pass
    counts = [[0] * vocab for _ in range(vocab)]
    text = (case.prompt[-1], *session.output())
    for last, token in pairwise(text):
        counts[last][token] += 1
    reference = Reference(target, distribution)
    return (
        pearson_p_value(counts, [reference.distribution(0, last) for last in range(vocab)]),
        counts,
        case,
    )


def pearson_p_value(
    counts: Sequence[Sequence[int]], distributions: Sequence[Sequence[float]]
) -> float:
    """Return the p-value of counts, each row drawn from its own distribution."""
    statistic, freedom = 0.0, 0
    for row, distribution in zip(counts, distributions, strict=True):
        n = sum(row)
        if n == 0:
            continue
        statistic += sum(
            (seen - n * p) ** 2 / (n * p) for seen, p in zip(row, distribution, strict=True)
        )
        freedom += len(distribution) - 1
    return float(chi2.sf(statistic, freedom))


def _alarm_finding(
    figure: dict[str, float], counts: list[list[int]], case: Case, params: MethodParams
) -> Finding:
    reference = Reference(case.tables[0], case.sampling)
    shares = [
        (seen / sum(row) - p, last, token, seen / sum(row), p)
        for last, row in enumerate(counts)
        for token, (seen, p) in enumerate(zip(row, reference.distribution(0, last), strict=True))
        if sum(row)
    ]
    _, last, token, share, p = max(shares, key=lambda found: abs(found[0]))
    seen, due = format_distinct(share, p)
    what = (
        f"{figure['tokens']:g} sampled tokens do not follow the target's distribution"
        f" (p = {figure['p_value']:.2g}): after {last}, {token} has frequency {seen}, but"
        f" probability {due} under the target"
    )
    look = (
        "the random numbers: each decision needs a new one (`session.random`, `session.pick`). If"
        " the check `distribution` fails too, look there first"
    )
    return Finding(
        "generator", False, figure, Problem(what, f"{format_params(params)}; {case}", look)
    )
