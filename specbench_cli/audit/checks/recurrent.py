"""A method on models that remember no rows: chains only, and states that return to ends of
forwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from specbench_cli.audit.cases import RULES, Case, add_eos, random_cases, reference_tokens
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import rows_out_of_place
from specbench_cli.audit.reference import truncate_output
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.models.decoder import ChainsOnly
from specbench_cli.engine.params import MethodParams

CASES = 6
"""Random tables for each variant and rule."""

VARIANTS = 4

LOOK = (
    "what follows `state.rollback` and `session.commit`: `state.length()` may be less than was"
    " asked for, and `session.pending_tokens(state.length())` is what such a state lacks"
)


def check_recurrent(subject: AuditSubject) -> list[Finding]:
    """Outputs and states where the target, the draft or both are recurrent.

    What drafts trees, or halts the target's forward, is refused by such models, in so many words.
    """
    decodings = refused = 0
    for params, turn, endless in _cases(subject):
        longest_output = reference_tokens(endless, endless.budget)
        case = add_eos(endless, longest_output, turn)
        due = truncate_output(longest_output, case.eos, case.budget)
        session = case.open(reference=due)
        wrong = None
        try:
            for number, _ in enumerate(subject.method(params).generate(session), start=1):
                wrong = wrong or _stale(session, number)
        except ChainsOnly:
            refused += 1
            continue
        decodings += 1
        check = "recurrent"
        if wrong is None and not case.sampling.draws and session.output() != due:
            check, wrong = "tokens", f"the output is {list(session.output())} where {due} is due"
        if wrong is not None:
            problem = Problem(wrong, f"{format_params(params)}; {case}", LOOK)
            return [Finding(check, False, {"decodings": decodings}, problem)]
    if not decodings:
        return []
    return [Finding("recurrent", True, {"decodings": decodings, "refused": refused})]


def _cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, int, Case]]:
    kinds = [frozenset({"target"}), frozenset({"draft"}), frozenset({"target", "draft"})]
    if "draft" not in subject.method.needs:
        kinds = kinds[:1]
    for rule in RULES:
        for params in islice(subject.lossless_params(rule), VARIANTS):
            for turn, case in enumerate(
                random_cases(rule, CASES, max_draft_levels(params, default=5))
            ):
                budget = max(case.budget, 8)
                recurrent = kinds[turn % len(kinds)]
                yield params, turn, replace(case, budget=budget, recurrent=recurrent)


def _stale(session: ObservedSession, step: int) -> str | None:
    """What is wrong with a state after a step: each holds what the text begins with."""
    for decoder, state, text in session.states():
        own = text is session.tokens()
        due = text[:-1] if own else text
        behind = decoder.name != "target"
        wrong = rows_out_of_place(state, due, decoder.first, beyond=not own, behind=behind)
        if wrong is not None:
            return f"after step {step} the {decoder.name}'s state: {wrong}"
    return None
