"""`specbench run`: measure methods on prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specbench_cli import output
from specbench_cli.commands._running import (
    NOISE_ERROR,
    create_matrix,
    measure_matrix,
    measure_missing,
    read_settings,
    show_resume_command,
    write_report,
)
from specbench_cli.commands._trust import permission_check
from specbench_cli.config import options
from specbench_cli.config.options import option_name
from specbench_cli.config.profile import PROFILES
from specbench_cli.config.sources import PARAM_FIELDS
from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.measure import repeat_process
from specbench_cli.store.record_queries import resolve_acceptance

if TYPE_CHECKING:
    from specbench_cli.commands._progress import ProgressDisplay
    from specbench_cli.config.run import RunConfig, RunInvocation
    from specbench_cli.measure.result import RunResult
    from specbench_cli.plan.plan import Plan
    from specbench_cli.report.report_data import ReportData

EXAMPLES = (
    "specbench run",
    "specbench run -m sps,pld --limit 24",
    "specbench run -m sps --set sps.length=7 --temperature 0.8 --verify coupled",
    "specbench run -m vanilla,sps --batch 8 --limit 48",
    "specbench run -m sps -t mini --category translation --max-new-tokens 32 --repeats 3",
    "specbench run --sweep sps.length=1:6:1 --limit 24",
    "specbench run -m sps,pld --targets embedded-7m,embedded-exit --limit 24",
    "specbench run -m sps,pld --tune --limit 24",
    "specbench run -m pearl --devices target=cpu:0,draft=cpu:1",
    "specbench run --profile ci",
    "specbench run -m sps --limit 12 --in-turn turns --out base/1",
    "specbench run --target embedded-1m -m pld --threads 1 --allow-noise --out runs/lookup",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "Profiles:",
        *(f"{name}: {about}." for name, about in PROFILES.items()),
        "Options can also be set in the environment (SPECBENCH_OPTION) and in a YAML file."
        " Precedence: command line (options and --set), environment, --config file,"
        " ./specbench.yaml, profile, default.",
    )
)

DEFAULT_CANDIDATES = "8"
"""Number of candidates of `--tune` if no number is given."""


@options.command("specbench_cli.config.run:RunConfig", "specbench_cli.config.run:RunInvocation")
def run(given: dict[str, Any], call: dict[str, Any]) -> ExitCode:
    """Measure the speedup and acceptance of methods, and whether outputs equal vanilla's.

    The report also has the time of each phase (draft, verify and others). Vanilla decoding is
    always measured too. Without options, run a short benchmark on 12 prompts, with the embedded
    models: small models that are part of specbench.
    """
    from specbench_cli.config.run import RunInvocation

    invocation = options.validate(RunInvocation, call, "specbench run --help")
    settings = None if invocation.resume is not None else _compose(given, invocation)
    if invocation.resume is not None:
        _check_resume_options(
            [*map(option_name, given), *(option_name(key) for key in _NEW_RUN if call.get(key))]
        )
    if invocation.parent is not None:
        repeat_process.bind_to_parent(invocation.parent)
    from specbench_cli.commands._progress import make_progress

    form = "json" if invocation.as_json else invocation.format
    is_repeat = invocation.only_pass is not None
    with make_progress(
        json=form == "json", dry_run=invocation.dry_run, part=is_repeat, start_s=time.process_time()
    ) as view:
        if settings is not None and invocation.dry_run:
            return _print_plan(settings[0], view)
        place, results, reading = _measure(settings, invocation, view)
    with (
        show_resume_command(place, view, is_repeat=False),
        suppress(BrokenPipeError),  # all results are stored, so a closed pipe is no error
    ):
        _show(reading, place, form)
    return _report_missing(results, reading)


_NEW_RUN = ("out", "config", "dry_run")
"""Options that cannot be combined with `--resume`."""


def _compose(given: dict[str, Any], invocation: RunInvocation) -> tuple[RunConfig, dict[str, str]]:
    """Return the settings of a new run, and where each setting comes from.

    Raises:
        UsageError: a setting is invalid.
    """
    from specbench_cli.config.sources import from_command_line

    if invocation.force:
        raise UsageError("--force needs --resume", "specbench run --resume RUN --force")
    flags = {name: value for name, value in given.items() if name not in PARAM_FIELDS}
    if "acceptance" in flags:
        flags["acceptance"] = resolve_acceptance(flags["acceptance"])
    return read_settings(
        from_command_line(flags, given.get("set", []), given.get("sweep", [])),
        invocation.config,
        permission_check(invocation.trust),
    )


def _print_plan(config: RunConfig, view: ProgressDisplay) -> ExitCode:
    """Print the plan of a run, or of each run of a matrix."""
    from specbench_cli.measure.planning import plan_dry_run
    from specbench_cli.plan.matrix import expand_matrix, is_matrix
    from specbench_cli.plan.power import estimate_power

    for each in expand_matrix(config).values() if is_matrix(config) else [config]:
        first, facts = plan_dry_run(each)
        view.planned({**facts, "detects": estimate_power(first)})
    return ExitCode.OK


def _measure(
    settings: tuple[RunConfig, dict[str, str]] | None,
    invocation: RunInvocation,
    view: ProgressDisplay,
) -> tuple[Path, list[RunResult], ReportData]:
    """Measure a new run or matrix (one run per model pair).

    If `settings` is None, complete an interrupted run or matrix.

    Raises:
        typer.Exit: this process measured one repeat. Its parent process reads the exit code.
    """
    from specbench_cli.measure.run import permissions_to_resume, resume_run, start_run
    from specbench_cli.plan.matrix import is_matrix
    from specbench_cli.store import matrix
    from specbench_cli.store.run_dir import find_run

    is_repeat = invocation.only_pass is not None
    plan: Plan | None
    if settings is not None:
        config, sources = settings
        if is_matrix(config):
            return _measure_matrix(create_matrix(config, sources, invocation.out), invocation, view)
        plan, run_dir = start_run(config, sources, invocation.out, view)
    else:
        folder = find_run(str(invocation.resume), to_resume=True)
        if not is_repeat:
            permission_check(invocation.trust)(
                permissions_to_resume(folder, invocation.force), str(folder)
            )
        if matrix.is_matrix(folder):
            return _measure_matrix(folder, invocation, view)
        plan, run_dir = resume_run(folder, view, part=is_repeat, force=invocation.force)
    place = run_dir.path
    with show_resume_command(place, view, is_repeat):
        made = measure_missing(
            plan,
            run_dir,
            view,
            place,
            invocation.force,
            invocation.in_turn,
            only_pass=invocation.only_pass,
            fresh=settings is not None,
        )
    if is_repeat:
        raise typer.Exit(repeat_process.FINISHED_OFFSET + made.exit_code)
    with show_resume_command(place, view, is_repeat=False):
        return place, [made], write_report(place, view)


def _measure_matrix(
    place: Path, invocation: RunInvocation, view: ProgressDisplay
) -> tuple[Path, list[RunResult], ReportData]:
    """Measure the missing outputs of all runs in a matrix."""
    with show_resume_command(place, view, is_repeat=False):
        return place, *measure_matrix(place, view, invocation.force, invocation.in_turn)


def _report_missing(results: Sequence[RunResult], reading: ReportData) -> ExitCode:
    """Print why times or methods are missing in the results.

    Returns:
        The most severe exit code of all runs.
    """
    if any(each.exit_code is ExitCode.ENVIRONMENT and each.noisy for each in results):
        output.error(*NOISE_ERROR)
    if left_out := reading.run.manifest.get("left_out"):
        output.error(
            f"could not run on this machine, so left out: {', '.join(left_out)}",
            "the reasons are above, and in report.md",
        )
    environment = any(each.exit_code is ExitCode.ENVIRONMENT for each in results)
    if environment and not left_out and not any(each.noisy for each in results):
        output.error(
            "no method other than vanilla was measured completely",
            "see the reasons above, or in report.md",
        )
    order = (ExitCode.OK, ExitCode.ENVIRONMENT, ExitCode.BAD_ANSWER)
    return max((each.exit_code for each in results), key=order.index)


def _show(reading: ReportData, folder: Path, form: output.Format) -> None:
    """Print the results of a run."""
    from specbench_cli.report.export import row_dicts
    from specbench_cli.report.terminal import table
    from specbench_cli.summary.load import as_dict, load_rows, saturation_notes

    if form == "json":
        manifest = reading.run.manifest
        one = {key: manifest.get(key) for key in ("memory", "tuning")}
        several = {"runs": [source.path for source in reading.sources]}
        loads = load_rows(reading.records)
        output.json_line(
            {
                "event": "done",
                "run": folder,
                **(several if reading.facts.targets else one),
                "summary": row_dicts(reading.summary),
                "load": [as_dict(row) for row in loads],
                "saturation": saturation_notes(loads),
            }
        )
    else:
        table.print_runs([reading], form=form)
        output.note(f"in {folder}")


def expand_tune(args: Sequence[str]) -> list[str]:
    """Return the command-line arguments, with a default number of candidates after a bare `--tune`.

    Typer does not support options with an optional value.
    """
    words: list[str] = []
    for at, word in enumerate(args):
        words.append(word)
        if word == "--tune" and all(next_.startswith("-") for next_ in args[at + 1 : at + 2]):
            words.append(DEFAULT_CANDIDATES)
    return words


def _check_resume_options(options: list[str]) -> None:
    """Raise UsageError if the user gave settings together with `--resume`.

    Args:
        options: The options that the user gave. Options that `--resume` allows are not among them.
    """
    if options:
        raise UsageError(
            f"--resume uses the settings of the run; omit {', '.join(options)}",
            "specbench run --resume RUN",
        )
