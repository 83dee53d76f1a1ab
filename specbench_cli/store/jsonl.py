"""Lines that survive a crash: appended and fsynced, a half-written last one dropped.

A line counts once its newline is on disk.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specbench_cli.errors import UsageError

_CHUNK = 1 << 16


def append(path: Path, lines: Iterable[str]) -> None:
    """Write all lines at once and wait until the disk has them."""
    data = "".join(f"{line}\n" for line in lines).encode()
    with naming(path), path.open("ab", buffering=0) as file:
        _drop_half_line(path, file.tell())
        rest = memoryview(data)
        while rest:  # a disk that gets full takes a part
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of the system name a file: those that come of writing name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for cycles, which looks at all that was read again and again: lines have
    none."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def read(
    path: Path, start: int = 0, end: int = sys.maxsize, first: int = 1
) -> Iterator[tuple[int, str]]:
    """The complete lines with their numbers; nothing where there is no file.

    Args:
        start, end: the bytes between which lines begin; a line begins at the first.
        first: that line's number.

    Raises:
        UsageError: a line that is not UTF-8.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, first):
            if start >= end:
                return
            start += len(line)
            if not line.endswith(b"\n"):
                continue
            try:
                text = line[:-1].decode()
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path}, line {number} is no UTF-8 text: {error}",
                    hint=f"delete that line: sed -i {number}d {path}",
                ) from error
            yield number, text


def _drop_half_line(path: Path, size: int) -> None:
    """Cut the file after its last newline."""
    with path.open("rb+") as file:
        end = size
        while end:
            start = max(0, end - _CHUNK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
