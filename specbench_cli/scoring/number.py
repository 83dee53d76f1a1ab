"""Numbers as people and models write them, and the final number of an answer (GSM8K).

GSM8K's references end in `#### N`. The final number of an answer is the one after `####`, else in
the last `\\boxed{}`, else directly after the last "answer is", else the last number in the text
(lm-evaluation-harness's "flexible-extract"), since chat models end with a sentence.

Supported: thousands separators (1,234 1'234 1 234 `1{,}234` `1\\,234` 12,34,567 1.234.567),
unambiguous European decimals (1.234,5 and 3,5, not 1,234), digits of all scripts, U+2212 and other
minus signs, fractions (3/4, 2 1/2, a vulgar fraction, `\\frac{3}{4}`) and powers of ten (1.5e6,
1.5 x 10^6). Currencies, `%` and words after a number are ignored, 18.00 equals 18, and the hyphen
of a range (10-14) is not a sign.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from fractions import Fraction

MAX_CHARACTERS = 400
"""Maximum length of a number in characters. Longer ones are runaway text and slow to compute."""

# ---- one spelling -------------------------------------------------------------------------------

_NARROW = "\u2009"
"""Replacement for all spaces between digits: thin, narrow and no-break spaces, and LaTeX's."""

FRACTIONS = (
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
)
"""Replacements that write a LaTeX fraction with `\\frac` and braces, as patterns and texts."""


def make_replacer(forms: Iterable[tuple[str, str]]) -> Callable[[str], str]:
    """Return a function that applies several replacements to a text, one after the other.

    Args:
        forms: Pairs of a regular expression and its replacement.
    """
    compiled = [(re.compile(pattern), by) for pattern, by in forms]

    def replaced(text: str) -> str:
        for pattern, by in compiled:
            text = pattern.sub(by, text)
        return text

    return replaced


_SPELLINGS = (
    (r"[\u00a0\u2007-\u200a\u202f]|(?<!\\)\\[,;: ]|\{\\,\}|\\thinspace(?![a-zA-Z])", _NARROW),
    (r"(?<!\\)\\!|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])", ""),
    (r"(?<=\d)~(?=\d)", _NARROW),
    (r"\{,\}|[\uff0c\u066c]", ","),
    (r"[\uff0e\u066b]|\{\.\}", "."),
    (r"[\u2212\ufe63\uff0d\u2010-\u2013]", "-"),
    (r"[\u2019\u02bc\u2032]", "'"),
    (r"\\\$|\\pounds(?![a-zA-Z])|\\euro(?![a-zA-Z])|[\uff04\u20a0-\u20bf\u00a3\u00a5]", "$"),
    (r"\\%|\uff05", "%"),
    (r"\\times(?![a-zA-Z])|\\cdot(?![a-zA-Z])|[\u00d7\u00b7\u22c5]", "*"),
    *FRACTIONS,
    (r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
)
_spelled = make_replacer(_SPELLINGS)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_FOREIGN = re.compile(r"[^\x00-\x7f]")


def normalise_text(text: str) -> str:
    """Return the text with a uniform spelling of digits, signs, separators and fractions."""
    text = _SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(_RAISED), text)
    return _spelled(_FOREIGN.sub(_ascii, text))


def _ascii(found: re.Match[str]) -> str:
    """Return a matched digit or vulgar fraction in ASCII. Return any other character unchanged."""
    char = found[0]
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if "VULGAR FRACTION" in unicodedata.name(char, "") and char.isnumeric():
        return _NARROW + unicodedata.normalize("NFKC", char).replace("\u2044", "/")
    return "/" if char == "\u2044" else char


# ---- numbers ------------------------------------------------------------------------------------

_JOINED = rf"\d{{1,3}}(?:[{_NARROW}'_]\d{{3}})+(?:[.,]\d+)?"
_SPACED = r"\d{1,3}(?:\ \d{3})+(?:[.,]\d+)?"
_DIGITS = rf"""
    {_JOINED}
    | \d{{1,3}}(?:\.\d{{3}})+,\d+  # 1.234,56
    | \d{{1,3}}(?:\.\d{{3}}){{2,}}  # 1.234.567
    | \d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?  # 1,234.56
    | \d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?:\.\d+)?  # 12,34,567
    | (?<!\d,)(?<![(\[])\d+,\d{{1,2}}(?!,?\d)  # 3,5
    | \d+(?:\.\d+)?
    | (?<!\w)\.\d+
"""


def _pattern(digits: str) -> re.Pattern[str]:
    return re.compile(
        rf"""
        (?<![\d^_])(?<![\^_]\{{)
        (?P<sign>(?<![\w)}}%.])(?<![\d)}}%][\ {_NARROW}])-)?
        (?:\$\s?)?(?P<inner>(?<=\$)-)?
        (?:
            (?:(?P<whole>\d+)[\ {_NARROW}]?)?
            \\frac\{{\s*(?P<below_zero>-)?(?P<above>\d+)\s*\}}
            \{{\s*(?P<under_zero>-)?(?P<below>\d+)\s*\}}
            | (?<!/)(?:(?P<units>\d+)[\ {_NARROW}])?(?P<top>\d+)\s?/\s?(?P<bottom>\d+)
              (?![\d.,]*\d)(?!\s?/)
            | (?P<digits>{digits})(?!\d)
              (?:
                [eE](?P<e>[-+]?\d{{1,3}})(?![\w.])
                | \s?[*x]\s?10\s?\^\s?\{{?\s?(?P<ten>[-+]?\d{{1,3}})\s?\}}?(?!\d)
                | \^\{{?(?P<power>\d{{1,3}})\}}?(?!\d)
              )?
        )
        """,
        re.VERBOSE,
    )


