"""Pinned contents of plug-in files.

A plug-in file can change between the check of its checksum and its import. So it is read once, and
its content is pinned: later checks and imports use the pinned bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_pinned: dict[Path, bytes] = {}
"""Pinned contents by resolved path."""


def pin(path: str | Path) -> bytes:
    """Return the content of a plug-in file, and pin it until `unpin_all`."""
    file = Path(path).resolve()
    if file not in _pinned:
        _pinned[file] = file.read_bytes()
    return _pinned[file]


def content(path: str | Path) -> bytes:
    """Return the pinned content of a plug-in file, or its current content if it is not pinned."""
    held = _pinned.get(Path(path).resolve())
    return Path(path).read_bytes() if held is None else held


def pinned_contents() -> dict[Path, bytes]:
    """Return the contents of all pinned plug-in files, to pass them to a child process."""
    return dict(_pinned)


def pin_all(contents: Mapping[Path, bytes]) -> None:
    """Pin the contents of plug-in files that the parent process passed to this process."""
    _pinned.update(contents)


def unpin_all() -> None:
    """Unpin all plug-in files. A file is read again when it is used next."""
    _pinned.clear()
