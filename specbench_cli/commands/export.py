"""`specbench export`: a run's outputs as files that other evaluation tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench_cli import files, output
from specbench_cli.commands import OUTPUT, OVERWRITE
from specbench_cli.errors import ExitCode, UsageError

EXAMPLES = (
    "specbench export last --inspect",
    "specbench export last --inspect --lm-eval --out exported",
    "specbench export last --wandb --mlflow",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "Then: inspect view --log-dir RUN/export/inspect. See docs/trackers.md.",
    )
)


WRITTEN = "What to write"


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, or `last`.", show_default=False)
    ],
    inspect: Annotated[
        bool,
        typer.Option(
            "--inspect",
            help="Logs for Inspect AI's viewer: one a task and row.",
            rich_help_panel=WRITTEN,
        ),
    ] = False,
    lm_eval: Annotated[
        bool,
        typer.Option(
            "--lm-eval",
            help="Results and samples as lm-evaluation-harness logs them: by row.",
            rich_help_panel=WRITTEN,
        ),
    ] = False,
    wandb: Annotated[
        bool,
        typer.Option(
            "--wandb",
            help="Figures for Weights & Biases, offline: a run a row.",
            rich_help_panel=WRITTEN,
        ),
    ] = False,
    mlflow: Annotated[
        bool,
        typer.Option(
            "--mlflow",
            help="Figures for MLflow, or its server: a run a row.",
            rich_help_panel=WRITTEN,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="The folder.",
            show_default="export/ in the run's",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help=OVERWRITE, rich_help_panel=OUTPUT)
    ] = False,
) -> ExitCode:
    """Write outputs, verdicts and scores for readers of other evaluations, figures for trackers.

    Texts are made of ids by the target's tokenizer. An output's score is whether it is vanilla's,
    and its task's where the task has one; speedups are in the metadata. Nothing is sent anywhere,
    unless MLFLOW_TRACKING_URI names a server.
    """
    samples = {"inspect": inspect, "lm-eval": lm_eval}
    formats = [name for name, wanted in samples.items() if wanted]
    trackers = [name for name, wanted in {"wandb": wandb, "mlflow": mlflow}.items() if wanted]
    if not formats and not trackers:
        raise UsageError(
            "export needs a format: --inspect, --lm-eval, --wandb or --mlflow",
            f"specbench export {run} --inspect",
        )
    from specbench_cli.report.samples import export as write
    from specbench_cli.report.trackers import track
    from specbench_cli.store.run_dir import RunDir, folder

    run_dir = RunDir.open(folder(run))
    place = out or run_dir.path / "export"
    try:
        if formats:
            with files.staging_folder(place, overwrite=overwrite) as staging:
                written = write(run_dir, staging, formats)
            for file in written:
                output.data(str(place / file.relative_to(staging)))
        further = [line for name in trackers for line in track(run_dir, place, name)]
    except OSError as error:
        raise UsageError(f"cannot write to {place}: {error.strerror}") from error
    for line in further:
        output.note(f"next: {line}")
    return ExitCode.OK
