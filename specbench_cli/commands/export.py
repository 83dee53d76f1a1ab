"""`specbench export`: a run's outputs as files that other evaluation tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench_cli import output
from specbench_cli.errors import ExitCode, UsageError

EXAMPLES = (
    "specbench export last --inspect",
    "specbench export last --inspect --lm-eval --out exported",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "Then: inspect view --log-dir RUN/export/inspect. See docs/trackers.md.",
    )
)


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, or `last`.", show_default=False)
    ],
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Logs for Inspect AI's viewer: one a task and row.")
    ] = False,
    lm_eval: Annotated[
        bool,
        typer.Option(
            "--lm-eval", help="Results and samples as lm-evaluation-harness logs them: by row."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder; default export/ in the run's."),
    ] = None,
) -> ExitCode:
    """Write prompts, outputs, verdicts and scores for readers of other evaluations.

    Texts are made of ids by the target's tokenizer. An output's score is whether it is vanilla's,
    and its task's where the task has one; speedups are in the metadata.
    """
    chosen = {"inspect": inspect, "lm-eval": lm_eval}
    formats = [name for name, wanted in chosen.items() if wanted]
    if not formats:
        raise UsageError(
            "export needs a format: --inspect, --lm-eval, or both",
            f"specbench export {run} --inspect",
        )
    from specbench_cli.comparison.reading import folder
    from specbench_cli.report.samples import export as write
    from specbench_cli.store.run_dir import RunDir

    run_dir = RunDir.open(folder(run))
    place = out or run_dir.path / "export"
    try:
        files = write(run_dir, place, formats)
    except OSError as error:
        raise UsageError(f"cannot write to {place}: {error.strerror}") from error
    for file in files:
        output.data(str(file))
    return ExitCode.OK
