"""The folder of a matrix: a run in a folder of its own for each target and draft."""

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
"""The file that makes a folder a matrix's; it names its runs, in their order."""

_ORDER = ".matrix.resume.json"
"""What was ordered, word for word, as a run has it; it goes once all runs are finished."""

_MOST_BYTES = 16 * files.MB
"""Bytes of either file."""


@dataclass(frozen=True, slots=True)
class MatrixOrder:
    """What is asked of a matrix's runs: each one's configuration as JSON, by its folder's name, and
    where its values are from."""

    runs: Mapping[str, str]
    sources: Mapping[str, str]


def is_matrix(path: Path) -> bool:
    """Whether a folder is a matrix's."""
    return (path / MATRIX).is_file()


def members(path: Path) -> list[Path]:
    """The folders of a matrix's runs, in their order; those not begun yet among them.

    Raises:
        UsageError: `MATRIX` cannot be read.
    """
    file = path / MATRIX
    try:
        names = json.loads(files.read_text(file, _MOST_BYTES))["runs"]
        if len(set(names)) < len(names):
            raise ValueError("runs: it names a folder twice")
        if not names or not all(name and Path(name).name == name != ".." for name in names):
            raise ValueError("runs: no list of folders in this one")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is damaged: {error}", "take one of the runs in the folder by itself"
        ) from error
    found = [path / name for name in names]
    for each in found:
        files.refuse_link(each)
    return found


def create(path: Path, order: MatrixOrder) -> None:
    """Make a matrix's folder, without its runs.

    Raises:
        UsageError: the folder is not empty, or cannot be written. OSError: the disk is full.
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
        _write(path / _ORDER, {"runs": dict(order.runs), "sources": dict(order.sources)})
        _write(path / MATRIX, {"runs": list(order.runs)})
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UsageError(
            f"cannot write to {path}: {error.strerror}", "give another --out"
        ) from error


def order_file(path: Path) -> Path:
    """Return the path of the file with the configurations of the ordered runs."""
    return path / _ORDER


def read_order(path: Path) -> MatrixOrder | None:
    """What was asked for; None where all of it is done. Raises UsageError where it is damaged."""
    try:
        content = json.loads(files.read_text(path / _ORDER, _MOST_BYTES))
        return MatrixOrder(content["runs"], content["sources"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be resumed: its {_ORDER} is damaged",
            "resume its runs one by one, or begin anew: specbench run",
        ) from error


def finish(path: Path) -> None:
    """Say that all runs are finished."""
    files.remove_own(path / _ORDER, _is_order)


def _is_order(content: bytes) -> bool:
    """Return True if `create` wrote the content as the order file."""
    return files.json_object(content).keys() == {"runs", "sources"}


def _is_matrix(content: bytes) -> bool:
    """Return True if `create` wrote the content as the matrix file."""
    return files.json_object(content).keys() == {"runs"}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    files.replace(file, json.dumps(content, indent=2) + "\n")


def discard(path: Path) -> None:
    """Remove a matrix none of whose runs was begun, and its folder."""
    if not any(each.exists() for each in members(path)):
        files.remove_own(path / MATRIX, _is_matrix)
        files.remove_own(path / _ORDER, _is_order)
        with suppress(OSError):
            path.rmdir()
