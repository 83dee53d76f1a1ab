"""Contents of plug-in files: the run executes the bytes that it checked.

A file can change between the check of its checksum and its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_pinned: dict[Path, bytes] = {}
"""Checked contents of plug-in files, by resolved path. Imports use them instead of the files."""


def pin(path: str | Path) -> bytes:
    """Read a plug-in file and use this content until `release`.

    The checked bytes are then the bytes that run, even if the file changes in between.
    """
    file = Path(path).resolve()
    if file not in _pinned:
        _pinned[file] = file.read_bytes()
    return _pinned[file]


def content(path: str | Path) -> bytes:
    """Return the held content of a plug-in file, or its current content."""
    held = _pinned.get(Path(path).resolve())
    return Path(path).read_bytes() if held is None else held


def pinned_contents() -> dict[Path, bytes]:
    """Return the held contents, for another process that must run the same."""
    return dict(_pinned)


def pin_all(contents: Mapping[Path, bytes]) -> None:
    """Hold the contents that another process passes."""
    _pinned.update(contents)


def unpin_all() -> None:
    """Drop all held contents. Files are read and checked again."""
    _pinned.clear()
