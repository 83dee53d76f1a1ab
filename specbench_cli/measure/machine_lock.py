"""Machine lock, with which several runs measure in turn on one machine (`--in-turn`).

One run measures for about a second while the other runs wait. If another program then disturbs the
machine for some seconds, it affects all runs equally. This matters if two runs are compared.

The lock is a file lock. A process takes the lock before it loads its models. The operating system
releases it when the process ends. The file contains the names of all processes that share the lock,
and of the last process that measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

from specbench_cli import files
from specbench_cli.errors import UsageError

PARTNER_WAIT_S = 120.0
"""Maximum time in seconds that the first process waits for a second process to join."""
_POLL_S = 0.005
"""Seconds for which a process releases the lock, so that another process can take it."""
_MAX_CHARACTERS = 1 << 20


class MachineLock:
    """Machine lock of one process. Creating this object waits until the process has the lock.

    Args:
        path: The lock file. It is created if it does not exist.
        name: Name of this process in the lock file. Default: process id and start time.
        alive: Function that returns True if the process with a name is running. For tests.

    Attributes:
        waits_for_partner: True if the next `pass_on` waits for another process to join. It waits
            only once. A process that starts later can still join.

    Raises:
        UsageError: the file cannot be written, or the system has no file locks.
    """

    def __init__(
        self, path: Path, name: str | None = None, alive: Callable[[str], bool] | None = None
    ) -> None:
        self._path = path
        self._name = _name(psutil.Process()) if name is None else name
        self._alive = _is_alive if alive is None else alive
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = files.open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._file: IO[str] = os.fdopen(fd, "a+", encoding="utf-8")
            _lock(self._file)
        except OSError as error:
            raise UsageError(
                f"--in-turn {path}: {error.strerror}", hint="choose a file that can be written"
            ) from error
        except UsageError as error:
            raise UsageError(
                f"--in-turn {error.message}", hint="choose a file that does not exist"
            ) from error
        partners = self._partners()
        self._has_partner, self.waits_for_partner = bool(partners), True
        self._write(last=self._read().get("last") if partners else None, partners=partners)

    def pass_on(self) -> bool:
        """Release the lock, and take it again after another process has measured.

        Return True if another process measured. The first call waits at most `PARTNER_WAIT_S` for
        another process to join. A process that has joined is waited for as long as it runs.
        """
        end = time.monotonic() + (
            PARTNER_WAIT_S if self.waits_for_partner and not self._has_partner else 0.0
        )
        self.waits_for_partner = False
        self._write(last=self._name, partners=self._partners())
        while True:
            _unlock(self._file)
            time.sleep(_POLL_S)
            _lock(self._file)
            partners = self._partners()
            self._has_partner |= bool(partners)
            if self._read().get("last") != self._name:
                return True
            if not partners and (self._has_partner or time.monotonic() >= end):
                return False

    def close(self) -> None:
        """Release the lock, and remove this process from the names in the lock file."""
        self._file.close()

    def _partners(self) -> list[str]:
        """Return the names of the other processes that share the lock and are still running."""
        members: list[str] = self._read().get("there", [])
        return [name for name in members if name != self._name and self._alive(name)]

    def _read(self) -> dict[str, Any]:
        """Return the content of the lock file.

        Raise UsageError if another program wrote the file.
        """
        self._file.seek(0)
        try:
            text = self._file.read(_MAX_CHARACTERS)
            content: dict[str, Any] = json.loads(text) if text else {}
        except ValueError:
            content = {}
        if text and not _is_lock_file(content):
            self.close()
            raise UsageError(
                f"--in-turn {self._path} is not a lock file of specbench",
                hint="choose a file that does not exist",
            )
        return content

    def _write(self, *, last: str | None, partners: list[str]) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump({"last": last, "there": [*partners, self._name]}, self._file)
        self._file.flush()


def _is_lock_file(content: Any) -> bool:
    """Return True if the content of a file was written by `MachineLock`."""
    if not isinstance(content, dict) or content.keys() != {"last", "there"}:
        return False
    last, members = content["last"], content["there"]
    names = [*members, *([] if last is None else [last])] if isinstance(members, list) else [None]
    return all(isinstance(name, str) for name in names)


@cache
def get_machine_lock(path: Path) -> MachineLock:
    """Return the machine lock of this process.

    The process keeps the lock until the process ends. So no other run measures while this run
    writes its results.
    """
    return MachineLock(path)


def _name(process: psutil.Process) -> str:
    """Return a unique name of a process: its id and its start time, because ids are reused."""
    return f"{process.pid} {process.create_time():.2f}"


def _is_alive(name: str) -> bool:
    """Return True if the process with a name is running, and is not a zombie process."""
    try:
        process = psutil.Process(int(name.partition(" ")[0]))
        return _name(process) == name and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # the process id may be invalid
        return False
    except psutil.Error:
        return True


def _lock(file: IO[str]) -> None:
    """Lock a file.

    If another process has locked it, wait. Raise OSError if there are no file locks.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError(0, "this system cannot lock files (fcntl)") from error
    fcntl.flock(file, fcntl.LOCK_EX)


def _unlock(file: IO[str]) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)
