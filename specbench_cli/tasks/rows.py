"""JSON lines to questions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specbench_cli.errors import UsageError
from specbench_cli.tasks.schema import FAMILIES, Card, Column, Family, Question

COLUMNS: Mapping[Column, tuple[str, ...]] = {
    "id": ("question_id", "id"),
    "turns": ("turns", "prompt", "question"),
    "category": ("category",),
    "family": ("family",),
    "cluster": ("cluster",),
    "reference": ("reference",),
}
"""Names under which a column is looked for, unless the card's `fields` names another."""

ACCEPTED = (
    'each line is a JSON object with "turns" (a list of texts), "prompt" or "question" (a text), '
    'and optionally "question_id" or "id", "category", "family", "cluster", "reference"'
)


class RowError(Exception):
    """What is wrong with one row."""


def read_questions(data: bytes, card: Card, label: str) -> list[Question]:
    """Questions of a JSON-lines file, in its order; the id defaults to the row's index from 0.

    Args:
        label: the file's name for messages.

    Raises:
        UsageError: a malformed row (with its line number), an id given twice, or no row at all.
    """
    seen: dict[str, int] = {}
    questions: list[Question] = []
    for line, raw in _lines(data):
        try:
            question = _question(raw, card, index=len(questions))
        except RowError as fault:
            raise UsageError(f"{label}:{line}: {fault}", ACCEPTED) from fault
        if question.prompt_id in seen:
            first = seen[question.prompt_id]
            raise UsageError(
                f"{label}:{line}: id {question.prompt_id!r} was given in line {first} already",
                "give every row its own id, or none at all",
            )
        seen[question.prompt_id] = line
        questions.append(question)
    if not questions:
        raise UsageError(f"{label} holds no question", ACCEPTED)
    return questions


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank. Only \\n ends a line, since texts may hold U+2028."""
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            yield line, raw


def _question(raw: bytes, card: Card, index: int) -> Question:
    try:
        row = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as fault:
        raise RowError(f"not JSON: {fault}") from fault
    if not isinstance(row, dict):
        raise RowError(f"expected a JSON object, got {_short(row)}")

    prompt_id = f"{card.name}/{_id(row, card, index)}"
    category, family = _stratum(row, card)
    return Question(
        prompt_id=prompt_id,
        cluster=f"{card.name}/{_text(row, card, 'cluster')}"
        if _column(row, card, "cluster")
        else prompt_id,
        task=card.name,
        family=family,
        category=category,
        turns=_turns(row, card),
        reference=_reference(row, card),
    )


def _column(row: Mapping[str, Any], card: Card, column: Column) -> str | None:
    """The name under which a row holds a column; None where it is absent or null."""
    names = (card.fields[column],) if column in card.fields else COLUMNS[column]
    return next((name for name in names if row.get(name) is not None), None)


def _text(row: Mapping[str, Any], card: Card, column: Column) -> str:
    """A column's text, "" where it is absent."""
    name = _column(row, card, column)
    if name is None:
        return ""
    if not isinstance(row[name], str) or not row[name].strip():
        raise RowError(f"{name!r} must be a text that is not empty, got {_short(row[name])}")
    return str(row[name])


def _id(row: Mapping[str, Any], card: Card, index: int) -> str:
    name = _column(row, card, "id")
    if name is None:
        return str(index)
    value = row[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise RowError(f"{name!r} must be a number or one line of text, got {_short(value)}")
    return value


def _turns(row: Mapping[str, Any], card: Card) -> tuple[str, ...]:
    name = _column(row, card, "turns")
    if name is None:
        names = [card.fields["turns"]] if "turns" in card.fields else COLUMNS["turns"]
        raise RowError(f"no {' or '.join(map(repr, names))}, only {', '.join(row) or 'nothing'}")
    value = row[name]
    turns = [value] if isinstance(value, str) else value
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise RowError(f"{name!r} must be a text or texts, none empty, got {_short(value)}")
    return tuple(turns)


def _stratum(row: Mapping[str, Any], card: Card) -> tuple[str, Family]:
    """Category and family; each can stand in for the other."""
    category, named = _text(row, card, "category"), _text(row, card, "family")
    if not named:
        family = card.family_of(category)
        return category or family, family
    for family in FAMILIES:
        if family == named:
            return category or family, family
    raise RowError(f"family {named!r} is not one of {', '.join(FAMILIES)}")


def _reference(row: Mapping[str, Any], card: Card) -> tuple[str, ...] | None:
    """References; alternatives of one turn (a list inside the list) are joined by line breaks."""
    name = _column(row, card, "reference")
    if name is None:
        return None
    value = row[name]
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        raise RowError(f"{name!r} must be a text or a list, got {_short(value)}")
    texts = []
    for entry in entries:
        parts = entry if isinstance(entry, list) else [entry]
        if not all(isinstance(part, str) for part in parts):
            raise RowError(f"{name!r} must hold texts or lists of texts, got {_short(entry)}")
        texts.append("\n".join(parts))
    return tuple(texts)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
