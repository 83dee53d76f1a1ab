"""Identity of the tokens under a grammar: what `--grammar` promises of every lossless method.

The grammar is one that has a state, and no text of it ends the same way as another: which token it
forbids depends on all of the output before. So a row that is masked by another text than that which
leads to it says another token sooner or later.
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
"""Random tables for each variant and rule."""

VARIANTS = 6

SELDOM = 3.0
"""What the end's logits are less than random ones."""

LEAST = 12
"""Tokens that there is room for."""

LOOK = (
    "whether the method decides by itself: `session.verify` alone knows of a grammar, and the rows"
    " of `session.score` are the target's own"
)


def forbidden(output: Sequence[int], vocab: int) -> int:
    """The one token that the grammar forbids behind an output."""
    return (3 * sum(output) + 2 * len(output) + 1) % vocab


def check_grammar(subject: AuditSubject) -> list[Finding]:
    """Every output under a grammar is, token by token, what plain decoding of the table gives
    where what is forbidden cannot be said."""
    compared = 0
    for params, case in _cases(subject):
        due = due_tokens(case)
        method = subject.method(params)
        session = case.open(reference=due, **case.warm_up(method))
        for _ in method.generate(session):
            pass
        compared += 1
        if list(session.output()) != due:
            what = f"the output is {list(session.output())} where {due} is due under the grammar"
            problem = Problem(what, f"{format_params(params)}; {case}, under a grammar", LOOK)
            return [Finding("grammar", False, {"outputs": compared}, problem)]
    return [Finding("grammar", True, {"outputs": compared})] if compared else []


def _cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, Case]]:
    for rule in EXACT_RULES:
        for params in islice(subject.lossless_params(rule), VARIANTS):
            for case in random_cases(rule, CASES, max_draft_levels(params, default=5)):
                yield params, held(case)


def held(case: Case) -> Case:
    """The case under the grammar, with an end that it may allow, and room to come to it."""
    target, draft = case.tables
    end = target.shape[-1] - 1
    target = target.clone()
    target[..., end] -= SELDOM
    mask = GrammarMask(Matcher(end + 1), [end])
    return replace(
        case,
        tables=(target, draft),
        eos=(end,),
        budget=max(case.budget, LEAST),
        sampling=replace(case.sampling, processor=mask),
    )


def due_tokens(case: Case) -> list[int]:
    """What plain decoding gives, by the table and `forbidden` alone."""
    sampling, vocab = replace(case.sampling, processor=None), case.tables[0].shape[-1]
    noise = Reference(case.tables[0], sampling).noise(case.prompt_id, case.budget)
    output: list[int] = []
    for gumbel in noise:
        before, last = (*case.prompt, *output)[-2:]
        row: list[float] = case.tables[0][before, last].tolist()
        row[forbidden(output, vocab)] = -math.inf
        if sampling.rule == "coupled":
            distribution = warp_logits(row, sampling)
            row = [
                math.log(p) + g if p else -math.inf
                for p, g in zip(distribution, gumbel, strict=True)
            ]
        output.append(max(range(vocab), key=row.__getitem__))
    return truncate_output(output, case.eos, case.budget)


class Matcher:
    """The grammar as a library would match it; see `engine.verify.grammar.Matcher`."""

    def __init__(self, vocab: int, text: Sequence[int] = ()) -> None:
        self._vocab, self._text = vocab, list(text)

    def deep_copy(self) -> Matcher:
        """Another one in the same state."""
        return Matcher(self._vocab, self._text)

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Go on by tokens that are allowed; how many they were."""
        for n, token in enumerate(tokens):
            if token == forbidden(self._text, self._vocab):
                return n
            self._text.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int, /) -> bool:
        """Go back by so many tokens."""
        del self._text[len(self._text) - num_tokens :]
        return True

    def compute_bitmask(self) -> bytes:
        """A bit for each token that is allowed next."""
        allowed = (1 << self._vocab) - 1 ^ 1 << forbidden(self._text, self._vocab)
        return allowed.to_bytes(self._vocab // 8 + 1, "little")

    def is_error(self) -> bool:
        """Never."""
        return False

    def get_error(self) -> str:
        """Nothing."""
        return ""
