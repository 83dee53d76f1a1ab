"""Equality of short mathematical answers written in LaTeX (MATH-500, AIME).

The answer is the content of the last `\\boxed{}`, else the text after the last "answer is", else
the whole text. Two answers are equal if they are equal after normalisation as in MATH's evaluation
(Hendrycks et al., 2021: spacing, `\\left`, `\\dfrac`, units, degrees, dollars, `x =`, text
wrappers), or if both are the same number, as `number` reads it: a fraction, a mixed number, a power
of ten, with thousands separators, or followed by words. A comma between digits is not a
decimal point here: `3,5` is a list. No algebra: `2x` is not `x + x`, and `6^2` is not 36.
"""

from __future__ import annotations

import re
from fractions import Fraction

from specbench_cli.scoring.number import (
    FRACTIONS,
    extract_boxed,
    make_replacer,
    parse_leading_number,
    parse_number,
)

_SAID = re.compile(r"(?:final\s+)?answer\s*(?:is|:)\s*:?\s*(.+)", re.IGNORECASE)
_SYNONYMS = (
    (r"[\u2212\ufe63\uff0d]", "-"),
    (r"\\pounds(?![a-zA-Z])|\\euro(?![a-zA-Z])|[\u20a0-\u20bf\u00a3\u00a5]", ""),
    (r"(?<=\d)\s+(\d+)/(\d+)", r"\\frac{\1}{\2}"),
    (r"\\left|\\right|\\displaystyle|\\limits", ""),
    (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", ""),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox|textrm|mathit|operatorname)\{([^{}]*)\}", r"\1"),
    (r"\^\{?\\circ\}?|\\degree(?![a-zA-Z])|°", ""),
    (r"\\[$%]|[$%]", ""),
    (r"\\cdot|\\times|[\u00d7\u00b7\u22c5]", "*"),
    (r"\\leq(?![a-zA-Z])", r"\\le"),
    (r"\\geq(?![a-zA-Z])", r"\\ge"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    *FRACTIONS,
    (r"\\sqrt(\w)", r"\\sqrt{\1}"),
    (r"([_^])\{(\w)\}", r"\1\2"),
)
_respelled = make_replacer(_SYNONYMS)
_UNIT = re.compile(
    r"(?<=[\d}])(?:square|cubic)?(?:units?|cm|mm|km|meters?|feet|foot|inch(?:es)?|degrees?|dollars?"
    r"|cents?|hours?|minutes?|seconds?|days?|points?|people|percent)(?:\^[23])?$"
)
_ASSIGNED = re.compile(r"^[a-zA-Z](?:_\w)?=(?!=)|^[a-zA-Z]\\in(?![a-zA-Z])")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:(?:,|\{,\}|['\u2019])\d{3})+(?:\.\d+)?")
_LIST = re.compile(r"-?\d+,\d{1,2}")
_POWER = re.compile(r"(?<![*\d])(?!10\^)\d+\^")
_MARKED = re.compile(
    r"(\*\*|__?|`|\$\$?)(?P<inside>.+?)\1(?=[\s.,;:!)]|$)|\\[(\[](?P<latex>.+?)\\[)\]]"
)


def same_expression(reference: str, answer: str) -> bool:
    """Return True if two mathematical answers are equal after normalisation, or are the same
    number.
    """
    ours, theirs = (
        normalise_answer(extract_answer(reference)),
        normalise_answer(extract_answer(answer)),
    )
    if ours == theirs:
        return ours != ""
    value = _value(ours)
    if value is None:
        return False
    return value in (_value(theirs), parse_leading_number(extract_answer(answer)))


def extract_answer(text: str) -> str:
    """Return the final answer in a text, e.g. the content of its last `\\boxed{}`."""
    inside = extract_boxed(text)
    if inside is not None:
        return inside
    said = _SAID.findall(text)
    if said:
        answer = str(said[-1]).strip()
        marked = _MARKED.match(answer)  # bold text or a formula, followed by words
        if marked is not None:
            answer = (marked["inside"] or marked["latex"]).strip()
        return answer.rstrip(".")
    inside = text.strip()
    return inside.removesuffix(".")


def normalise_answer(answer: str) -> str:
    """Return a mathematical answer with uniform LaTeX spelling and without white space."""
    answer = _respelled(answer.strip())
    answer = _ASSIGNED.sub("", re.sub(r"\s+", "", answer).rstrip("."))
    answer = re.sub(r"(?<!\d)\.(?=\d)", "0.", _UNIT.sub("", answer))
    if _THOUSANDS.fullmatch(answer):  # otherwise a comma separates, as in the pair (12,102)
        answer = re.sub(r"[{,}'\u2019]", "", answer)
    return re.sub(r"^\(([^(),]*)\)$", r"\1", answer)


def _value(answer: str) -> Fraction | None:
    """Return the value of a normalised answer, or None if it is not a plain number."""
    if _LIST.fullmatch(answer) or _POWER.match(answer.lstrip("-")):
        return None
    return parse_number(answer)
