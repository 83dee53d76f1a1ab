"""Publishing of runs to a gallery, a folder of static HTML pages (`specbench publish`).

FOLDER/index.html               leaderboard and all runs
FOLDER/runs/NAME/index.html     page of a run: figure, table, summary
FOLDER/runs/NAME/report.html    full report of the run
FOLDER/runs/NAME/speedup.svg    figure, for other pages
FOLDER/runs/NAME/entry.json     data of the run for the index
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specbench_cli import files
from specbench_cli.errors import UsageError
from specbench_cli.report import figures
from specbench_cli.report.gallery import entry as entries
from specbench_cli.report.gallery.checks import check_publishable
from specbench_cli.report.gallery.entry import GalleryEntry
from specbench_cli.report.gallery.pages import MARK, IndexRow, index_page, link, run_page
from specbench_cli.report.html.figures import MAX_SVG_BYTES, inline_figures
from specbench_cli.report.html.page import write_html
from specbench_cli.report.report_data import ReportData

INDEX = "index.html"
PICTURE = "speedup.svg"
_RUNS = "runs"


@dataclass(frozen=True, slots=True)
class Published:
    """A run in a gallery.

    Attributes:
        page: Page of the run.
        index: Index of the gallery.
        replaced: True if the gallery contained the run before.
    """

    entry: GalleryEntry
    page: Path
    index: Path
    replaced: bool


def publish(data: ReportData, folder: Path, *, overwrite: bool = False) -> Published:
    """Add a run to the gallery in a folder, or replace the same run in it.

    The folder is created if it does not exist.

    Args:
        overwrite: Replace files that specbench did not write, or that were changed since.

    Raises:
        SpecbenchError: The run cannot be published (`checks.check_publishable`).
        UsageError: The folder has another index page, or is not writable.
    """
    check_publishable(data)
    try:
        _prepare_folder(folder)
        entries_by_name = dict(_entries(folder))
        entry = entries.entry_of(data)
        same_run = (
            name for name, each in entries_by_name.items() if each.identity == entry.identity
        )
        existing_name = next(same_run, None)
        name = existing_name or _unused_name(entry.name, folder / _RUNS)
        entries_by_name[name] = entry
        with files.staging_folder(folder, overwrite=overwrite) as staging:
            staged = staging / _RUNS / name
            staged.mkdir(parents=True)
            _write(data, entry, staged)
            page = index_page([IndexRow(each, link(at)) for at, each in entries_by_name.items()])
            (staging / INDEX).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}",
            hint="publish to another folder (--to FOLDER)",
        ) from error
    return Published(
        entry, folder / _RUNS / name / INDEX, folder / INDEX, existing_name is not None
    )


def _prepare_folder(folder: Path) -> None:
    """Create the folder if needed. Raise UsageError if its index page is not that of a gallery."""
    (folder / _RUNS).mkdir(parents=True, exist_ok=True)
    files.check_no_link(folder / _RUNS)
    index = folder / INDEX
    page = files.read_own(index)
    if page is not None and MARK.encode() not in page:
        raise UsageError(
            f"{index} is not the index of a gallery, so it is not overwritten",
            hint="publish to another folder (--to FOLDER)",
        )


def _entries(folder: Path) -> Iterator[tuple[str, GalleryEntry]]:
    """Yield the runs of a gallery: folder name and entry."""
    for file in sorted((folder / _RUNS).glob(f"*/{entries.FILE}")):
        yield file.parent.name, entries.load(file)


def _unused_name(name: str, folder: Path) -> str:
    """Return the name, with a number if the folder already has a file of that name."""
    free, copy = name, 2
    while (folder / free).exists():
        free, copy = f"{name}-{copy}", copy + 1
    return free


def _write(data: ReportData, entry: GalleryEntry, folder: Path) -> None:
    """Write all files of a run."""
    with tempfile.TemporaryDirectory() as figure_folder:
        pictures = figures.write_figures(data, Path(figure_folder), max_svg_bytes=MAX_SVG_BYTES)
        write_html(data, folder, figures=pictures)
        first = [file for file in pictures if file.name == PICTURE]
        picture = next(inline_figures(first), None)
        for file in first:
            shutil.copy(file, folder / PICTURE)
    page = run_page(data, entry, picture)
    (folder / INDEX).write_text(page, encoding="utf-8")
    entries.save(entry, folder / entries.FILE)
