"""Folder of a matrix.

A matrix is a series of runs, one for each pair of a target and a draft model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli import files
from specbench_cli.errors import FULL, UsageError

MATRIX = "matrix.json"
"""File that marks a folder as a matrix. It contains the names of the runs, in order."""

_RESUME_FILE = ".matrix.resume.json"
"""File with the configurations of the runs, to resume them. It is removed once all runs are
finished."""

_MOST_BYTES = 16 * files.MB
"""Maximum size of either file in bytes."""


@dataclass(frozen=True, slots=True)
class MatrixConfig:
    """Configurations of the runs of a matrix.

    Attributes:
        runs: folder name -> configuration as JSON.
        sources: name of each setting -> origin of its value, such as "command line".
    """

    runs: Mapping[str, str]
    sources: Mapping[str, str]


def is_matrix(path: Path) -> bool:
    """Return True if a folder is the folder of a matrix."""
    return (path / MATRIX).is_file()


def run_folders(path: Path) -> list[Path]:
    """Return the folders of a matrix's runs, in order. Runs that have not started yet are included.

    Raises:
        UsageError: the file `MATRIX` cannot be read.
    """
    file = path / MATRIX
    try:
        names = json.loads(files.read_text(file, _MOST_BYTES))["runs"]
        if len(set(names)) < len(names):
            raise ValueError("runs: a folder is listed twice")
        if not names or not all(name and Path(name).name == name != ".." for name in names):
            raise ValueError("runs: must be a list of subfolders")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is damaged: {error}", "use one of the runs in the folder instead"
        ) from error
    found = [path / name for name in names]
    for each in found:
        files.check_no_link(each)
    return found


def create(path: Path, order: MatrixConfig) -> None:
    """Create the folder of a matrix, without the folders of its runs.

    Raises:
        UsageError: the folder is not empty, or cannot be written.
        OSError: the disk is full.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            held = is_matrix(path)
            raise UsageError(
                f"{path} {'already holds runs' if held else 'is not empty'}",
                f"specbench run --resume {path}, or give another --out"
                if held
                else "give a new or empty --out",
            )
        _write(path / _RESUME_FILE, {"runs": dict(order.runs), "sources": dict(order.sources)})
        _write(path / MATRIX, {"runs": list(order.runs)})
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UsageError(
            f"cannot write to {path}: {error.strerror}", "give another --out"
        ) from error


def resume_file(path: Path) -> Path:
    """Return the path of the file that stores the configurations of a matrix's runs."""
    return path / _RESUME_FILE


def read_config(path: Path) -> MatrixConfig | None:
    """Return the configurations of the runs of a matrix. Return None if all runs are finished.

    Raises:
        UsageError: the file with the configurations is damaged.
    """
    try:
        content = json.loads(files.read_text(path / _RESUME_FILE, _MOST_BYTES))
        return MatrixConfig(content["runs"], content["sources"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be resumed: its {_RESUME_FILE} is damaged",
            "resume its runs one by one, or start a new one: specbench run",
        ) from error


def finish(path: Path) -> None:
    """Mark all runs of a matrix as finished."""
    files.remove_own(path / _RESUME_FILE, _is_order)


def _is_order(content: bytes) -> bool:
    """Return True if `create` wrote the content of a file as the file with the configurations."""
    return files.json_object(content).keys() == {"runs", "sources"}


def _is_matrix(content: bytes) -> bool:
    """Return True if `create` wrote the content of a file as the file `MATRIX`."""
    return files.json_object(content).keys() == {"runs"}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    files.replace(file, json.dumps(content, indent=2) + "\n")


def discard(path: Path) -> None:
    """Remove a matrix and its folder if none of its runs was started."""
    if not any(each.exists() for each in run_folders(path)):
        files.remove_own(path / MATRIX, _is_matrix)
        files.remove_own(path / _RESUME_FILE, _is_order)
        with suppress(OSError):
            path.rmdir()
