"""Conversion of a dataset's rows to questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from specbench_cli.config.problems import is_one_line, join_names
from specbench_cli.errors import MAX_TEXT_LENGTH, EnvironmentFault, UsageError
from specbench_cli.tasks import fill
from specbench_cli.tasks.dataset_config import DatasetConfig, DatasetSource
from specbench_cli.tasks.formats import get_extension, read_rows
from specbench_cli.tasks.requests import MESSAGES, ChatRequest, parse_request, unwrap_request
from specbench_cli.tasks.schema import FAMILIES, Column, Family, Question

COLUMNS: Mapping[Column, tuple[str, ...]] = {
    "id": ("question_id", "id"),
    "turns": ("turns", "prompt", "question"),
    "category": ("category",),
    "family": ("family",),
    "cluster": ("cluster",),
    "reference": ("reference",),
}
"""Default names of each column. `fields` in the YAML overrides them."""

JSON_HINT = (
    'each row is a JSON object with "turns" (a list of texts), "prompt" or "question" (a text), '
    'and optionally "question_id" or "id", "category", "family", "cluster", "reference"; or one of'
    ' OpenAI\'s requests with "messages", or a batch file\'s with such a "body"'
)


TABLE_HINT = (
    'the heading names the columns: "prompt" or "question" (or "turns", a JSON list of texts), and'
    ' optionally "question_id" or "id", "category", "family", "cluster", "reference"; empty cells'
    " count as absent"
)
LINES_HINT = (
    "each line that is not blank is a prompt; prompts of several lines go into a .jsonl file"
)


def format_hint(name: str) -> str:
    """Return a hint that describes the accepted content of a file with this extension."""
    kind = get_extension(name)
    return LINES_HINT if kind == ".txt" else TABLE_HINT if kind in (".csv", ".tsv") else JSON_HINT


class RowError(Exception):
    """Error for a malformed row."""


def read_questions(
    data: bytes, config: DatasetConfig, source: DatasetSource, label: str
) -> list[Question]:
    """Return the questions of a file in order.

    A row without an id gets its index, counted from 0. If the configuration has several `samples`,
    each question is repeated that many times.

    Args:
        data: content of the file with the rows.
        label: name of the file for messages.

    Raises:
        UsageError: a row is malformed, an id is repeated, or there is no row.
        UnreadableFile: the content does not have the format of the file's extension.
        EnvironmentFault: rows contain a placeholder instead of a question.
    """
    seen: dict[str, int] = {}
    questions: list[Question] = []
    for index, (line, parsed) in enumerate(read_rows(data, source.rows_file, config.columns)):
        try:
            if not isinstance(parsed, dict):
                raise RowError(f"expected a JSON object, got {_short(parsed)}")
            table = get_extension(source.rows_file) in (".csv", ".tsv")
            row = unwrap_request(_parse_cells(parsed) if table else parsed)
            if not _is_in_ranges(row, config):
                continue
            question = _make_question(row, config, source, index)
        except RowError as fault:
            raise UsageError(f"{label}:{line}: {fault}", format_hint(source.rows_file)) from fault
        if question.prompt_id in seen:
            first = seen[question.prompt_id]
            raise UsageError(
                f"{label}:{line}: id {question.prompt_id!r} was given in line {first} already",
                "give every row its own id, or none at all",
            )
        seen[question.prompt_id] = line
        questions += _repeat_question(question, config.samples)
    if not questions:
        raise UsageError(f"{label} holds no question", format_hint(source.rows_file))
    if config.placeholder is not None:
        _check_placeholders(questions, config.placeholder, config, label)
    return questions


def _parse_cells(cells: dict[str, str]) -> dict[str, Any]:
    """Convert the cells of a CSV or TSV row.

    An empty cell becomes None. A JSON list in the column `turns` is parsed.
    """
    row: dict[str, Any] = {name: cell or None for name, cell in cells.items()}
    turns = cells.get("turns", "")
    if turns.startswith("["):
        with suppress(ValueError, RecursionError):
            row["turns"] = json.loads(turns)
    return row


def _repeat_question(question: Question, n: int) -> list[Question]:
    """Return n copies of a question. They have different ids, but the same cluster."""
    if n == 1:
        return [question]
    return [
        replace(question, prompt_id=f"{question.prompt_id}/{sample}", sample=sample)
        for sample in range(1, n + 1)
    ]


def _check_placeholders(
    questions: Sequence[Question], placeholder: str, config: DatasetConfig, label: str
) -> None:
    found = [q for q in questions if any(placeholder in turn for turn in q.turns)]
    if found:
        raise EnvironmentFault(
            f"{label}: {len(found)} of {len(questions)} questions are placeholders"
            f" ({placeholder!r}) for texts that must be fetched from elsewhere, the first of them"
            f" {found[0].prompt_id}",
            config.obtain or "replace the file by one that holds all texts",
        )


def _is_in_ranges(row: Mapping[str, Any], config: DatasetConfig) -> bool:
    """Return True if a row's values are inside all ranges that the key `only` of the YAML sets."""
    for name, (low, high) in config.only.items():
        value = row.get(name)
        try:
            number = int(value)  # type: ignore[arg-type] # None and others are what is caught
        except (TypeError, ValueError, OverflowError):
            raise RowError(f"{name!r} must be a number, got {_short(value)}") from None
        if not low <= number <= high:
            return False
    return True


