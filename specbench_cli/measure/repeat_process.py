"""Processes of repeats: the command that starts a process, its exit code, and its errors."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli.engine.workers.process_lifetime import exit_with_parent
from specbench_cli.errors import ExitCode, SpecbenchError, UsageError
from specbench_cli.interpreter import python_command
from specbench_cli.measure.worker_process import WorkerProcess

if TYPE_CHECKING:
    from specbench_cli.store.run_dir import RunDir

TUNING = "tuning"
"""Name of the part of a run that chooses parameters (`--tune`)."""

FINISHED_OFFSET = 100
"""Number that a finished repeat adds to its exit code. Without it, a process that ended early with
code 0 would look successful."""

_SILENT = (ExitCode.OK, ExitCode.INTERRUPTED)
"""Exit codes with which the process of a repeat has not printed an error."""


class UnfinishedRepeat(SpecbenchError):
    """Error: the process of a repeat ended before the repeat was finished.

    Args:
        message, hint: Message and hint for the user.
        code: Exit code of the run.
        already_reported: True if the process has printed the error itself.
    """

    def __init__(
        self, message: str, hint: str | None, code: ExitCode, *, already_reported: bool
    ) -> None:
        super().__init__(message, hint)
        self.exit_code = code
        self.already_reported = already_reported


def run_repeat(
    run_dir: RunDir, number: int, what: str, flags: Sequence[str], *, resumable: bool
) -> None:
    """Measure a repeat of a run in a new process, and wait for it.

    Args:
        run_dir: Folder of the run. The new process shares the lock of this folder.
        number: Number of the repeat.
        what: Name of the repeat in messages.
        flags: Command-line options of the new process, so that it displays progress like this
            process.
        resumable: True if the run can be resumed even if this repeat stores nothing.

    Raises:
        UnfinishedRepeat: the new process failed, was killed, or was interrupted.
    """
    path, lock = run_dir.path, run_dir.lock
    code = run_command([*_command(path, number), *flags], () if lock is None else (lock.fd,))
    if code >= FINISHED_OFFSET and code - FINISHED_OFFSET in set(ExitCode):
        return
    resumable = resumable or run_dir.has_records
    hint = resume_command(path) if resumable else None
    if code < 0:
        name = signal.Signals(-code).name
        raise UnfinishedRepeat(
            f"{what} was not finished: its process was killed ({name})",
            hint or "specbench run",
            ExitCode.ENVIRONMENT,
            already_reported=False,
        )
    raise UnfinishedRepeat(
        f"{what} was not finished: its process ended with exit code {code}",
        hint,
        _run_exit_code(code),
        already_reported=code not in _SILENT,
    )


def _run_exit_code(code: int) -> ExitCode:
    """Return the exit code of the run if a repeat's process ended before the repeat was finished.

    Args:
        code: Exit code of the repeat's process.
    """
    if code == ExitCode.OK:
        return ExitCode.ENVIRONMENT
    return ExitCode(code) if code in set(ExitCode) else ExitCode.BUG


def resume_command(path: Path) -> str:
    """Return the command with which the user resumes a run."""
    return f"specbench run --resume {shlex.quote(str(path))}"


def bind_to_parent(parent: int) -> None:
    """End this process, which measures a repeat, as soon as the main process of the run ends.

    Otherwise this process could write to the run's folder while a resumed run writes there too.

    Args:
        parent: Process id of the main process.

    Raises:
        UsageError: the main process has ended, or did not start this process.
    """
    if os.getppid() != parent:
        raise UsageError(
            f"--parent {parent}: that process did not start this one, or has ended",
            hint="leave out --parent: a run starts these processes itself",
        )
    exit_with_parent(parent)


def _command(path: Path, number: int) -> list[str]:
    """Return the command that starts the process of a repeat, see `commands.run`."""
    resumed = ["run", "--resume", str(path), "--only-pass", str(number)]
    return python_command("specbench_cli.__main__:main", *resumed, "--parent", str(os.getpid()))


def run_command(command: Sequence[str], descriptors: Collection[int] = ()) -> int:
    """Run a command, wait for it, and return its exit code.

    If a signal ended the command, the exit code is negative. If this process is interrupted,
    interrupt the command too.

    Args:
        command: The command with its arguments.
        descriptors: File descriptors that the command inherits.
    """
    return WorkerProcess(command, descriptors=descriptors).wait()
