"""Scores of answers, from 0 to 1. Each task names the scorer of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specbench_cli.scoring.code import passes_tests, same_code
from specbench_cli.scoring.math import same_expression
from specbench_cli.scoring.number import same_final_number
from specbench_cli.scoring.text import right_steps as right_steps
from specbench_cli.scoring.text import same_lines, same_sentences, same_words, valid_json
from specbench_cli.tasks.schema import Question, Scorer

COMPARERS: Mapping[Scorer, Callable[[str, str], float]] = {
    "exact_match": same_words,
    "exact_sentences": same_sentences,
    "exact_lines": same_lines,
    "exact_code": same_code,
    "final_number": same_final_number,
    "math": same_expression,
}
"""Functions that compare a reference with an answer, by scorer."""


def score(
    question: Question,
    turn: int,
    text: str,
    *,
    run_code: bool = False,
    uncontained: bool = False,
) -> float | None:
    """Return the score of an answer.

    Args:
        turn: number of the question's turn, from 1.
        text: decoded answer without special tokens. White space is kept.
        run_code: True if answers may be run as programs (`code.passes_tests`).
        uncontained: True if answers may run without a sandbox, with limits on resources only.

    Returns:
        A score from 0 to 1. None if the question has no scorer, if this turn has no reference, or
        if
        the answer is code that may not be run.
    """
    if question.scorer is None:
        return None
    if question.scorer == "unit_tests":
        if not run_code or question.program is None or turn > 1:
            return None
        reference = _reference(question, turn)
        passed = passes_tests(text, *question.program, uncontained=uncontained, reference=reference)
        return float(passed)
    if question.scorer == "valid_json":
        return float(valid_json(text))
    reference = _reference(question, turn)
    return None if reference is None else float(COMPARERS[question.scorer](reference, text))


def _reference(question: Question, turn: int) -> str | None:
    """Return the reference answer of a turn. If a question has only one, it belongs to the last
    turn.
    """
    references = question.reference or ()
    if len(references) == len(question.turns):
        return references[turn - 1]
    return references[0] if len(references) == 1 and turn == len(question.turns) else None
