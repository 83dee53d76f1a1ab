"""Scorers of text answers: equal text, equal sentences or lines, and well-formed JSON."""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NoReturn

SENTENCE = re.compile(r"(?<=[.!?])\s+")
_MARK = re.compile(r"^(?:[-*\u2022]|\d+[.)])\s+")
_FENCE = re.compile(r"^```\w*$")


def same_words(reference: str, answer: str) -> bool:
    """Return True if two texts are equal except for white space."""
    return reference.split() == answer.split()


def same_sentences(reference: str, answer: str) -> float:
    """Return the share of sentences of two texts that are equal at the same position."""
    pairs = list(zip_longest(*(SENTENCE.split(text.strip()) for text in (reference, answer))))
    return sum(same_words(ours or "", theirs or "") for ours, theirs in pairs) / len(pairs)


def same_lines(reference: str, answer: str) -> float:
    """Return the share of lines that two texts have in common, in the same order.

    The share is twice the number of common lines, divided by the number of lines of both texts. So
    an additional line costs as much as a missing line. Bullets, line numbers, code fences and blank
    lines are ignored.
    """
    return SequenceMatcher(None, _lines(reference), _lines(answer), autojunk=False).ratio()


def right_steps(reference: str, answer: str) -> list[bool]:
    """Return one value per line of the reference: True if the answer has an equal line at that
    position.
    """
    pairs = zip_longest(reference.splitlines(), answer.splitlines(), fillvalue="")
    return [same_words(ours, theirs) for ours, theirs in pairs][: len(reference.splitlines())]


def valid_json(text: str) -> bool:
    """Return True if a text is one JSON value. White space around it is allowed."""
    try:
        # Keep integers as text, because Python cannot convert integers of more than 4,300 digits.
        json.loads(text, parse_constant=_refuse, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(text: str) -> list[str]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [_MARK.sub("", line).strip("`") for line in lines if line and not _FENCE.match(line)]


def _refuse(constant: str) -> NoReturn:
    """Reject NaN and infinities, which Python accepts and JSON does not."""
    raise ValueError(constant)
