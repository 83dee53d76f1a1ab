"""Files that a run writes at its end, and that `specbench report --to` writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from specbench_cli import files, output
from specbench_cli.report.content import write_markdown
from specbench_cli.report.export import write_json, write_summary
from specbench_cli.report.figures import write_figures
from specbench_cli.report.html.page import write_html
from specbench_cli.report.paper.latex import write_latex
from specbench_cli.report.report_data import ReportData, read_report_data
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.store.export import write_parquet
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.summary_file import SUMMARY
from specbench_cli.summary.columns import write_csv
from specbench_cli.summary.load import as_dict, load_rows
from specbench_cli.summary.pareto import find_sweep, write_points

Figures = Sequence[Path]


def write_outputs(run: RunDir) -> ReportData:
    """Write the final files of a run: summary.csv, records.parquet, report.md and figures/.

    Existing files that specbench did not write are kept and listed.
    """
    reading, kept = read_report_data(run), list[Path]()
    with files.staging_folder(run.path, not_replaced=kept) as staging:
        _write(reading, staging, ("csv", "md"))
        write_parquet(run.records(), staging / "records.parquet")
    _print_kept(kept)
    return reading


def write_into_run(reading: ReportData, folder: Path, formats: Sequence[str]) -> None:
    """Write a report into the folder of its run, like `write_outputs`."""
    kept = list[Path]()
    with files.staging_folder(folder, not_replaced=kept) as staging:
        _write(reading, staging, formats)
    _print_kept(kept)


def _print_kept(kept: Sequence[Path]) -> None:
    """Print which files were not replaced."""
    if kept:
        names = ", ".join(file.name for file in kept)
        output.note(
            f"not replaced, since specbench did not write them or they were changed: {names}"
        )


def write(
    reading: ReportData, folder: Path, formats: Sequence[str], *, overwrite: bool = False
) -> list[Path]:
    """Write a report in some of `FORMATS` to a folder.

    Args:
        overwrite: True also replaces files that specbench did not write.

    Returns:
        The files. Figures that several formats share appear once.

    Raises:
        UsageError: A file that specbench did not write exists. Nothing is written.
    """
    with files.staging_folder(folder, overwrite=overwrite) as staging:
        found = _write(reading, staging, formats)
    return [
        folder / file.relative_to(staging) if staging in file.parents else file for file in found
    ]


def _write(reading: ReportData, folder: Path, formats: Sequence[str]) -> list[Path]:
    figures = []
    if _PICTURED & set(formats):
        figures = _figures(reading, folder / "figures", paper="latex" in formats)
    found = [file for name in formats for file in FORMATS[name](reading, folder, figures)]
    if reading.spec_bench is not None:
        found += spec_bench_table.write(reading.spec_bench, folder)
    return found + figures


def _figures(reading: ReportData, place: Path, *, paper: bool) -> list[Path]:
    found = write_figures(reading, place, paper=paper)
    sweep = find_sweep(reading.summary, reading.run.manifest)
    if sweep is not None:
        found.append(write_points(sweep, place / "pareto.csv"))
    if loads := load_rows(reading.records):
        place.mkdir(exist_ok=True)
        found.append(write_csv(list(map(as_dict, loads)), place / "load.csv"))
    return found


def _html(reading: ReportData, folder: Path, figures: Figures) -> list[Path]:
    return write_html(reading, folder, figures=figures)


def _csv(reading: ReportData, folder: Path, figures: Figures) -> list[Path]:
    return [write_summary(reading.summary, folder / SUMMARY)]


def _json(reading: ReportData, folder: Path, figures: Figures) -> list[Path]:
    write_json(reading, folder / "summary.json")
    return [folder / "summary.json"]


FORMATS: dict[str, Callable[[ReportData, Path, Figures], list[Path]]] = {
    "md": write_markdown,
    "html": _html,
    "latex": write_latex,
    "csv": _csv,
    "json": _json,
}
"""Report formats. Each function writes files and returns their paths."""
_PICTURED = {"md", "html", "latex"}