_NUMBER, _NUMBER_SPACED = _pattern(_DIGITS), _pattern(f"{_SPACED} | {_DIGITS}")
"""Patterns of a number. Only where an answer states its result may a space separate thousands
(1 200); elsewhere it may separate two numbers."""
_EUROPEAN = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+|\d+,\d{1,2}")
_THOUSANDS = re.compile(r"\d{1,3}(?:\.\d{3}){2,}")


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that consists of one number, else None."""
    text = normalise_text(text).strip(f" \t\n{_NARROW}").removesuffix("%").strip("$")
    found = _NUMBER_SPACED.fullmatch(text)
    return None if found is None else _value(found)


_WORDS = re.compile(r"[.,;:]?\s*[(,]?\s*[A-Za-z]{3,}[^=+*/^\\]*")


def parse_leading_number(text: str) -> Fraction | None:
    """Return the number at the start of a text, or None.

    Words may follow the number, but not a formula.
    """
    text = normalise_text(text).strip("$* ")
    found = _NUMBER_SPACED.match(text)
    if found is None or not _WORDS.fullmatch(text, found.end()):
        return None
    return _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the value of a matched number. None if the number is too long or its denominator is
    0.
    """
    part = found.groupdict()
    if len(found[0]) > MAX_CHARACTERS:
        return None
    negative = bool(part["sign"] or part["inner"])
    if part["digits"] is None:
        whole = int(part["whole"] or part["units"] or 0)
        bottom = int(part["below"] or part["bottom"])
        if bottom == 0:
            return None
        value = whole + Fraction(int(part["above"] or part["top"]), bottom)
        negative ^= bool(part["below_zero"]) ^ bool(part["under_zero"])
    else:
        value = Fraction(_decimal(part["digits"]))
        if exponent := part["e"] or part["ten"]:
            value *= Fraction(10) ** int(exponent)
        if part["power"]:
            if len(part["digits"]) * int(part["power"]) > MAX_CHARACTERS:
                return None
            value **= int(part["power"])
    return -value if negative else value


def _decimal(digits: str) -> str:
    """Return the digits of a number without thousands separators, and with a decimal point."""
    digits = re.sub(rf"[{_NARROW}'_ ]", "", digits)
    if _EUROPEAN.fullmatch(digits):
        return digits.replace(".", "").replace(",", ".")
    if _THOUSANDS.fullmatch(digits):
        return digits.replace(".", "")
    return digits.replace(",", "")


# ---- the final one ------------------------------------------------------------------------------

_MARK = re.compile(r"####[ \t]*(?=[-$.\d\\])")
_SAID = re.compile(r"\banswer\b[^\n.:=\d]{0,40}?(?:\bis\b|:|=)", re.IGNORECASE)
_LEAD = re.compile(
    rf"[\s{_NARROW}:*_`(\[$]*(?:\b(?:about|around|approximately|exactly|roughly|only|just)\b\s*)?"
    r"(?:\\[(\[]\s*)?(?:[a-zA-Z]\s*=\s*)?(?:US|Rs\.?)?",
)
_LISTED = re.compile(r"[\s*:]*\n\s*\d+[.)]\s+\S")
_SENTENCE = re.compile(r"[.;!?](?=\s|$)|\n")
_ASIDE = re.compile(r"\([^()]*[a-zA-Z][^()]*\)")
_OPERATOR = re.compile(r"\s*(?:[-+*/\u00f7](?!\*)|\\div)")


def same_final_number(reference: str, answer: str) -> bool:
    """Return True if both texts end in the same number. Return False if one of them has no
    number.
    """
    expected = extract_final_number(reference)
    return expected is not None and expected == extract_final_number(answer)


def extract_final_number(text: str) -> Fraction | None:
    """Return the number that a text states as its answer, or None."""
    text = normalise_text(text)
    marked = _MARK.search(text)
    if marked is not None and (stated := _parse_result(text[marked.end() :])) is not None:
        return stated
    inside = extract_boxed(text)
    if inside is not None and (found := _last(inside, _NUMBER_SPACED)) is not None:
        return found
    for said in reversed(list(_SAID.finditer(text))):
        if (stated := _parse_result(text[said.end() :])) is not None:
            return stated
    return _last(text, _NUMBER)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, or the word after the last \boxed, or None."""
    at = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if at < 0:
        return None
    text = text[at:]
    start = text.find("{")
    words = text.split()
    if start < 0 or (text.startswith(("\\boxed ", "\\fbox ")) and start > 7):
        return words[1].rstrip("$.") if len(words) > 1 else ""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + 1 : place]
    return text[start + 1 :]


def _parse_result(rest: str) -> Fraction | None:
    """Return the number directly after a mark such as "answer is".

    In an equation, it is the number after the last `=`. Return None if words or a list follow.

    Args:
        rest: the text after the mark.
    """
    lead = _LEAD.match(rest)
    start = lead.end() if lead else 0
    first = _NUMBER_SPACED.match(rest, start)
    if first is None or _LISTED.match(rest):
        return None
    clause = _ASIDE.sub("", rest[start : _end_of_sentence(rest, first.end())])
    *_, result = clause.rpartition("=")
    if "=" in clause and (found := _NUMBER_SPACED.search(result)) is not None:
        return _value(found)
    if _OPERATOR.match(rest, first.end()):
        return _last(result, _NUMBER_SPACED)
    return _value(first)


def _end_of_sentence(text: str, start: int) -> int:
    found = _SENTENCE.search(text, start)
    return len(text) if found is None else found.start()


def _last(text: str, pattern: re.Pattern[str]) -> Fraction | None:
    """Return the last number in a text that matches a pattern, or None."""
    values = map(_value, reversed(list(pattern.finditer(text))))
    return next((value for value in values if value is not None), None)
