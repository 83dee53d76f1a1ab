"""Lock file of a folder, so that only one process writes to it.

The operating system releases the lock when the process ends.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from specbench_cli import files
from specbench_cli.errors import ConcurrentWriteError, UsageError

try:
    import fcntl
except ImportError:  # a system without such locks: runs are not locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""Name of the lock file. It names the process that has the lock, and exists while it is locked."""

LOCK_WAIT_S = 0.2
"""Maximum wait, in seconds, until the child processes of a killed writer have ended."""
_RETRY_S = 0.01
_MAX_BYTES = 4096
"""Maximum number of bytes to read of a lock file. Those of specbench are smaller."""


class Lock:
    """Lock of a folder: the exclusive right to write into this folder.

    The lock lasts until `release`. Without `release`, it lasts until this process has ended, and
    all processes that inherited `fd` have ended.

    Attributes:
        fd: file descriptor of the locked file.

    Raises:
        UsageError: another process has the lock, or specbench did not write the lock file.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        end = time.monotonic() + LOCK_WAIT_S
        while (fd := self._take()) is None:
            if time.monotonic() >= end:
                raise _held_error(folder, self._path)
            time.sleep(_RETRY_S)
        self.fd = fd

    def check(self) -> None:
        """Raise ConcurrentWriteError if the lock file is no longer the file that this object
        locked.

        If the lock file was removed, another process can create a new lock file and lock it.
        """
        if not _refers_to(self._path, self.fd):
            raise _lost_lock_error(self._path.parent)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self.fd >= 0:
            if _refers_to(self._path, self.fd):
                self._path.unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1

    def _take(self) -> int | None:
        """Return the file descriptor of the locked file, or None if the lock is not available.

        The lock is not available if another process has locked or just removed the file, or if
        specbench did not write the file. A file of a killed process is locked again, even if it is
        empty.
        """
        own = json.dumps({"pid": os.getpid(), "host": platform.node()}).encode()
        fd = files.open_own(self._path, os.O_RDWR | os.O_CREAT)
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.pread(fd, _MAX_BYTES, 0)
            if _refers_to(self._path, fd) and _is_own(found):
                if found != own:  # write it only now: another process may have locked the file
                    with suppress(OSError):  # on a full disk the lock works without a name
                        os.pwrite(fd, own.ljust(len(found)), 0)
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None


class SharedLock:
    """Lock of a run's folder, as a child process sees it. The parent process has the lock.

    Raises:
        ConcurrentWriteError: the parent process does not have the lock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        try:
            self._fd = files.open_own(self._path, os.O_RDONLY)
        except (OSError, UsageError) as error:
            raise _lost_lock_error(folder) from error
        holder = files.json_object(os.pread(self._fd, _MAX_BYTES, 0)).get("pid")
        if holder not in (None, os.getppid(), os.getpid()):
            os.close(self._fd)
            raise _lost_lock_error(folder)

    def check(self) -> None:
        """Raise ConcurrentWriteError if the parent process no longer has the lock."""
        if not _refers_to(self._path, self._fd):
            raise _lost_lock_error(self._path.parent)


def is_lock(path: Path) -> bool:
    """Return True if specbench wrote this lock file. The process that wrote it may have ended."""
    try:
        return _is_own(files.read_own(path) or b"")
    except (OSError, UsageError):
        return False


def _is_own(content: bytes) -> bool:
    """Return True if specbench wrote the content of the lock file.

    If the disk was full or the process was killed, the content may be incomplete or empty. Such a
    content counts as written by specbench.
    """
    half = content.startswith(b'{"pid": ') and not content.rstrip().endswith(b"}")
    return not content or half or files.json_object(content).keys() == {"pid", "host"}


def _refers_to(path: Path, fd: int) -> bool:
    """Return True if the path refers to the open file `fd`."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)


def _held_error(folder: Path, path: Path) -> UsageError:
    """Return the error for a folder that another process has locked."""
    content = files.read_own(path) or b""
    if content and not _is_own(content):
        return UsageError(
            f"{path} was not written by specbench, which needs a file with this name",
            hint="move the file, or choose another --out",
        )
    holder = files.json_object(content)
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    return UsageError(
        f"{folder} is being written to by {who}, and a run has one writer",
        hint=f"wait until that process ends, or end it; then specbench run --resume {folder}",
    )


def _lost_lock_error(folder: Path) -> ConcurrentWriteError:
    return ConcurrentWriteError(
        f"{folder / LOCK} was removed or replaced during the run, so another process"
        " may write there: nothing more is written",
        hint=f"end the other process if there is one; then specbench run --resume {folder}",
    )
