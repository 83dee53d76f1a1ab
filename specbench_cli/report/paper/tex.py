"""Escaping of plain text for LaTeX, so that labels with special characters compile."""

from __future__ import annotations

import re
import unicodedata

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "[": "{[}",  # LaTeX would read a bracket after a table line as vertical space
    "]": "{]}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "/": r"/\allowbreak{}",  # addresses have no other break points
    "\0": "{}",
    "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{EN DASH}": "--",
    "\N{EM DASH}": "---",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
}
_ACCENTS = {
    "\N{COMBINING GRAVE ACCENT}": "`",
    "\N{COMBINING ACUTE ACCENT}": "'",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
    "\N{COMBINING TILDE}": "~",
    "\N{COMBINING DIAERESIS}": '"',
    "\N{COMBINING CARON}": "v",
    "\N{COMBINING CEDILLA}": "c",
}
_FACTOR = re.compile(r"\b(\d+(?:\.\d+)?)x\b")
"""A ratio, such as 2.5x. LaTeX gets a multiplication sign."""
_DASH = re.compile("-(?=-)")
_SEPARATOR = "\0"
"""Placeholder between two hyphens. LaTeX would join them to a dash."""


class Tex(str):
    """Text that is LaTeX already."""

    __slots__ = ()


def escape(value: object) -> Tex:
    """Return plain text as LaTeX. Text of type `Tex` is LaTeX already and is not changed.

    A character that the fonts do not have becomes its code point, such as U+4E2D.
    """
    if isinstance(value, Tex):
        return value
    words = _FACTOR.sub("\\1\N{MULTIPLICATION SIGN}", " ".join(str(value).split()))
    return Tex("".join(map(_character, _DASH.sub(f"-{_SEPARATOR}", words))))


def _character(letter: str) -> str:
    if letter in _SPECIAL:
        return _SPECIAL[letter]
    if " " <= letter <= "~":
        return letter
    base, *accents = list(unicodedata.normalize("NFD", letter))
    if base.isascii() and base.isalpha() and len(accents) == 1 and accents[0] in _ACCENTS:
        return rf"\{_ACCENTS[accents[0]]}{{{base}}}"
    return rf"\texttt{{U+{ord(letter):04X}}}"
