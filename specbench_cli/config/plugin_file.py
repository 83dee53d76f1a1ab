"""Contents of plug-in files: the run executes the bytes that it checked.

A file can change between the check of its checksum and its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_held: dict[Path, bytes] = {}
"""Checked contents of plug-in files, by resolved path. They run, not what is there now."""


def hold(path: str | Path) -> bytes:
    """Return a plug-in file's content, and have this process run no other until `release`.

    What is checked and what runs are then the same, though the file changes in between.
    """
    file = Path(path).resolve()
    if file not in _held:
        _held[file] = file.read_bytes()
    return _held[file]


def content(path: str | Path) -> bytes:
    """Return the content that is held of a plug-in file, else the one that it has now."""
    held = _held.get(Path(path).resolve())
    return Path(path).read_bytes() if held is None else held


def held() -> dict[Path, bytes]:
    """Return what is held, for a process that is to run the same."""
    return dict(_held)


def hold_all(contents: Mapping[Path, bytes]) -> None:
    """Hold the contents that another process holds."""
    _held.update(contents)


def release() -> None:
    """Hold nothing more: files are read anew, and checked anew."""
    _held.clear()
