"""Equality of short mathematical answers written in LaTeX (MATH-500, AIME).

The answer is what the last `\\boxed{}` holds, else what follows the last "answer is", else the
whole text. Two answers are equal if they are after normalisation in the manner of MATH's own
evaluation (Hendrycks et al., 2021: spacing, `\\left`, `\\dfrac`, units, degrees, dollars, `x =`,
text wrappers), or if both are the same plain number or fraction. No algebra: `2x` is not `x + x`.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SAID = re.compile(r"(?:final\s+)?answer\s*(?:is|:)\s*:?\s*(.+)", re.IGNORECASE)
_SYNONYMS = (
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left|\\right|\\displaystyle|\\limits", ""),
    (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", ""),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox|textrm|mathit|operatorname)\{([^{}]*)\}", r"\1"),
    (r"\^\{?\\circ\}?|\\degree(?![a-zA-Z])|°", ""),
    (r"\\[$%]|[$%]", ""),
    (r"\\cdot|\\times", "*"),
    (r"\\leq(?![a-zA-Z])", r"\\le"),
    (r"\\geq(?![a-zA-Z])", r"\\ge"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\{([^{}]+)\}(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac(\d)\{", r"\\frac{\1}{"),
    (r"\\sqrt(\w)", r"\\sqrt{\1}"),
    (r"([_^])\{(\w)\}", r"\1\2"),
)
_FORMS = tuple((re.compile(pattern), by) for pattern, by in _SYNONYMS)
_UNIT = re.compile(
    r"(?<=[\d}])(?:square|cubic)?(?:units?|cm|mm|km|meters?|feet|foot|inch(?:es)?|degrees?|dollars?"
    r"|cents?|hours?|minutes?|seconds?|days?|points?|people|percent)(?:\^[23])?$"
)
_ASSIGNED = re.compile(r"^[a-zA-Z](?:_\w)?=(?!=)|^[a-zA-Z]\\in(?![a-zA-Z])")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}|(-?)(\d+)/(\d+)")


def same_expression(reference: str, answer: str) -> bool:
    """Whether two answers are the same expression after normalisation, or the same number."""
    ours, theirs = normalised(final_answer(reference)), normalised(final_answer(answer))
    if ours == theirs:
        return ours != ""
    number = _value(ours)
    return number is not None and number == _value(theirs)


def final_answer(text: str) -> str:
    """What a text gives as its answer."""
    at = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if at >= 0:
        return _braced(text[at:])
    said = _SAID.findall(text)
    if said:
        return str(said[-1]).strip().rstrip(".")
    inside = text.strip()
    return inside.removesuffix(".")


def normalised(answer: str) -> str:
    """The answer in one spelling, without white space."""
    answer = answer.strip()
    for pattern, by in _FORMS:
        answer = pattern.sub(by, answer)
    answer = _ASSIGNED.sub("", re.sub(r"\s+", "", answer).rstrip("."))
    answer = re.sub(r"(?<!\d)\.(?=\d)", "0.", _UNIT.sub("", answer))
    if _THOUSANDS.fullmatch(answer):  # elsewhere a comma separates: the pair (12,102)
        answer = re.sub(r"[{,}]", "", answer)
    return re.sub(r"^\(([^(),]*)\)$", r"\1", answer)


def _braced(text: str) -> str:
    """What the first pair of braces holds; after `\\boxed 5`, the word that follows."""
    start = text.find("{")
    words = text.split()
    if start < 0 or (text.startswith(("\\boxed ", "\\fbox ")) and start > 7):
        return words[1].rstrip("$.") if len(words) > 1 else ""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + 1 : at]
    return text[start + 1 :]


def _value(answer: str) -> Fraction | None:
    """The number that a normalised answer is, if it is a plain one."""
    fraction = _FRACTION.fullmatch(answer)
    try:
        if fraction is None:
            return Fraction(answer)
        sign, top, bottom = (part for part in fraction.groups() if part is not None)
        return Fraction(int(top), int(bottom)) * (-1 if sign else 1)
    except (ValueError, ZeroDivisionError):
        return None
