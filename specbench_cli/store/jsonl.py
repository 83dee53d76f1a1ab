"""Reading of JSON lines files, and appending to them. A crash loses at most the last line.

Appended lines are written to disk with fsync. A line is complete once its newline is on disk.
Readers ignore an incomplete last line. The next append removes it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specbench_cli import files
from specbench_cli.errors import ConcurrentWriteError, UsageError

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]

_CHUNK = 1 << 16
LOCK_WAIT_S = 60.0
"""Maximum wait, in seconds, for a file that another program has locked."""
_LOCK_RETRY_S = 0.05


def append(path: Path, lines: Iterable[str], expected: int | None = None) -> int:
    """Write all lines at once, and wait until they are on disk.

    Args:
        expected: expected size of the file in bytes before the write. None skips this check.

    Returns:
        The new size in bytes.

    Raises:
        UsageError: the path is a link, a folder or a device.
        ConcurrentWriteError: the file has another size than expected, so another program changed
            it. Or another program keeps it locked. Nothing is written.
        OSError: the file cannot be written.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    with name_file_in_errors(path):
        fd = files.open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with os.fdopen(fd, "rb+", buffering=0) as file:
            _lock(fd, path)
            size = os.fstat(fd).st_size
            if expected not in (None, size):
                raise ConcurrentWriteError(
                    f"{path} has {size} bytes, but this run left {expected}: another program"
                    " changed it"
                )
            _drop_half_line(file, size)
            rest = memoryview(data)
            while rest:  # a disk that becomes full writes only a part
                rest = rest[file.write(rest) :]
            os.fsync(fd)
            return os.fstat(fd).st_size


def _lock(fd: int, path: Path) -> None:
    """Lock a file until it is closed.

    Raises:
        ConcurrentWriteError: another program keeps the file locked for `LOCK_WAIT_S`.
    """
    end = time.monotonic() + LOCK_WAIT_S
    while fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise ConcurrentWriteError(
                    f"{path} is locked by another program for more than {LOCK_WAIT_S:g} s, so"
                    " nothing can be written to it",
                    hint="end that program",
                ) from None
            time.sleep(_LOCK_RETRY_S)
        else:
            return


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to OSError in the `with` block, because write errors do not contain it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the `with` block, for code that reads many records.

    The collector would scan the growing number of records again and again. It would find nothing,
    because records have no reference cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_file(path: Path) -> None:
    """Raise UsageError if a path exists and is a folder, a pipe or a device."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise UsageError(f"{path} is {kind}, but must be a file", "choose another folder")


def read(
    path: Path, start: int = 0, end: int = sys.maxsize, first: int = 1
) -> Iterator[tuple[int, str]]:
    """Yield the complete lines of a file with their line numbers. Without a file, yield nothing.

    Args:
        start, end: range of bytes. Lines that begin in this range are read. A line begins at
            `start`.
        first: number of the line that begins at `start`.

    Raises:
        UsageError: the path is a folder or a device, or a line is not UTF-8.
    """
    check_file(path)
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
                    f"{path}, line {number} is not UTF-8 text: {error}",
                    hint=f"delete that line: sed -i {number}d {path}",
                ) from error
            yield number, text


def _drop_half_line(file: IO[bytes], size: int) -> None:
    """Truncate a file after its last newline, to remove an incomplete last line."""
    end = size
    while end:
        start = max(0, end - _CHUNK)
        newline = os.pread(file.fileno(), end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
