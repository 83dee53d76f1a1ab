"""Scores: how right an answer is, from 0 to 1, by the scorer that its task's YAML names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specbench_cli.scoring.code import same_code, tested
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
"""Scorers that compare a reference with an answer, in this order."""


def score(
    question: Question,
    turn: int,
    text: str,
    *,
    run_code: bool = False,
    uncontained: bool = False,
) -> float | None:
    """The score of an answer.

    Args:
        turn: which of the question's turns it answers, from 1.
        text: the answer as decoded, without special tokens but with its blanks.
        run_code: whether answers may be run as programs (see `code.tested`).
        uncontained: whether they may be run under limits alone.

    Returns:
        0 to 1; None where there is nothing to score by: no scorer, no reference for this turn, or
        code that may not be run.
    """
    if question.scorer is None:
        return None
    if question.scorer == "unit_tests":
        if not run_code or question.program is None or turn > 1:
            return None
        reference = _reference(question, turn)
        passed = tested(text, *question.program, uncontained=uncontained, reference=reference)
        return float(passed)
    if question.scorer == "valid_json":
        return float(valid_json(text))
    reference = _reference(question, turn)
    return None if reference is None else float(COMPARERS[question.scorer](reference, text))


def _reference(question: Question, turn: int) -> str | None:
    """The turn's reference; a single one belongs to the last turn."""
    references = question.reference or ()
    if len(references) == len(question.turns):
        return references[turn - 1]
    return references[0] if len(references) == 1 and turn == len(question.turns) else None
