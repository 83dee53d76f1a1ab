"""One writer a folder: a lock that the system takes back from a process however it ends."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from specbench_cli.errors import UsageError

try:
    import fcntl
except ImportError:  # a system without such locks: its runs have none
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""The file in a folder that is locked; it says by which process, and is there while it is held."""

PATIENCE_S = 0.2
"""How long the processes of a writer that was killed may take to be gone."""
_LOOK_S = 0.01


class Lock:
    """The right to write into a folder, held from when this is made until `release`, or until this
    process, and those that it handed `fd` to, are gone.

    Attributes:
        fd: the descriptor that holds the lock.

    Raises:
        UsageError: another process holds it. OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        end = time.monotonic() + PATIENCE_S
        while (fd := self._take()) is None:
            if time.monotonic() >= end:
                raise _held(folder, _holder(self._path))
            time.sleep(_LOOK_S)
        self.fd = fd
        os.ftruncate(fd, 0)
        with suppress(OSError):  # a full disk: the lock holds without a name
            os.write(fd, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode())

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        if self.fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1

    def _take(self) -> int | None:
        """The locked file; None while another process holds it, or has just removed it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == self._path.stat().st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None


def _holder(path: Path) -> dict[str, Any]:
    """What the lock's file says of who holds it; empty where it says nothing."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _held(folder: Path, holder: dict[str, Any]) -> UsageError:
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    return UsageError(
        f"{folder} is being written to by {who}, and a run has one writer",
        hint=f"wait until that process ends, or end it; then specbench run --resume {folder}",
    )
