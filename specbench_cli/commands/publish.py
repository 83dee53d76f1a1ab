"""`specbench publish`: a finished run added to a gallery of static pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench_cli import output
from specbench_cli.commands import OUTPUT
from specbench_cli.errors import ExitCode

EXAMPLES = (
    "specbench publish last --to gallery",
    "specbench publish results/reference/default-2cores last --to gallery",
    "specbench publish 20261121T102403Z-mini-1f2e3d4c --to gallery --json",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))


def publish(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="A run's folder, its name in `specbench list runs`, or `last`.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="The gallery's folder; made if need be.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ],
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace pages of --to that specbench did not write, or that were changed since.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="A JSON object a run.", rich_help_panel=OUTPUT)
    ] = False,
) -> ExitCode:
    """Add finished runs to a gallery: static pages that any web server or browser shows.

    The gallery has a leaderboard by target, task, machine, setting and guarantee, and a page a run
    with its picture, its table, what it shows, and its whole report. A run that is there already is
    replaced. A run that is unfinished, broken, mixed, noisy or void is refused, and none is added.
    """
    from specbench_cli.report.gallery.gallery import publish as add
    from specbench_cli.report.gallery.refusal import refuse
    from specbench_cli.report.reading import read
    from specbench_cli.store.run_dir import RunDir, folder

    found = [read(RunDir.open(folder(run))) for run in runs]
    for run in found:
        refuse(run)
    for run in found:
        published = add(run, to, overwrite=overwrite)
        entry = published.entry
        if json:
            output.json_line(
                {
                    "run": entry.name,
                    "page": str(published.page),
                    "index": str(published.index),
                    "replaced": published.replaced,
                    "target": entry.target,
                    "tasks": entry.prompts,
                    "machine": entry.machine,
                    "sentences": list(entry.sentences),
                }
            )
        else:
            output.data(str(published.page))
    if not json:
        output.data(str(published.index))
    return ExitCode.OK
