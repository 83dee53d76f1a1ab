"""`specbench report`: the tables of runs that were made, files of them, or two outputs compared."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench_cli import files, output
from specbench_cli.commands import OUTPUT, OVERWRITE
from specbench_cli.commands._formats import formats
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.summary.source import Source

SPEC_BENCH = "spec-bench"
EXAMPLES = (
    "specbench report last",
    "specbench report last --to md,html,latex,csv,json --out report",
    "specbench report results/runs/20261121T102403Z-mini-1f2e3d4c last --to html",
    "specbench report last --format tsv",
    "specbench report last --also spec-bench",
    "specbench report vanilla.jsonl eagle.jsonl --also spec-bench",
    "specbench report last --prompt mini/qa-044 --method sps",
    "specbench report last --prompt mini/qa-044 --method sps --out lanes",
    "specbench report --scaling grid --at tokens=30M --out law",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))
SHOWN = "What to show"
TYPESET = "pdflatex report; bibtex report; pdflatex report; pdflatex report"


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, or `last`; several become one report; or the folder of runs of"
            " several targets. Or answer files of Spec-Bench (.jsonl), vanilla's first.",
            show_default=False,
        ),
    ],
    also: Annotated[
        str | None,
        typer.Option(
            metavar=SPEC_BENCH,
            help="Also the figures by Spec-Bench's formulas; with --to, its answer files too.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Put runs side by side that do not belong together.",
            rich_help_panel=SHOWN,
        ),
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option(
            "--scaling",
            help="Show how acceptance grows with sizes instead: RUN are folders of `specbench train"
            " grid`, or runs of several --batch.",
            rich_help_panel=SHOWN,
        ),
    ] = False,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=N",
            help="With --scaling: what the laws say of a size: tokens=30M, layers=8, batch=16.",
            show_default="none",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Show outputs on this prompt beside vanilla's instead.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            metavar="M",
            help="With --prompt: of these rows.",
            show_default="all",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMATS",
            help="Write files instead: md, html, latex, csv, json; separate by commas.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Their folder.",
            show_default="report/ in the first run's",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help=OVERWRITE, rich_help_panel=OUTPUT)
    ] = False,
    form: Annotated[
        Literal["table", "tsv", "json"],
        typer.Option(
            "--format",
            help="How the tables are printed; json: an object a row.",
            rich_help_panel=OUTPUT,
        ),
    ] = "table",
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Short for --format json; with --prompt: a comparison.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> ExitCode:
    """Print a run's table, over all and by task family; with --to, write files.

    Several runs become one report if they share target, draft, prompts, seed, machine, settings and
    versions; if not, it is said what they differ in. With --prompt: a method's text beside
    vanilla's, the place where they part, and every step; with --out too: a picture of who computed
    when (lanes.svg, lanes.png) and a Chrome trace of it for ui.perfetto.dev (trace.json).

    With --scaling: log-linear laws of alpha and MAT along the tokens that drafts were trained on,
    their layers, or the batch, with intervals, a held-out point and warnings; with --out too: the
    table, the points and a picture of the residuals (scaling.md, .json, .svg, .png).
    """
    if scaling:
        if any((to, also, prompt, method, force)):
            raise UsageError(
                "--scaling takes neither --to, --also, --prompt, --method nor --force",
                hint=f"specbench report {runs[0]} --scaling",
            )
        return _scaling(runs, at or [], "json" if json else form, out, overwrite)
    if at:
        raise UsageError(
            "--at needs --scaling", hint=f"specbench report {runs[0]} --scaling --at {at[0]}"
        )
    if prompt is not None:
        if to is not None or also is not None or len(runs) > 1:
            raise UsageError(
                "--prompt shows one run and takes neither --to nor --also",
                hint=f"specbench report {runs[0]} --prompt {prompt}",
            )
        return _compare(runs[0], prompt, method, json or form == "json", out, overwrite)
    if method is not None:
        raise UsageError(
            "--method needs --prompt",
            hint=f"specbench report {runs[0]} --prompt ID --method {method}",
        )
    form = "json" if json else form
    if to is not None and form != "table":
        raise UsageError(
            "--to writes files, and --format says how tables are printed: give one of the two",
            hint=f"specbench report {runs[0]} --to {to}",
        )
    if to is None and out is not None:
        raise UsageError("--out needs --to", hint=f"specbench report {runs[0]} --to md --out {out}")
    if also not in (None, SPEC_BENCH):
        raise UsageError(
            f"--also {also!r}: there is {SPEC_BENCH} only",
            hint=f"specbench report {runs[0]} --also {SPEC_BENCH}",
        )
    from specbench_cli.report import outputs
    from specbench_cli.report.reading import read_matrix, read_together
    from specbench_cli.report.spec_bench import table as spec_bench_table
    from specbench_cli.report.terminal import table

    wanted = formats(to, outputs.FORMATS, "specbench report RUN --to md") if to is not None else []
    whole = _matrix(runs)
    if whole is not None:
        reading = read_matrix(whole, force=force)
    else:
        reading = read_together(_sources(runs), force=force)
    sources = reading.sources
    gc.freeze()  # what was read has no cycles: looking through it again and again takes seconds
    if also or any(map(spec_bench_table.is_imported, sources)):
        reading = replace(reading, spec_bench=spec_bench_table.spec_bench(reading))
    if to is None:
        table.print_runs([reading], families=True, form=form)
        if reading.spec_bench is not None:
            spec_bench_table.show(reading.spec_bench, form)
        return ExitCode.OK
    folder = out or (whole or sources[0].path) / "report"
    with _writable(folder):
        found = outputs.write(reading, folder, wanted, overwrite=overwrite)
    for file in found:
        output.data(str(file))
    if "latex" in wanted:
        output.note(f"on paper: cd {shlex.quote(str(folder / 'latex'))} && {TYPESET}")
    return ExitCode.OK


def _matrix(words: list[str]) -> Path | None:
    """The folder of a matrix, if that is given. Raises UsageError where more is."""
    from specbench_cli.store.matrix import is_matrix
    from specbench_cli.store.run_dir import folder

    found = [path for path in map(folder, words) if is_matrix(path)]
    if found and len(words) > 1:
        raise UsageError(
            f"{found[0]} is runs of several targets, which are a report of their own",
            f"specbench report {found[0]}",
        )
    return found[0] if found else None


def _sources(words: list[str]) -> list[Source]:
    """The runs, each once, and answer files as a run of their own."""
    from specbench_cli.report.spec_bench.files import Imported
    from specbench_cli.store.run_dir import RunDir, folder

    paths = list({path.resolve(): path for path in map(folder, words)}.values())
    answers = [path for path in paths if path.suffix == ".jsonl"]
    runs: list[Source] = [RunDir.open(path) for path in paths if path not in answers]
    return [*runs, Imported(answers)] if answers else runs


def _compare(
    run: str, prompt: str, method: str | None, json: bool, out: Path | None, overwrite: bool
) -> ExitCode:
    """Show the outputs on one prompt, or write who computed when."""
    from specbench_cli.report.terminal.side_by_side import page
    from specbench_cli.report.terminal.tokens import decoder_of
    from specbench_cli.report.timeline.files import write_lanes
    from specbench_cli.store.run_dir import RunDir, folder
    from specbench_cli.summary.comparison import compare
    from specbench_cli.summary.facts import Facts

    run_dir = RunDir.open(folder(run))
    target = Facts.of(run_dir.manifest).target
    labels = [] if method is None else [word for word in method.split(",") if word]
    decode = decoder_of(target)
    found = compare(run_dir, prompt, labels, decode)
    if out is not None:
        with _writable(out), files.staging_folder(out, overwrite=overwrite) as staging:
            written = write_lanes(run_dir, found, staging)
        for file in written:
            output.data(str(out / file.relative_to(staging)))
        return ExitCode.OK
    if decode is None:
        output.note(f"ids instead of texts: the tokenizer of {target} is not on this machine")
    for number, comparison in enumerate(found):
        if json:
            output.json_line(comparison.as_dict())
        else:
            output.data(("\n\n" if number else "") + page(comparison))
    return ExitCode.OK


def _scaling(
    runs: list[str], at: list[str], form: output.Format, out: Path | None, overwrite: bool
) -> ExitCode:
    """Fit laws and show them, or write them too."""
    from specbench_cli.config.numbers import number
    from specbench_cli.report.scaling import shown
    from specbench_cli.report.scaling.laws import laws_of, predictions
    from specbench_cli.report.scaling.points import SIZES, points_of

    points = points_of(runs)
    laws, asked = laws_of(points), []
    for word in at:
        size, _, value = word.partition("=")
        try:
            wanted = number(value)
        except ValueError:
            wanted = 0.0
        if size not in SIZES or not 0 < wanted < float("inf"):
            raise UsageError(
                f"--at {word!r} is no size: {', '.join(SIZES)}, = and a number above 0",
                hint="--at tokens=30M",
            )
        asked += predictions(laws, size, wanted)
    shown.show(laws, asked, form)
    if out is not None:
        with _writable(out), files.staging_folder(out, overwrite=overwrite) as staging:
            written = shown.write(points, laws, asked, staging)
        for file in written:
            output.note(str(out / file.relative_to(staging)))
    return ExitCode.OK


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Raise UsageError if writing to a folder fails."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
