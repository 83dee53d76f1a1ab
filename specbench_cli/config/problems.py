"""Error messages about invalid values, and helpers for the text of messages.

The messages of pydantic are replaced. They name Python types, but users need to read the option and
its allowed values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any
from unicodedata import category

from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_MAX_VALUE_LENGTH = 80
"""Maximum number of characters of a value in an error."""

_MAX_NAMES = 12
"""Maximum number of names in an error. The number of the others is added."""

_LONG_WORD = re.compile(r"\S{1000,}")

Place = tuple[int | str, ...]
"""Path to a value in nested data: keys and indices."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion like `; did you mean 'sps'?`, or "" if no known word is similar."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that the user probably meant, or None.

    A known word that begins with the typed text is preferred to a similar word: `gsm` means
    `gsm8k`, not `mgsm`. Upper and lower case are equal, and `-` equals `_`.
    """
    if len(word) > _MAX_VALUE_LENGTH:
        return None
    plain = {_normalize(name): name for name in sorted(known)}
    typed = _normalize(word)
    longer = [name for name in plain if typed and name.startswith(typed)]
    near = get_close_matches(typed, longer, n=1) or get_close_matches(typed, plain, n=1)
    return plain[near[0]] if near else None


def join_names(known: Iterable[str]) -> str:
    """Return names separated by commas, for an error message.

    Of a long list, return the first `_MAX_NAMES` names and the number of further names.
    """
    names = list(known)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES + 1 else ""
    return ", ".join(map(shorten, names[:_MAX_NAMES] if more else names)) + more


def first_duplicate(names: Iterable[str]) -> str | None:
    """Return the first name that occurs twice, or None."""
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def is_one_line(text: str) -> bool:
    """Return True if a text has no line break and no other control character."""
    return not any(category(letter) in ("Cc", "Zl", "Zp") for letter in text)


def check_one_line(subject: str, text: str) -> None:
    """Raise UsageError if a text has a control character or a line break.

    Args:
        subject: name of the text in the error.
    """
    if not is_one_line(text):
        raise UsageError(
            f"{subject} must have no line break and no control character,"
            f" got {shorten(repr(text))}",
            "use a name without line breaks",
        )


def shorten(value: object) -> str:
    """Return a value as text for an error message, cut to `_MAX_VALUE_LENGTH` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def shorten_words(message: str) -> str:
    """Return a message in which very long words, such as huge numbers, are cut."""
    return _LONG_WORD.sub(lambda word: shorten(word[0]), message)


def _normalize(name: str) -> str:
    return name.lower().replace("-", "_")


def usage_error(
    found: ValidationError,
    *,
    subject: Callable[[Place], str],
    keys: Callable[[Place], Sequence[str]],
    hint: str,
) -> UsageError:
    """Return the error message for values that a pydantic model rejected.

    In pydantic's error, a path is a tuple of field names and list indices.

    Args:
        found: The error of pydantic.
        subject: Returns the name that users know for a path, e.g. "--limit".
        keys: Returns the keys that are allowed at a path.
        hint: The command that the user should type next.
    """
    return UsageError(
        "\n".join(_format_problem(e, subject, keys) for e in _first_per_place(found)), hint
    )


def format_first_problem(found: ValidationError) -> str:
    """Return as text the first problem in a record or file that specbench itself wrote.

    For example: `steps.levels[3] must be at least 0, got -1`.
    """
    error = _first_per_place(found)[0]
    if error["type"] == "json_invalid":
        return f"not JSON: {error['ctx']['error']}"
    return _format_problem(error, _format_path, lambda _: ())


def _format_path(place: Place) -> str:
    words = (f"[{word}]" if isinstance(word, int) else f".{word}" for word in place)
    return "".join(words).removeprefix(".") or "it"


def _first_per_place(found: ValidationError) -> list[ErrorDetails]:
    """Return the first error for each invalid value.

    For a value with a union type, pydantic reports one error per member of the union.
    """
    first: dict[Place, ErrorDetails] = {}
    for error in found.errors(include_url=False):
        first.setdefault(error["loc"], error)
    return list(first.values())


def _format_problem(
    error: ErrorDetails,
    subject: Callable[[Place], str],
    keys: Callable[[Place], Sequence[str]],
) -> str:
    place, value, bounds = error["loc"], error["input"], error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            known, word = keys(place), str(place[-1])
            guess = did_you_mean(word, known) or (known and f"; known: {join_names(known)}") or ""
            return f"{subject(place)} is not known{guess}"
        case "value_error":
            says = str(bounds["error"])
            return f"{subject(place)} {says}" if place else says
        case "missing":
            return f"{subject(place)} is missing"
        case kind:
            got = f"{len(value)}" if kind == "too_long" else shorten(repr(value))
            return f"{subject(place)} must be {_describe_allowed(kind, bounds)}, got {got}"


_ALLOWED = {
    ("greater_than_equal",): "at least {ge:g}",
    ("greater_than",): "above {gt:g}",
    ("less_than_equal",): "at most {le:g}",
    ("less_than",): "below {lt:g}",
    ("literal_error", "enum"): "one of {expected}",
    ("finite_number",): "a finite number",
    ("too_short", "string_too_short"): "given, not empty",
    ("string_too_long",): "at most {max_length} characters long",
    ("too_long",): "a list of at most {max_length}",
    ("bool_parsing", "bool_type"): "true or false",
    ("int_from_float", "int_parsing", "int_parsing_size", "int_type"): "a whole number",
    ("float_parsing", "float_type"): "a number",
    ("string_type",): "text",
    ("list_type", "set_type", "tuple_type", "frozen_set_type"): "a list",
    ("dict_type", "model_type", "model_attributes_type", "dataclass_type"): (
        "a mapping of keys to values"
    ),
}
"""Description of the allowed values by pydantic's types of errors. Braces contain bounds."""


def _describe_allowed(kind: str, bounds: dict[str, Any]) -> str:
    """Return a description of the allowed values.

    Args:
        kind: type of pydantic's error, such as "greater_than".
        bounds: the bounds in pydantic's error.
    """
    if kind == "string_pattern_mismatch" and "Cc" in bounds["pattern"]:
        return "text without control characters or line breaks"
    for kinds, words in _ALLOWED.items():
        if kind in kinds:
            return words.format(**bounds)
    return f"valid ({kind.replace('_', ' ')})"
