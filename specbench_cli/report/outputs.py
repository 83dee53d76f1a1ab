"""Files of a report: written at the end of a run, and by `specbench report --to`."""

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

    Files that specbench did not write are not replaced. Their names are printed.
    """
    data, kept = read_report_data(run), list[Path]()
    with files.staging_folder(run.path, not_replaced=kept) as staging:
        _write(data, staging, ("csv", "md"))
        write_parquet(run.records(), staging / "records.parquet")
    _print_kept(kept)
    return data


def write_into_run(data: ReportData, folder: Path, formats: Sequence[str]) -> None:
    """Write a report into the folder of its run. Print the files that were not replaced."""
    kept = list[Path]()
    with files.staging_folder(folder, not_replaced=kept) as staging:
        _write(data, staging, formats)
    _print_kept(kept)


def _print_kept(kept: Sequence[Path]) -> None:
    """Print the files that were not replaced, if there are any."""
    if kept:
        names = ", ".join(file.name for file in kept)
        output.note(
            f"not replaced, since specbench did not write them or they were changed: {names}"
        )


def write(
    data: ReportData, folder: Path, formats: Sequence[str], *, overwrite: bool = False
) -> list[Path]:
    """Write a report in the given formats (keys of `FORMATS`) to a folder.

    Args:
        overwrite: True to replace files that specbench did not write.

    Returns:
        The paths of all files. Figures that several formats share appear once.

    Raises:
        UsageError: A file that specbench did not write exists. Nothing is written.
    """
    with files.staging_folder(folder, overwrite=overwrite) as staging:
        written = _write(data, staging, formats)
    return [
        folder / file.relative_to(staging) if staging in file.parents else file for file in written
    ]


def _write(data: ReportData, folder: Path, formats: Sequence[str]) -> list[Path]:
    figures = []
    if _FORMATS_WITH_FIGURES & set(formats):
        figures = _write_figure_files(data, folder / "figures", paper="latex" in formats)
    written = [file for name in formats for file in FORMATS[name](data, folder, figures)]
    if data.spec_bench is not None:
        written += spec_bench_table.write(data.spec_bench, folder)
    return written + figures


def _write_figure_files(data: ReportData, figure_folder: Path, *, paper: bool) -> list[Path]:
    written = write_figures(data, figure_folder, paper=paper)
    sweep = find_sweep(data.summary, data.run.manifest)
    if sweep is not None:
        written.append(write_points(sweep, figure_folder / "pareto.csv"))
    if loads := load_rows(data.records):
        figure_folder.mkdir(exist_ok=True)
        written.append(write_csv(list(map(as_dict, loads)), figure_folder / "load.csv"))
    return written


def _write_html(data: ReportData, folder: Path, figures: Figures) -> list[Path]:
    return write_html(data, folder, figures=figures)


def _write_csv_summary(data: ReportData, folder: Path, figures: Figures) -> list[Path]:
    return [write_summary(data.summary, folder / SUMMARY)]


def _write_json_summary(data: ReportData, folder: Path, figures: Figures) -> list[Path]:
    write_json(data, folder / "summary.json")
    return [folder / "summary.json"]


FORMATS: dict[str, Callable[[ReportData, Path, Figures], list[Path]]] = {
    "md": write_markdown,
    "html": _write_html,
    "latex": write_latex,
    "csv": _write_csv_summary,
    "json": _write_json_summary,
}
"""Format name -> function that writes the files of the format and returns their paths."""
_FORMATS_WITH_FIGURES = {"md", "html", "latex"}
