"""Templates: texts in which column names in braces stand for the values of a row."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

ANSWER = "answer"
"""Placeholder of the model's answer in a program."""


def column_names(template: str) -> list[str]:
    """Return the column names in a template, in order.

    Raises:
        ValueError: braces are unbalanced, or contain something other than a column name.
    """
    meant = "write {{ or }} for a literal brace"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as fault:
        raise ValueError(f"must have braces in pairs ({fault}); {meant}") from fault
    found = [part[1:] for part in parts if part[1] is not None]
    for name, spec, conversion in found:
        if not name or set(name) & set(".[]") or spec or conversion:
            raise ValueError(f"must have only column names in braces, not {{{name}}}; {meant}")
    return [str(name) for name, _, _ in found]


def validate_template(template: str) -> str:
    """Return the template unchanged. Raise ValueError if it is not valid."""
    column_names(template)
    return template


def validate_program(program: str) -> str:
    """Return a program template unchanged. Raise ValueError if it lacks the placeholder of the
    answer.
    """
    if ANSWER not in column_names(program):
        raise ValueError("must contain {answer}, the placeholder of the answer")
    return program


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """Return the template with the values of a row. A list becomes lines, and null an empty text.

    Raises:
        KeyError: the row lacks a column of the template.
    """
    return template.format_map({name: _text(row[name]) for name in column_names(template)})


def split_program(program: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Fill a program template with a row. Return the code before and the code after the answer.

    Raises:
        KeyError: the row lacks a column of the template.
    """
    before, _, after = program.partition(f"{{{ANSWER}}}")
    return fill_template(before, row), fill_template(after, row)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return "" if value is None else str(value)
