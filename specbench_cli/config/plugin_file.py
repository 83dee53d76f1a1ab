"""Contents of plug-in files: the run executes the bytes that it checked.

A file can change between the check of its checksum and its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_held: dict[Path, bytes] = {}
"""Checked contents of plug-in files, by resolved path. Imports use them instead of the files."""


def hold(path: str | Path) -> bytes:
    """Read a plug-in file and use this content until `release`.

    The checked bytes are then the bytes that run, even if the file changes in between.
    """
    file = Path(path).resolve()
    if file not in _held:
        _held[file] = file.read_bytes()
    return _held[file]


def content(path: str | Path) -> bytes:
    """Return the held content of a plug-in file, or its current content."""
    held = _held.get(Path(path).resolve())
    return Path(path).read_bytes() if held is None else held


def held() -> dict[Path, bytes]:
    """Return the held contents, for another process that must run the same."""
    return dict(_held)


def hold_all(contents: Mapping[Path, bytes]) -> None:
    """Hold the contents that another process passes."""
    _held.update(contents)


def release() -> None:
    """Drop all held contents. Files are read and checked again."""
    _held.clear()
