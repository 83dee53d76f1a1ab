"""A repeat in its own process: command, exit code, and errors."""

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
"""Name of the part of a run that chooses parameters."""

FINISHED_OFFSET = 100
"""Number that a finished repeat adds to its exit code, so that an early exit with code 0 is not
taken for success."""

_SILENT = (ExitCode.OK, ExitCode.INTERRUPTED)
"""Exit codes of a repeat that printed no error."""


class UnfinishedRepeat(SpecbenchError):
    """A repeat whose process did not finish it.

    Attributes:
        already_reported: True if the process printed the error itself.
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
    """Measure repeat `number` of a run in a fresh process.

    Args:
        run_dir: folder of the run, whose lock the process shares.
        what: name of the repeat in messages.
        flags: Options that make the process show its progress like this one.
        resumable: True if the run can be resumed even if this repeat fails.

    Raises:
        UnfinishedRepeat: the process failed, was killed, or was interrupted.
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
    """Return the exit code of the run for that of its repeat. A bare 0 counts as a failure."""
    if code == ExitCode.OK:
        return ExitCode.ENVIRONMENT
    return ExitCode(code) if code in set(ExitCode) else ExitCode.BUG


def resume_command(path: Path) -> str:
    """Return the command that resumes a run."""
    return f"specbench run --resume {shlex.quote(str(path))}"


def bind_to_parent(parent: int) -> None:
    """Make this repeat's process end when the process of the run ends.

    The lock of the run's folder is free then, so another process may write there.

    Raises:
        UsageError: another process started this one, or that process is gone.
    """
    if os.getppid() != parent:
        raise UsageError(
            f"--parent {parent}: that process did not start this one, or has ended",
            hint="a run starts its passes itself: leave --parent out",
        )
    exit_with_parent(parent)


def _command(path: Path, number: int) -> list[str]:
    """Return the command that measures a repeat; see `commands.run`."""
    resumed = ["run", "--resume", str(path), "--only-pass", str(number)]
    return python_command("specbench_cli.__main__:main", *resumed, "--parent", str(os.getpid()))


def run_command(command: Sequence[str], descriptors: Collection[int] = ()) -> int:
    """Run a command and return its exit code, negative for a signal.

    If this process is interrupted, the command is interrupted too.

    Args:
        descriptors: open files that the command inherits.
    """
    return WorkerProcess(command, descriptors=descriptors).wait()