def _make_question(
    row: Mapping[str, Any], config: DatasetConfig, source: DatasetSource, index: int
) -> Question:
    prefix = f"{source.category}-" if len(config.sources) > 1 else ""
    prompt_id = f"{config.name}/{prefix}{_get_id(row, config, index)}"
    category, family = _get_category_and_family(row, config, source)
    cluster = _get_text(row, config, "cluster")
    scorer = config.get_scorer(family)
    request = _get_request(row, config, category)
    if request is not None:
        cluster = cluster or request.cluster
    return Question(
        prompt_id=prompt_id,
        cluster=f"{config.name}/{cluster}" if cluster else prompt_id,
        task=config.name,
        family=family,
        category=category,
        turns=_get_turns(row, config, category) if request is None else (request.text,),
        before=() if request is None else request.before,
        max_new_tokens=None if request is None else request.budget,
        reference=_get_reference(row, config),
        scorer=scorer,
        program=_get_program(row, config) if scorer == "unit_tests" else None,
    )


def _get_request(
    row: Mapping[str, Any], config: DatasetConfig, category: str
) -> ChatRequest | None:
    """Return the chat request in a row.

    Return None if the row is not a chat request, or if the YAML names other columns to read.
    """
    if MESSAGES not in row or "turns" in config.fields or config.get_template(category) is not None:
        return None
    try:
        return parse_request(row)
    except ValueError as fault:
        raise RowError(str(fault)) from fault


def _get_program(row: Mapping[str, Any], config: DatasetConfig) -> tuple[str, str]:
    assert config.program is not None  # validated with the YAML
    try:
        return fill.split_program(config.program, row)
    except KeyError as missing:
        raise _missing_column_error(row, "program", missing) from missing


def _missing_column_error(row: Mapping[str, Any], template: str, missing: KeyError) -> RowError:
    return RowError(
        f"no {missing.args[0]!r}, which {template} needs, only {join_names(row) or 'nothing'}"
    )


def _find_column(row: Mapping[str, Any], config: DatasetConfig, column: Column) -> str | None:
    """Return the row's own name for a column. Return None if the row has no value for it."""
    names = (config.fields[column],) if column in config.fields else COLUMNS[column]
    return next((name for name in names if row.get(name) is not None), None)


def _get_text(row: Mapping[str, Any], config: DatasetConfig, column: Column) -> str:
    """Return the text in a column of a row, or "" if the column is missing or blank."""
    name = _find_column(row, config, column)
    if name is None:
        return ""
    if not isinstance(row[name], str):
        raise RowError(f"{name!r} must be a text, got {_short(row[name])}")
    return str(row[name]).strip()


def _get_id(row: Mapping[str, Any], config: DatasetConfig, index: int) -> str:
    name = _find_column(row, config, "id")
    if name is None:
        return str(index)
    value = row[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise RowError(f"{name!r} must be a number or one line of text, got {_short(value)}")
    return _check_name(name, value)


def _check_name(column: str, value: str) -> str:
    """Return an id or a category unchanged, if run folders can store it.

    Raises:
        RowError: the text is too long, or has a control character or a line break.
    """
    if not is_one_line(value):
        raise RowError(
            f"{column!r} must be one line without control characters, got {_short(value)}"
        )
    if len(value) > MAX_TEXT_LENGTH:
        raise RowError(
            f"{column!r} must have at most {MAX_TEXT_LENGTH} characters, got {len(value)}:"
            f" {_short(value)}"
        )
    return value


def _get_turns(row: Mapping[str, Any], config: DatasetConfig, category: str) -> tuple[str, ...]:
    template = config.get_template(category)
    if template is not None:
        try:
            filled = fill.fill_template(template, row)
        except KeyError as missing:
            raise _missing_column_error(row, "template", missing) from missing
        if not filled.strip():
            raise RowError(f"the template {_short(template)} leaves no text")
        return (filled,)
    name = _find_column(row, config, "turns")
    if name is None:
        names = [config.fields["turns"]] if "turns" in config.fields else COLUMNS["turns"]
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


def _get_category_and_family(
    row: Mapping[str, Any], config: DatasetConfig, source: DatasetSource
) -> tuple[str, Family]:
    """Return the category and the family of a row. If the row has only one of them, it is used
    for both.
    """
    category = _check_name("category", source.category or _get_text(row, config, "category"))
    named = _get_text(row, config, "family")
    if not named:
        family = config.get_family(category)
        return category or family, family
    for family in FAMILIES:
        if family == named:
            return category or family, family
    raise RowError(f"family {named!r} is not one of {', '.join(FAMILIES)}")


def _get_reference(row: Mapping[str, Any], config: DatasetConfig) -> tuple[str, ...] | None:
    """Return the reference answers of a row, or None.

    If a turn has several acceptable answers (a nested list), they are joined by line breaks.
    """
    name = _find_column(row, config, "reference")
    if name is None:
        return None
    value = row[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return (str(value),)
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        raise RowError(f"{name!r} must be a text, a number or a list, got {_short(value)}")
    texts = []
    for entry in entries:
        parts = entry if isinstance(entry, list) else [entry]
        if not all(isinstance(part, str) for part in parts):
            raise RowError(f"{name!r} must hold texts or lists of texts, got {_short(entry)}")
        texts.append("\n".join(parts))
    return tuple(texts)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
