"""A pass in a process of its own, and what became of it."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli.engine.workers.lifeline import end_with
from specbench_cli.errors import ExitCode, SpecbenchError, UsageError
from specbench_cli.measure.worker_process import WorkerProcess, python_command

if TYPE_CHECKING:
    from specbench_cli.store.run_dir import RunDir

TUNING = "tuning"
"""What the part of a run is called that chooses parameters."""

DONE = 100
"""What a pass that was finished adds to its exit code: those of a process that ended otherwise, be
it with 0, do not say so."""

_SILENT = (ExitCode.OK, ExitCode.INTERRUPTED)
"""Exit codes of a pass that did not say why it ended."""


class Unfinished(SpecbenchError):
    """A pass that its process did not finish.

    Attributes:
        told: whether the process has said itself what was wrong.
    """

    def __init__(self, message: str, hint: str | None, code: ExitCode, *, told: bool) -> None:
        super().__init__(message, hint)
        self.exit_code = code
        self.told = told


def run_apart(run_dir: RunDir, number: int, what: str, flags: Sequence[str], *, kept: bool) -> None:
    """Run pass `number` of a run in a fresh process, to its end.

    Args:
        run_dir: the run's folder, which that process holds with this one.
        what: the pass's name in messages.
        flags: options that make it show itself as this process would.
        kept: whether the run holds what a resumption would go on from, whatever this pass does.

    Raises:
        Unfinished: it failed, was killed, or was interrupted.
    """
    path, lock = run_dir.path, run_dir.lock
    code = finished([*_command(path, number), *flags], () if lock is None else (lock.fd,))
    if code >= DONE and code - DONE in set(ExitCode):
        return
    kept = kept or run_dir.has_records
    hint = resumption(path) if kept else None
    if code < 0:
        name = signal.Signals(-code).name
        raise Unfinished(
            f"{what} was not finished: its process was killed ({name})",
            hint or "specbench run",
            ExitCode.ENVIRONMENT,
            told=False,
        )
    raise Unfinished(
        f"{what} was not finished: its process ended with exit code {code}",
        hint,
        _meant(code),
        told=code not in _SILENT,
    )


def _meant(code: int) -> ExitCode:
    """The exit code of a run whose pass ended so; 0 was none of ours."""
    if code == ExitCode.OK:
        return ExitCode.ENVIRONMENT
    return ExitCode(code) if code in set(ExitCode) else ExitCode.BUG


def resumption(path: Path) -> str:
    """The command that makes what a run lacks."""
    return f"specbench run --resume {shlex.quote(str(path))}"


def begin_apart(parent: int) -> None:
    """In such a process, first of all: do not outlive the run, whose folder another may take.

    Raises:
        UsageError: another process started this one, or that one is gone.
    """
    if os.getppid() != parent:
        raise UsageError(
            f"--parent {parent}: that process did not start this one, or has ended",
            hint="a run starts its passes itself: leave --parent out",
        )
    end_with(parent)


def _command(path: Path, number: int) -> list[str]:
    """Return the command that measures a repeat; see `commands.run`."""
    resumed = ["run", "--resume", str(path), "--only-pass", str(number)]
    return python_command("specbench_cli.__main__:main", *resumed, "--parent", str(os.getpid()))


def finished(command: Sequence[str], descriptors: Collection[int] = ()) -> int:
    """Return the exit code of a command, negative for a signal. If this process is interrupted, so
    is the command.

    Args:
        descriptors: open files that the command inherits.
    """
    return WorkerProcess(command, descriptors=descriptors).wait()
