"""Templates: texts with a row's columns in braces."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

ANSWER = "answer"
"""The name that stands for a model's answer in a program."""


def names(template: str) -> list[str]:
    """The columns that a template names, in its order.

    Raises:
        ValueError: a brace without its partner, or more than a column's name between two.
    """
    meant = "write {{ or }} for a brace that is meant"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as fault:
        raise ValueError(f"must have braces in pairs ({fault}); {meant}") from fault
    found = [part[1:] for part in parts if part[1] is not None]
    for name, spec, conversion in found:
        if not name or set(name) & set(".[]") or spec or conversion:
            raise ValueError(f"must have columns' names in braces, not {{{name}}}; {meant}")
    return [str(name) for name, _, _ in found]


def checked(template: str) -> str:
    """The template itself if it is well-formed; ValueError as `names` raises it otherwise."""
    names(template)
    return template


def checked_program(program: str) -> str:
    """The program itself if it says where the answer goes; ValueError otherwise."""
    if ANSWER not in names(program):
        raise ValueError("must say where the answer goes: {answer}")
    return program


def fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with a row's values: lists as lines, what is null as nothing.

    Raises:
        KeyError: the row lacks a column.
    """
    return template.format_map({name: _text(row[name]) for name in names(template)})


def around_answer(program: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """The code before and after the answer. Raises KeyError where the row lacks a column."""
    before, _, after = program.partition(f"{{{ANSWER}}}")
    return fill(before, row), fill(after, row)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return "" if value is None else str(value)
