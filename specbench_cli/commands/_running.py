"""Steps shared by the commands that measure, such as `specbench run` and `specbench recommend`.

The steps are: read the settings, measure a run or a matrix of runs (one run per model pair), and
print how to resume after an interruption. Importing torch takes a second, so the settings are
checked before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specbench_cli import output, registry
from specbench_cli.config import permission
from specbench_cli.errors import EnvironmentFault, ExitCode, SpecbenchError, to_write_error
from specbench_cli.measure import repeat_process

if TYPE_CHECKING:
    from specbench_cli.config.run import RunConfig
    from specbench_cli.config.sources import SettingsLayer
    from specbench_cli.measure.result import RunResult
    from specbench_cli.measure.view import RunView
    from specbench_cli.plan.plan import Plan
    from specbench_cli.report.report_data import ReportData
    from specbench_cli.store.run_dir import RunDir

NOISE_ERROR = (
    "the machine was not quiet: for too many outputs, other processes used more than 5% of the CPU,"
    " so their times are not used and speedups are missing; outputs and verdicts are valid",
    "close other programs (specbench doctor measures their load) and run again; or use noisy times,"
    " which labels the run: --allow-noise",
)
"""Error message and hint of a run that ends with exit code 3 because of noise."""


def read_settings(
    given: SettingsLayer, file: Path | None, check: permission.Check
) -> tuple[RunConfig, dict[str, str]]:
    """Return the settings of a new run, and where each setting comes from.

    Args:
        given: settings from the command line or from a Python call.
        file: the config file that the user named with `--config`.
        check: function that raises UsageError for plug-ins and other programs that the user did not
            permit.

    Raises:
        UsageError: a value, key, method, parameter or file is invalid.
    """
    from specbench_cli.config.load import load

    config, sources = load(
        given,
        file,
        methods=registry,
        env=os.environ,
        folder=Path(),
        vet=_inspect_plugin,
        check=check,
    )
    for row in config.methods:
        if row.name in registry.built_in_methods():
            registry.declare(row.name, row.params)  # reject wrong parameters before torch is loaded
    return config, sources


def _inspect_plugin(plugin: str) -> None:
    """Import a plug-in in a separate process. Raise UsageError if the import fails."""
    from specbench_cli.measure.isolation.plugin_process import check_plugin_import

    check_plugin_import(plugin)


def measure_missing(
    plan: Plan | None,
    run_dir: RunDir,
    view: RunView,
    place: Path,
    force: bool,
    in_turn: Path | None,
    *,
    only_pass: int | None = None,
    fresh: bool,
) -> RunResult:
    """Measure the missing outputs of a run with `measure_run`, and add the run to the list of runs.

    Args:
        place: Folder to add to the list of runs. For a run in a matrix, it is the matrix's folder.
    """
    from specbench_cli.measure.run import measure_run
    from specbench_cli.store.run_dir import RunDir, register_run

    try:
        return measure_run(
            plan,
            run_dir,
            view,
            only_pass=only_pass,
            fresh=fresh,
            force=force,
            in_turn=in_turn,
        )
    except repeat_process.UnfinishedRepeat as fault:
        if fault.already_reported and plan is not None and plan.config.repeats == 1:
            raise typer.Exit(fault.exit_code) from fault  # the child process has printed the error
        raise
    finally:
        if RunDir.holds_run(run_dir.path):  # otherwise it failed before it stored anything
            register_run(place)


def write_report(folder: Path, view: RunView) -> ReportData:
    """Write the report of a run into its folder, and return the data of the report."""
    from specbench_cli.report import outputs
    from specbench_cli.store.run_dir import RunDir

    view.stage("writing the report")
    return outputs.write_outputs(RunDir.open(folder))


def create_matrix(config: RunConfig, sources: Mapping[str, str], out: Path | None) -> Path:
    """Create the folder of a matrix, which contains one run per pair of target and draft.

    All runs are planned first, so that an invalid one fails before the folder exists.
    """
    from specbench_cli.measure.planning import plan_dry_run
    from specbench_cli.plan.matrix import expand_matrix
    from specbench_cli.store import matrix
    from specbench_cli.store.run_dir import new_path

    runs = expand_matrix(config)
    for each in runs.values():
        plan_dry_run(each)  # report missing assets before any run starts
    path = out or new_path("matrix", config.model_dump(mode="json"))
    order = {name: each.model_dump_json() for name, each in runs.items()}
    matrix.create(path, matrix.MatrixConfig(order, sources))
    for each in runs.values():
        permission.permit(permission.collect_requests(each, matrix.resume_file(path)))
    return path


def measure_matrix(
    folder: Path, view: RunView, force: bool, in_turn: Path | None
) -> tuple[list[RunResult], ReportData]:
    """Measure the missing outputs of all runs of a matrix.

    Returns:
        The result of each run, and one report about all runs.
    """
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure.run import resume_run, start_run
    from specbench_cli.report import outputs
    from specbench_cli.report.report_data import read_matrix
    from specbench_cli.store import matrix
    from specbench_cli.store.run_dir import RunDir

    order = matrix.read_config(folder)
    results: list[RunResult] = []
    try:
        for path in matrix.run_folders(folder):
            plan: Plan | None
            fresh = not RunDir.holds_run(path)
            if fresh and order is not None:
                config = RunConfig.model_validate_json(order.runs[path.name])
                place = matrix.resume_file(folder)
                permission.check(permission.collect_requests(config, place), str(place))
                plan, run_dir = start_run(config, order.sources, path, view)
            else:
                plan, run_dir = resume_run(path, view, force=force)
            result = measure_missing(plan, run_dir, view, folder, force, in_turn, fresh=fresh)
            results.append(result)
            if plan is not None:
                write_report(path, view)
    except SpecbenchError:
        matrix.discard(folder)
        raise
    matrix.finish(folder)
    reading = read_matrix(folder)
    outputs.write_into_run(reading, folder, ("csv", "md"))
    return results, reading


@contextmanager
def show_resume_command(
    path: Path, view: RunView, is_repeat: bool, command: str | None = None
) -> Iterator[None]:
    """Print how to resume the run if Ctrl-C, a full disk or a closed pipe stops the `with` block.

    Args:
        path: Folder of the run.
        is_repeat: True if this process measures one repeat for a parent process. Then the parent
            process prints the command.
        command: The command to print. None means `specbench run --resume` with the folder.
    """
    try:
        yield
    except KeyboardInterrupt as stopped:
        if is_repeat:
            raise typer.Exit(ExitCode.INTERRUPTED) from stopped
        if (resume := command or _find_resume_command(path)) is not None:
            view.note(f"to resume: {resume}")
        raise
    except BrokenPipeError as fault:
        output.drop_stdout()
        resume = command or _find_resume_command(path)
        raise EnvironmentFault("the program that reads stdout has closed it", resume) from fault
    except OSError as fault:
        raise to_write_error(fault, command or _find_resume_command(path)) or fault from fault


def _find_resume_command(path: Path) -> str | None:
    """Return the command that resumes a run, or None if the run has stored nothing."""
    from specbench_cli.store.matrix import is_matrix
    from specbench_cli.store.run_dir import RunDir

    return (
        repeat_process.resume_command(path) if RunDir.holds_run(path) or is_matrix(path) else None
    )
