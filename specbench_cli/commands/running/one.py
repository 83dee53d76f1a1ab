"""One run: measured, written, and how it goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specbench_cli import output
from specbench_cli.errors import EnvironmentFault, ExitCode, not_written
from specbench_cli.measure import repeat_process

if TYPE_CHECKING:
    from specbench_cli.measure.result import Result
    from specbench_cli.measure.view import RunView
    from specbench_cli.plan.plan import Plan
    from specbench_cli.report.reading import Reading
    from specbench_cli.store.run_dir import RunDir

NOISE = (
    "the machine was not quiet: other processes took more than 5% of it while too many outputs were"
    " timed, so those times are void and speedups are missing; outputs and verdicts stand",
    "close other programs (specbench doctor measures them) and run again; or keep such times,"
    " labelled noisy: --allow-noise",
)
"""What is said, and what to do, where a run ends with exit code 3."""


def measured(
    plan: Plan | None,
    run_dir: RunDir,
    view: RunView,
    place: Path,
    force: bool,
    in_turn: Path | None,
    *,
    only_pass: int | None = None,
    fresh: bool,
) -> Result:
    """Do what a run lacks (`execute.run`), which is found again as `place`."""
    from specbench_cli.measure import run as execute
    from specbench_cli.store.run_dir import RunDir, remember

    try:
        return execute.run(
            plan,
            run_dir,
            view,
            only_pass=only_pass,
            fresh=fresh,
            force=force,
            in_turn=in_turn,
        )
    except repeat_process.Unfinished as fault:
        if fault.told and plan is not None and plan.config.repeats == 1:
            raise typer.Exit(fault.exit_code) from fault  # who ordered one pass knows of none
        raise
    finally:
        if RunDir.holds_run(run_dir.path):  # else it failed before anything was measured
            remember(place)


def written(folder: Path, view: RunView) -> Reading:
    """Write the files that belong to a finished run."""
    from specbench_cli.report import outputs
    from specbench_cli.store.run_dir import RunDir

    view.stage("writing the report")
    return outputs.write_outputs(RunDir.open(folder))


@contextmanager
def told_how_to_go_on(
    path: Path, view: RunView, part: bool, command: str | None = None
) -> Iterator[None]:
    """Say with which command a run goes on that is stopped by a person, a disk or a reader; of a
    part of one, whoever ordered it says so.

    Args:
        command: where that is not a run's own.
    """
    try:
        yield
    except KeyboardInterrupt as stopped:
        if part:
            raise typer.Exit(ExitCode.INTERRUPTED) from stopped
        if (resumed := command or _resumption(path)) is not None:
            view.note(f"to go on: {resumed}")
        raise
    except BrokenPipeError as fault:
        output.drop_stdout()
        resumed = command or _resumption(path)
        raise EnvironmentFault("stdout was closed by its reader", resumed) from fault
    except OSError as fault:
        raise not_written(fault, command or _resumption(path)) or fault from fault


def _resumption(path: Path) -> str | None:
    """Return the command that resumes a run, or None if nothing of the run was stored."""
    from specbench_cli.store.matrix import is_matrix
    from specbench_cli.store.run_dir import RunDir

    return repeat_process.resumption(path) if RunDir.holds_run(path) or is_matrix(path) else None
