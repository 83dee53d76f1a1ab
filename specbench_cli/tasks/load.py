"""Loading of tasks. A task is the name of a shipped task, a YAML file, or a file of questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets_cfg
from specbench_cli.config.problems import join_names, nearest, shorten
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.tasks.dataset_config import DatasetConfig, DatasetSource, read_dataset_config
from specbench_cli.tasks.formats import (
    EXTENSIONS,
    GZIP_EXTENSION,
    UnreadableFile,
    get_extension,
    get_stem,
    read_zip_member,
)
from specbench_cli.tasks.rows import format_hint, read_questions
from specbench_cli.tasks.schema import Question
from specbench_cli.tasks.source import read_file, read_source, sha256

YAML_EXTENSIONS = (".yaml", ".yml")
"""File extensions of a task's YAML, in any case."""

SHIPPED = Path(datasets_cfg.__path__[0])


@dataclass(frozen=True, slots=True)
class Task:
    """A loaded and validated task with its questions.

    Attributes:
        sources: Facts about the task's files (name, checksum, url, hub id), without local paths.
        sha256: Checksum of the file. For several files, the checksum of their checksums.
        max_new_tokens: The task's default for the maximum number of new tokens, or None.
        embedded: "plumbing" if speedups of the embedded models are meaningless for this task.
        samples: How many times each prompt is decoded. `questions` has one item for each time.
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
    """Return the names of the shipped tasks, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def describe(name_or_path: str) -> dict[str, Any]:
    """Return the configuration of a task without reading its data.

    Raises:
        UsageError: the name is unknown, or the YAML is invalid.
    """
    return _find(name_or_path)[0].to_dict()


def load_task(name_or_path: str) -> Task:
    """Load a shipped task by name, or a task from the path of a YAML file or a file of questions.

    Raises:
        UsageError: the name is unknown, the YAML is invalid, or a row is malformed.
        EnvironmentFault: the data cannot be found or downloaded, or is damaged. Also raised if its
            checksum or its number of rows is wrong, or if it has placeholders for questions.
    """
    config, path = _find(name_or_path)
    without_yaml = path.suffix.lower() not in YAML_EXTENSIONS
    questions: list[Question] = []
    sums: list[str] = []
    for source in config.sources:
        label = name_or_path if without_yaml else f"{config.name}: {source.file}"
        try:
            if without_yaml:
                data = read_file(path)
            else:
                data = read_source(config.name, source, path.parent, config.obtain)
            sums.append(sha256(data))
            rows = data if source.member is None else read_zip_member(data, source.member)
            questions += read_questions(rows, config, source, label)
        except UnreadableFile as fault:
            raise _make_file_error(label, fault, without_yaml, source) from fault
    n_questions = len(questions) // config.samples
    if config.rows not in (None, n_questions):
        files = " and ".join(dict.fromkeys(source.file for source in config.sources))
        raise EnvironmentFault(
            f"{config.name}: {files} contains {n_questions} questions, but {path.name} requires"
            f" {config.rows}: the file is truncated, or another one",
            config.obtain or "replace it by the original file, or correct `rows`",
        )
    return Task(
        name=config.name,
        version=config.version,
        sources=[source.model_dump(exclude_none=True) for source in config.sources],
        max_new_tokens=config.max_new_tokens,
        embedded=config.embedded,
        citation=config.citation,
        licence=config.licence,
        questions=questions,
        sha256=sums[0] if len(sums) == 1 else sha256("".join(sums).encode()),
        samples=config.samples,
    )


def select_questions(questions: Sequence[Question], categories: Sequence[str]) -> list[Question]:
    """Return the questions whose category or family is in `categories`, or all if it is empty.

    Raises:
        UsageError: no question has one of the categories.
    """
    known = {word for question in questions for word in (question.category, question.family)}
    for category in categories:
        if category not in known:
            raise UsageError(
                f"no question of category {category!r}; there are {join_names(sorted(known))}"
            )
    wanted = set(categories) or known
    return [q for q in questions if q.category in wanted or q.family in wanted]


def _make_file_error(
    label: str, fault: UnreadableFile, without_yaml: bool, source: DatasetSource
) -> SpecbenchError:
    """Return the error for a file that cannot be read.

    If the user named the file, it is a UsageError. Otherwise the file belongs to a dataset, and is
    reported as damaged.
    """
    place = "" if fault.place is None else f":{fault.place}"
    if without_yaml:
        return UsageError(f"{label}{place}: {fault}", format_hint(source.rows_file))
    return EnvironmentFault(
        f"{label}{place} cannot be read: {fault}", "replace it by the original file"
    )


def _find(name_or_path: str) -> tuple[DatasetConfig, Path]:
    """Return the configuration of a task, and the path of its YAML file or of its questions."""
    path = Path(name_or_path)
    names = task_names()
    if name_or_path in names:
        path = SHIPPED / f"{name_or_path}.yaml"
        return read_dataset_config(path), path
    is_yaml, is_rows = (
        path.suffix.lower() in YAML_EXTENSIONS,
        get_extension(path.name) in EXTENSIONS,
    )
    if is_yaml or is_rows:
        if not _is_file(path):
            raise UsageError(f"no such task file: {name_or_path}", "specbench list tasks")
        return (read_dataset_config(path) if is_yaml else _make_config(path)), path
    if (what := _describe_unreadable(path)) is not None:
        raise UsageError(
            f"{name_or_path} is {what}, and questions cannot be read from it",
            f"use a file that ends in {', '.join(EXTENSIONS)} (or one of these and"
            f" {GZIP_EXTENSION}) or .yaml: docs/how-to/tasks.md",
        )
    near = nearest(name_or_path, names)
    raise UsageError(
        f"unknown task {shorten(repr(name_or_path))}"
        + (f", did you mean {near!r}?" if near else ""),
        f"one of {join_names(names)} (specbench list tasks), or the path of a file that ends in"
        f" {', '.join(EXTENSIONS)} or .yaml",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long for a file, or contains a null byte
        return False


def _describe_unreadable(path: Path) -> str | None:
    """Return why a path cannot be read as a task. Return None if the path does not exist."""
    if _is_file(path):
        return f"a file that ends in {path.suffix}" if path.suffix else "a file without an ending"
    try:
        return "a folder" if path.is_dir() else "not a regular file" if path.exists() else None
    except (OSError, ValueError):
        return None


def _make_config(path: Path) -> DatasetConfig:
    """Return the configuration of a file of questions that has no YAML.

    The name of the task is the name of the file without its extension.
    """
    try:
        return DatasetConfig(
            name=get_stem(path.name), version="file", source=DatasetSource(file=path.name)
        )
    except ValueError as fault:
        raise UsageError(
            f"{path}: the file's name becomes the task's name, so it must start with a letter or "
            "digit and hold only those, '_', '-' and '.'",
            "rename the file",
        ) from fault
