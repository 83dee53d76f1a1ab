"""`specbench report`: the tables of runs that were made, or files of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli import output
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.report.reading import Reading

LAST = "last"
EXAMPLES = (
    "specbench report last",
    "specbench report results/runs/20261121T102403Z-mini-1f2e3d4c --to md,csv",
    "specbench report last --to json --out /tmp/report",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs, or `last`.", show_default=False),
    ],
    to: Annotated[
        str | None, typer.Option(help="Write files instead: md, csv, json; separate by commas.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Their folder; default report/ in the first run's."),
    ] = None,
) -> ExitCode:
    """Print a run's table, over all and by task family; with --to, write files."""
    if to is None and out is not None:
        raise UsageError("--out needs --to", hint=f"specbench report {runs[0]} --to md --out {out}")
    from specbench_cli.report import outputs, table
    from specbench_cli.report.reading import read
    from specbench_cli.store.run_dir import RunDir, latest

    formats = _formats(to, list(outputs.FORMATS)) if to is not None else []
    paths = [latest() if run == LAST else Path(run) for run in runs]
    readings = [read(RunDir.open(path)) for path in paths]
    if to is None:
        table.print_runs(readings, families=True)
        return ExitCode.OK
    folder = out or paths[0] / "report"
    for reading, place in zip(readings, _places(readings, folder), strict=True):
        for name in formats:
            for file in outputs.FORMATS[name](reading, _made(place)):
                output.data(str(file))
    return ExitCode.OK


def _formats(to: str, known: list[str]) -> list[str]:
    """The words of --to."""
    words = [word.strip() for word in to.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise UsageError(f"--to {word!r} is none of {', '.join(known)}")
    if not words:
        raise UsageError(f"--to names no format; there are {', '.join(known)}")
    return words


def _places(readings: list[Reading], folder: Path) -> list[Path]:
    """A folder for each run: the one asked for, or one in it for each of several."""
    if len(readings) == 1:
        return [folder]
    return [
        folder / f"{number}-{reading.run.path.resolve().name}"
        for number, reading in enumerate(readings, start=1)
    ]


def _made(folder: Path) -> Path:
    """The folder, made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    return folder
