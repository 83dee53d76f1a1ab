"""Exact match of texts, as a whole or sentence by sentence, blanks aside."""

from __future__ import annotations

import re
from itertools import zip_longest

SENTENCE = re.compile(r"(?<=[.!?])\s+")


def same_words(reference: str, answer: str) -> bool:
    """Whether two texts are equal but for the amount and kind of white space."""
    return reference.split() == answer.split()


def same_sentences(reference: str, answer: str) -> float:
    """The share of sentences that are equal, place by place; one too many or too few is wrong."""
    pairs = list(zip_longest(*(SENTENCE.split(text.strip()) for text in (reference, answer))))
    return sum(same_words(ours or "", theirs or "") for ours, theirs in pairs) / len(pairs)
