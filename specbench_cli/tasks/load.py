"""From a task's name, YAML or JSON-lines file to its questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets_cfg
from specbench_cli.config.problems import listed, nearest, shown
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.tasks.card import Card, Source, read_card
from specbench_cli.tasks.formats import ENDINGS, ZIPPED, Unreadable, ending, member, stem
from specbench_cli.tasks.rows import format_hint, read_questions
from specbench_cli.tasks.schema import Question
from specbench_cli.tasks.source import read_file, read_source, sha256

CARDS = (".yaml", ".yml")
"""File extensions of a task's YAML, in any case."""

SHIPPED = Path(datasets_cfg.__path__[0])


@dataclass(frozen=True, slots=True)
class Task:
    """A loaded and checked task.

    Attributes:
        sources: the card's facts about its files (name, checksum, url, hub id); no local path.
        sha256: checksum of the file as read; of several, that of their checksums.
        max_new_tokens: the task's own default, None where it has none.
        embedded: "plumbing" where the embedded models' speedups mean nothing.
        samples: how often each prompt is asked; `questions` holds all samples.
    """

    name: str
    version: str
    sources: list[dict[str, Any]]
    max_new_tokens: int | None
    embedded: Literal["trained", "plumbing"]
    citation: str
    licence: str
    questions: list[Question]
    sha256: str
    samples: int = 1


def task_names() -> list[str]:
    """Names of the shipped tasks, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def describe(name_or_path: str) -> dict[str, Any]:
    """What is known of a task without reading its data.

    Raises:
        UsageError: unknown name, or a YAML that is wrong.
    """
    return _find(name_or_path)[0].facts()


def load_task(name_or_path: str) -> Task:
    """Load a shipped task by name, or a YAML or a file of questions by its path.

    Raises:
        UsageError: unknown name, wrong YAML, or a malformed row.
        EnvironmentFault: the data is not here and could not be downloaded, is damaged, not the
            original, another number of rows than stated, or holds placeholders for questions.
    """
    card, path = _find(name_or_path)
    bare = path.suffix.lower() not in CARDS
    questions: list[Question] = []
    sums: list[str] = []
    for source in card.sources:
        label = name_or_path if bare else f"{card.name}: {source.file}"
        try:
            if bare:
                data = read_file(path)
            else:
                data = read_source(card.name, source, path.parent, card.obtain)
            sums.append(sha256(data))
            rows = data if source.member is None else member(data, source.member)
            questions += read_questions(rows, card, source, label)
        except Unreadable as fault:
            raise _damaged(label, fault, bare, source) from fault
    held = len(questions) // card.samples
    if card.rows not in (None, held):
        files = " and ".join(dict.fromkeys(source.file for source in card.sources))
        raise EnvironmentFault(
            f"{card.name}: {files} held {held} questions, and {path.name} says that there"
            f" are {card.rows}: the file is cut short, or not the one that is meant",
            card.obtain or "replace it by the original file, or correct `rows`",
        )
    return Task(
        name=card.name,
        version=card.version,
        sources=[source.model_dump(exclude_none=True) for source in card.sources],
        max_new_tokens=card.max_new_tokens,
        embedded=card.embedded,
        citation=card.citation,
        licence=card.licence,
        questions=questions,
        sha256=sums[0] if len(sums) == 1 else sha256("".join(sums).encode()),
        samples=card.samples,
    )


def select(questions: Sequence[Question], categories: Sequence[str]) -> list[Question]:
    """Questions whose category or family is among `categories`; all if none is given.

    Raises:
        UsageError: a word that fits no question.
    """
    known = {word for question in questions for word in (question.category, question.family)}
    for category in categories:
        if category not in known:
            raise UsageError(
                f"no question of category {category!r}; there are {listed(sorted(known))}"
            )
    wanted = set(categories) or known
    return [q for q in questions if q.category in wanted or q.family in wanted]


def _damaged(label: str, fault: Unreadable, bare: bool, source: Source) -> SpecbenchError:
    """Return a usage error for a file of the user, or an error for a damaged data set."""
    place = "" if fault.place is None else f":{fault.place}"
    if bare:
        return UsageError(f"{label}{place}: {fault}", format_hint(source.rows_file))
    return EnvironmentFault(
        f"{label}{place} cannot be read: {fault}", "replace it by the original file"
    )


def _find(name_or_path: str) -> tuple[Card, Path]:
    """Return the card and the path of its file (YAML or questions)."""
    path = Path(name_or_path)
    names = task_names()
    if name_or_path in names:
        path = SHIPPED / f"{name_or_path}.yaml"
        return read_card(path), path
    is_card, is_rows = path.suffix.lower() in CARDS, ending(path.name) in ENDINGS
    if is_card or is_rows:
        if not _is_file(path):
            raise UsageError(f"no such task file: {name_or_path}", "specbench list tasks")
        return (read_card(path) if is_card else _own_card(path)), path
    if (what := _describe_unreadable(path)) is not None:
        raise UsageError(
            f"{name_or_path} is {what}, which holds no questions that can be read",
            f"use a file that ends in {', '.join(ENDINGS)} (or one of these and {ZIPPED}) or"
            " .yaml: docs/how-to/tasks.md",
        )
    near = nearest(name_or_path, names)
    raise UsageError(
        f"unknown task {shown(repr(name_or_path))}" + (f", did you mean {near!r}?" if near else ""),
        f"one of {listed(names)} (specbench list tasks), or the path of a file that ends in"
        f" {', '.join(ENDINGS)} or .yaml",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long for a file, or contains a null byte
        return False


def _describe_unreadable(path: Path) -> str | None:
    """Describe a path that cannot be read as a task; None if it does not exist."""
    if _is_file(path):
        return f"a file that ends in {path.suffix}" if path.suffix else "a file without an ending"
    try:
        return "a folder" if path.is_dir() else "no regular file" if path.exists() else None
    except (OSError, ValueError):
        return None


def _own_card(path: Path) -> Card:
    """Return the card of a file of questions without YAML; its name is the file name."""
    try:
        return Card(name=stem(path.name), version="file", source=Source(file=path.name))
    except ValueError as fault:
        raise UsageError(
            f"{path}: the file's name becomes the task's name, so it must start with a letter or "
            "digit and hold only those, '_', '-' and '.'",
            "rename the file",
        ) from fault
