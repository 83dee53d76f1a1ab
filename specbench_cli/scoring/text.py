"""Exact match of texts, blanks aside."""

from __future__ import annotations


def same_words(reference: str, answer: str) -> bool:
    """Whether two texts are equal but for the amount and kind of white space."""
    return reference.split() == answer.split()
