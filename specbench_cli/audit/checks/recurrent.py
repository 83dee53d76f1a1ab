"""Check of a method with recurrent models.

A recurrent state supports chain drafts only, and rollback only to the end of an earlier forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from specbench_cli.audit.cases import RULES, Case, add_eos, random_cases, reference_tokens
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import find_wrong_rows
from specbench_cli.audit.reference import truncate_output
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.models.decoder import ChainsOnly
from specbench_cli.engine.params import MethodParams

CASES = 6
"""Number of random tables for each parameter set and decoding rule."""

VARIANTS = 4

RECURRENT_HINT = (
    "the code after `state.rollback` and `session.commit`: `state.length()` may be smaller than"
    " requested. `session.pending_tokens(state.length())` returns the missing tokens"
)


def check_recurrent(subject: AuditSubject) -> list[Finding]:
    """Check outputs and states if the target, the draft or both are recurrent.

    Recurrent models reject trees and partial forwards of the target with `ChainsOnly`.
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
                wrong = wrong or _find_state_error(session, number)
        except ChainsOnly:
            refused += 1
            continue
        decodings += 1
        check = "recurrent"
        if wrong is None and not case.sampling.draws and session.output() != due:
            check, wrong = "tokens", f"the output is {list(session.output())} where {due} is due"
        if wrong is not None:
            problem = Problem(wrong, f"{format_params(params)}; {case}", RECURRENT_HINT)
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


def _find_state_error(session: ObservedSession, step: int) -> str | None:
    """Return a description of a state that is not a prefix of the text, or None."""
    for decoder, state, text in session.states():
        own = text is session.tokens()
        due = text[:-1] if own else text
        behind = decoder.name != "target"
        wrong = find_wrong_rows(state, due, decoder.first, longer=not own, behind=behind)
        if wrong is not None:
            return f"after step {step} the {decoder.name}'s state: {wrong}"
    return None
