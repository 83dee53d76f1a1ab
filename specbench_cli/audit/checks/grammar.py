"""Check that outputs under a grammar (`--grammar`) equal plain decoding under that grammar.

The test grammar forbids one token, which depends on the whole output so far. So a method that masks
a row of logits for another text emits a wrong token sooner or later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from specbench_cli.audit.cases import EXACT_RULES, Case, random_cases
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.reference import Reference, truncate_output, warp_logits
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.verify.grammar import GrammarMask

CASES = 8
"""Number of random tables for each parameter set and decoding rule."""

VARIANTS = 6

EOS_PENALTY = 3.0
"""Amount by which the logits of the EOS token are reduced."""

MIN_TOKENS = 12
"""Minimum budget in tokens."""

GRAMMAR_HINT = (
    "tokens that the method chooses without `session.verify`. Only `session.verify` applies the"
    " grammar; the logits of `session.score` are not masked"
)


def forbidden_token(output: Sequence[int], vocab: int) -> int:
    """Return the one token that the grammar forbids after an output."""
    return (3 * sum(output) + 2 * len(output) + 1) % vocab


def check_grammar(subject: AuditSubject) -> list[Finding]:
    """Check that every output under a grammar equals plain decoding without forbidden tokens."""
    compared = 0
    for params, case in _cases(subject):
        due = reference_output(case)
        method = subject.method(params)
        session = case.open(reference=due, **case.warm_up(method))
        for _ in method.generate(session):
            pass
        compared += 1
        if list(session.output()) != due:
            what = f"the output is {list(session.output())} where {due} is due under the grammar"
            problem = Problem(
                what, f"{format_params(params)}; {case}, under a grammar", GRAMMAR_HINT
            )
            return [Finding("grammar", False, {"outputs": compared}, problem)]
    return [Finding("grammar", True, {"outputs": compared})] if compared else []


def _cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, Case]]:
    for rule in EXACT_RULES:
        for params in islice(subject.lossless_params(rule), VARIANTS):
            for case in random_cases(rule, CASES, max_draft_levels(params, default=5)):
                yield params, add_grammar(case)


def add_grammar(case: Case) -> Case:
    """Return the case under the grammar, with an EOS token and a budget to reach it."""
    target, draft = case.tables
    end = target.shape[-1] - 1
    target = target.clone()
    target[..., end] -= EOS_PENALTY
    mask = GrammarMask(ReferenceMatcher(end + 1), [end])
    return replace(
        case,
        tables=(target, draft),
        eos=(end,),
        budget=max(case.budget, MIN_TOKENS),
        sampling=replace(case.sampling, processor=mask),
    )


def reference_output(case: Case) -> list[int]:
    """Return the output of plain decoding, from the table and `forbidden_token` only."""
    sampling, vocab = replace(case.sampling, processor=None), case.tables[0].shape[-1]
    noise = Reference(case.tables[0], sampling).noise(case.prompt_id, case.budget)
    output: list[int] = []
    for gumbel in noise:
        before, last = (*case.prompt, *output)[-2:]
        row: list[float] = case.tables[0][before, last].tolist()
        row[forbidden_token(output, vocab)] = -math.inf
        if sampling.rule == "coupled":
            distribution = warp_logits(row, sampling)
            row = [
                math.log(p) + g if p else -math.inf
                for p, g in zip(distribution, gumbel, strict=True)
            ]
        output.append(max(range(vocab), key=row.__getitem__))
    return truncate_output(output, case.eos, case.budget)


class ReferenceMatcher:
    """Grammar with the interface of a matcher library; see `engine.verify.grammar.Matcher`."""

    def __init__(self, vocab: int, text: Sequence[int] = ()) -> None:
        self._vocab, self._text = vocab, list(text)

    def deep_copy(self) -> ReferenceMatcher:
        """Return a copy in the same state."""
        return ReferenceMatcher(self._vocab, self._text)

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Consume tokens up to the first forbidden one and return their number."""
        for n, token in enumerate(tokens):
            if token == forbidden_token(self._text, self._vocab):
                return n
            self._text.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int, /) -> bool:
        """Remove the last tokens."""
        del self._text[len(self._text) - num_tokens :]
        return True

    def compute_bitmask(self) -> bytes:
        """Return a bitmask of the tokens that are allowed next."""
        allowed = (1 << self._vocab) - 1 ^ 1 << forbidden_token(self._text, self._vocab)
        return allowed.to_bytes(self._vocab // 8 + 1, "little")

    def is_error(self) -> bool:
        """Return False."""
        return False

    def get_error(self) -> str:
        """Return an empty message."""
        return ""
