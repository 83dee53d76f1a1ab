"""`specbench report`: the tables of runs that were made, files of them, or two outputs compared."""

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
    "specbench report last --prompt mini/qa-044 --method sps",
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
    prompt: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show outputs on this prompt beside vanilla's instead."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", metavar="M", help="With --prompt: of these rows; default all."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="With --prompt: a JSON line a comparison.")
    ] = False,
) -> ExitCode:
    """Print a run's table, over all and by task family; with --to, write files.

    With --prompt: a method's text beside vanilla's, the place where they part, and every step.
    """
    if prompt is not None:
        if to is not None or out is not None or len(runs) > 1:
            raise UsageError(
                "--prompt shows one run and takes neither --to nor --out",
                hint=f"specbench report {runs[0]} --prompt {prompt}",
            )
        return _compare(runs[0], prompt, method, json)
    if method is not None or json:
        raise UsageError(
            f"{'--json' if json else '--method'} needs --prompt",
            hint=f"specbench report {runs[0]} --to json"
            if json
            else f"specbench report {runs[0]} --prompt ID --method {method}",
        )
    if to is None and out is not None:
        raise UsageError("--out needs --to", hint=f"specbench report {runs[0]} --to md --out {out}")
    from specbench_cli.report import outputs, table
    from specbench_cli.report.reading import read
    from specbench_cli.store.run_dir import RunDir

    formats = _formats(to, list(outputs.FORMATS)) if to is not None else []
    paths = [_path(run) for run in runs]
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


def _compare(run: str, prompt: str, method: str | None, json: bool) -> ExitCode:
    """Show the outputs on one prompt."""
    from specbench_cli.report.comparison import compare
    from specbench_cli.report.facts import Facts
    from specbench_cli.report.side_by_side import page
    from specbench_cli.report.tokens import decoder_of
    from specbench_cli.store.run_dir import RunDir

    run_dir = RunDir.open(_path(run))
    target = Facts.of(run_dir.manifest).target
    labels = [] if method is None else [word for word in method.split(",") if word]
    decode = decoder_of(target)
    found = compare(run_dir, prompt, labels, decode)
    if decode is None:
        output.note(f"ids instead of texts: the tokenizer of {target} is not on this machine")
    for number, comparison in enumerate(found):
        if json:
            output.json_line(comparison.as_dict())
        else:
            output.data(("\n\n" if number else "") + page(comparison))
    return ExitCode.OK


def _path(run: str) -> Path:
    """A run's folder; `last` is the newest one."""
    from specbench_cli.store.run_dir import latest

    return latest() if run == LAST else Path(run)


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
