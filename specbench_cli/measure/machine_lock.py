"""Runs that take turns on a machine: one is at work, for a window of measurement, the others wait.

What slows a machine for some seconds then slows all of them alike: BASE and NEW of a comparison.
Whoever is at work holds the lock on a file, from before its models are loaded; a process that ends,
however it does, lets go of it. In the file: who held it last, and who takes part.
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
"""How long the first one waits for a second."""
_POLL_S = 0.005
"""How often who waits for another's turn looks whether it came; in it the other takes the lock."""
_MOST_CHARACTERS = 1 << 20


class MachineLock:
    """One process' part; made when it is its turn.

    Args:
        path: the file; made where there is none.
        name: what tells it from the others; its process.
        alive: whether the process of a name is there.

    Attributes:
        waits_for_partner: True if the next `pass_on` waits for a first partner. It waits only
            once; a partner that starts later joins without a wait.

    Raises:
        UsageError: the file cannot be written, or the system has no such locks.
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
                f"--in-turn {path}: {error.strerror}", hint="name a file that can be written"
            ) from error
        except UsageError as error:
            raise UsageError(
                f"--in-turn {error.message}", hint="name a file that does not exist"
            ) from error
        partners = self._partners()
        self._has_partner, self.waits_for_partner = bool(partners), True
        self._write(last=self._read().get("last") if partners else None, partners=partners)

    def pass_on(self) -> bool:
        """Let another process measure until it passes the lock on. Return True if there was one.

        Wait at most `PARTNER_WAIT_S` for the first partner, and only once. Wait for a known partner
        as long as its process runs.
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
        """Take no turns any more."""
        self._file.close()

    def _partners(self) -> list[str]:
        """Who else takes part, and lives."""
        members: list[str] = self._read().get("there", [])
        return [name for name in members if name != self._name and self._alive(name)]

    def _read(self) -> dict[str, Any]:
        """What is in the file; raises UsageError where that is somebody else's."""
        self._file.seek(0)
        try:
            text = self._file.read(_MOST_CHARACTERS)
            content: dict[str, Any] = json.loads(text) if text else {}
        except ValueError:
            content = {}
        if text and not _is_lock_file(content):
            self.close()
            raise UsageError(
                f"--in-turn {self._path} is a file of something else",
                hint="name one that does not exist",
            )
        return content

    def _write(self, *, last: str | None, partners: list[str]) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump({"last": last, "there": [*partners, self._name]}, self._file)
        self._file.flush()


def _is_lock_file(content: Any) -> bool:
    """Return True if `MachineLock` wrote the content of the file."""
    if not isinstance(content, dict) or content.keys() != {"last", "there"}:
        return False
    last, members = content["last"], content["there"]
    names = [*members, *([] if last is None else [last])] if isinstance(members, list) else [None]
    return all(isinstance(name, str) for name in names)


@cache
def get_machine_lock(path: Path) -> MachineLock:
    """This process' part, kept until it ends: while a run is concluded, nobody measures."""
    return MachineLock(path)


def _name(process: psutil.Process) -> str:
    """Its number and when it began: numbers are given again."""
    return f"{process.pid} {process.create_time():.2f}"


def _is_alive(name: str) -> bool:
    """Whether a process is there, and not only because its parent does not know of its end."""
    try:
        process = psutil.Process(int(name.partition(" ")[0]))
        return _name(process) == name and process.status() != psutil.STATUS_ZOMBIE
    except (
        psutil.NoSuchProcess,
        ValueError,
        OverflowError,
    ):  # ValueError and OverflowError: an invalid process id
        return False
    except psutil.Error:
        return True


def _lock(file: IO[str]) -> None:
    """Wait for the lock; raises OSError where there are none."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError(0, "this system cannot lock files (fcntl)") from error
    fcntl.flock(file, fcntl.LOCK_EX)


def _unlock(file: IO[str]) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)
