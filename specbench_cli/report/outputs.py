"""The files that a run's end, or `specbench report --to`, leaves in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specbench_cli.report.export import write_csv, write_json
from specbench_cli.report.figure import write_figure
from specbench_cli.report.markdown import report
from specbench_cli.report.pareto import sweep_of, write_points
from specbench_cli.report.pareto_figure import write_pareto
from specbench_cli.report.reading import Reading, read
from specbench_cli.store.export import write_parquet
from specbench_cli.store.run_dir import RunDir


def write_outputs(run: RunDir) -> Reading:
    """Write what belongs into a run's folder at its end: summary.csv, records.parquet, report.md
    and figures/."""
    reading = read(run)
    _csv(reading, run.path)
    _markdown(reading, run.path)
    write_parquet(run.records(), run.path / "records.parquet")
    return reading


def _markdown(reading: Reading, folder: Path) -> list[Path]:
    manifest, place = reading.run.manifest, folder / "figures"
    figures = write_figure(reading.summary, place)
    sweep = sweep_of(reading.summary, manifest)
    if sweep is not None:
        figures += write_pareto(sweep, place)
        figures.append(write_points(sweep, place / "pareto.csv"))
    links = [f"figures/{file.name}" for file in figures if file.suffix == ".svg"]
    page = folder / "report.md"
    content = report(reading.summary, manifest, reading.incidents, links, sweep)
    page.write_text(content, encoding="utf-8")
    return [page, *figures]


def _csv(reading: Reading, folder: Path) -> list[Path]:
    write_csv(reading.summary, folder / "summary.csv")
    return [folder / "summary.csv"]


def _json(reading: Reading, folder: Path) -> list[Path]:
    write_json(reading.summary, folder / "summary.json")
    return [folder / "summary.json"]


FORMATS: dict[str, Callable[[Reading, Path], list[Path]]] = {
    "md": _markdown,
    "csv": _csv,
    "json": _json,
}
"""What a reading can be written as, into a folder that exists; each returns its files."""
