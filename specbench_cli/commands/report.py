"""`specbench report`: print tables of runs, write reports, or show the outputs for one prompt."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import files, output
from specbench_cli.commands._formats import parse_formats
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.config.commands import ReportOptions
    from specbench_cli.report.report_data import ReportData
    from specbench_cli.summary.source import RecordSource

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
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))
TYPESET = "pdflatex report; bibtex report; pdflatex report; pdflatex report"


@parsed_command("specbench_cli.config.commands:ReportOptions")
def report(options: ReportOptions) -> ExitCode:
    """Show the results of runs as tables, or write them to files (--to).

    Several runs make one report if they share target, draft, prompts, seed, machine, settings and
    versions. With --prompt, show a method's text next to vanilla's, the first difference, and
    every step. With --prompt and --out, write a timeline (lanes.svg, lanes.png) and a Chrome trace
    for ui.perfetto.dev (trace.json).
    """
    _check_combination(options)
    if options.prompt is not None:
        return _compare(options, options.prompt)
    return _print(options) if options.to is None else _write(options, options.to)


def _check_combination(options: ReportOptions) -> None:
    """Raise UsageError for options that cannot be combined."""
    command = f"specbench report {options.runs[0]}"
    if options.prompt is not None:
        if options.to is not None or options.also is not None or len(options.runs) > 1:
            raise UsageError(
                "--prompt shows one run and cannot be combined with --to or --also",
                f"{command} --prompt {options.prompt}",
            )
    elif options.method is not None:
        raise UsageError(
            "--method needs --prompt", f"{command} --prompt ID --method {options.method}"
        )
    elif options.to is not None and options.output_format != "table":
        raise UsageError(
            "--to writes files and --format prints tables: give only one of them",
            f"{command} --to {options.to}",
        )
    elif options.to is None and options.out is not None:
        raise UsageError("--out needs --to", f"{command} --to md --out {options.out}")
    elif options.also not in (None, SPEC_BENCH):
        raise UsageError(
            f"--also must be {SPEC_BENCH}, got {options.also!r}", f"{command} --also {SPEC_BENCH}"
        )


def _read(options: ReportOptions) -> tuple[ReportData, Path]:
    """Read the runs as one report.

    Returns:
        The report, and the folder for its files: that of the matrix, or else of the first run.
    """
    from specbench_cli.report.report_data import read_matrix, read_runs
    from specbench_cli.report.spec_bench import table as spec_bench_table

    whole = _find_matrix(options.runs)
    if whole is not None:
        reading = read_matrix(whole, force=options.force)
    else:
        reading = read_runs(_open_runs(options.runs), force=options.force)
    gc.freeze()  # loaded records have no cycles, and collecting takes seconds
    if options.also or any(map(spec_bench_table.is_imported, reading.sources)):
        found = spec_bench_table.compute_spec_bench(reading.run, reading.sources, reading.summary)
        reading = replace(reading, spec_bench=found)
    return reading, whole or reading.sources[0].path


def _print(options: ReportOptions) -> ExitCode:
    """Print the tables of a report."""
    from specbench_cli.report.terminal import table

    reading, _ = _read(options)
    table.print_runs([reading], families=True, explain=options.explain, form=options.output_format)
    if reading.spec_bench is not None:
        table.print_spec_bench(reading.spec_bench, options.output_format)
    return ExitCode.OK


def _write(options: ReportOptions, to: str) -> ExitCode:
    """Write the files of a report."""
    from specbench_cli.report import outputs

    wanted = parse_formats(to, outputs.FORMATS, "specbench report RUN --to md")
    reading, first = _read(options)
    folder = options.out or first / "report"
    with _report_write_errors(folder):
        found = outputs.write(reading, folder, wanted, overwrite=options.overwrite)
    for file in found:
        output.data(str(file))
    if "latex" in wanted:
        output.note(f"to typeset: cd {shlex.quote(str(folder / 'latex'))} && {TYPESET}")
    return ExitCode.OK


def _find_matrix(words: list[str]) -> Path | None:
    """Return the folder of a matrix, or None if no argument is a matrix.

    Raises:
        UsageError: A matrix was given together with other runs.
    """
    from specbench_cli.store.matrix import is_matrix
    from specbench_cli.store.run_dir import find_run

    found = [path for path in map(find_run, words) if is_matrix(path)]
    if found and len(words) > 1:
        raise UsageError(
            f"{found[0]} has runs of several targets and cannot be combined with other runs",
            f"specbench report {found[0]}",
        )
    return found[0] if found else None


def _open_runs(words: list[str]) -> list[RecordSource]:
    """Return the runs that the arguments name, without duplicates.

    All answer files of Spec-Bench among the arguments together count as one run.
    """
    from specbench_cli.report.spec_bench.files import ImportedAnswers
    from specbench_cli.store.run_dir import RunDir, find_run

    paths = list({path.resolve(): path for path in map(find_run, words)}.values())
    answers = [path for path in paths if path.suffix == ".jsonl"]
    runs: list[RecordSource] = [RunDir.open(path) for path in paths if path not in answers]
    return [*runs, ImportedAnswers(answers)] if answers else runs


def _compare(options: ReportOptions, prompt: str) -> ExitCode:
    """Print the outputs of methods for one prompt side by side, or write their timeline to
    files.
    """
    from specbench_cli.report.terminal.side_by_side import page
    from specbench_cli.report.timeline.files import write_lanes
    from specbench_cli.report.tokens import load_text_decoder
    from specbench_cli.store.run_dir import RunDir, find_run
    from specbench_cli.summary.comparison import compare_outputs
    from specbench_cli.summary.facts import Facts

    run_dir, out = RunDir.open(find_run(options.runs[0])), options.out
    target = Facts.from_manifest(run_dir.manifest).target
    labels = [word for word in (options.method or "").split(",") if word]
    decode = load_text_decoder(target)
    found = compare_outputs(run_dir, prompt, labels, decode)
    if out is not None:
        with (
            _report_write_errors(out),
            files.staging_folder(out, overwrite=options.overwrite) as staging,
        ):
            written = write_lanes(run_dir, found, staging)
        for file in written:
            output.data(str(out / file.relative_to(staging)))
        return ExitCode.OK
    if decode is None:
        output.note(f"showing token ids, because the tokenizer of {target} is not on this machine")
    for number, comparison in enumerate(found):
        if options.output_format == "json":
            output.json_line(comparison.as_dict())
        else:
            output.data(("\n\n" if number else "") + page(comparison))
    return ExitCode.OK


@contextmanager
def _report_write_errors(folder: Path) -> Iterator[None]:
    """Convert errors in the `with` block into a UsageError that the folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
