"""`specbench export`: write a run's results for other evaluation tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_cli import files, output
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.config.commands import ExportOptions

EXAMPLES = (
    "specbench export last --inspect",
    "specbench export last --inspect --lm-eval --out exported",
    "specbench export last --wandb --mlflow",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "View Inspect AI logs: inspect view --log-dir RUN/export/inspect."
        " See docs/how-to/trackers.md.",
    )
)


@parsed_command("specbench_cli.config.commands:ExportOptions")
def export(options: ExportOptions) -> ExitCode:
    """Export a run to Inspect AI, lm-evaluation-harness, Weights & Biases or MLflow.

    At least one of --inspect, --lm-eval, --wandb and --mlflow is needed. Each output has the score
    same_output: 1 if it equals vanilla's output, or first differs where the target's two best
    tokens have nearly equal logits (a near-tie), else 0. If the task
    scores answers, the output also has that score. Speedups are stored as metadata. No data leaves
    this machine, unless MLFLOW_TRACKING_URI names a server.
    """
    formats = [flag.removeprefix("--") for flag in options.changed_flags("inspect", "lm_eval")]
    trackers = [flag.removeprefix("--") for flag in options.changed_flags("wandb", "mlflow")]
    if not formats and not trackers:
        raise UsageError(
            "export needs a format: --inspect, --lm-eval, --wandb or --mlflow",
            f"specbench export {options.run} --inspect",
        )
    from specbench_cli.report.samples import export as write
    from specbench_cli.report.trackers import track
    from specbench_cli.store.run_dir import RunDir, find_run

    run_dir = RunDir.open(find_run(options.run))
    place = options.out or run_dir.path / "export"
    try:
        if formats:
            with files.staging_folder(place, overwrite=options.overwrite) as staging:
                written = write(run_dir, staging, formats)
            for file in written:
                output.data(str(place / file.relative_to(staging)))
        hints = [line for name in trackers for line in track(run_dir, place, name)]
    except OSError as error:
        raise UsageError(f"cannot write to {place}: {error.strerror}") from error
    for line in hints:
        output.note(f"next: {line}")
    return ExitCode.OK
