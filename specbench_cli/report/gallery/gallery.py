"""Publishing of runs to a gallery: a folder per run below `runs/`, and a new index.

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


def publish(reading: ReportData, folder: Path, *, overwrite: bool = False) -> Published:
    """Add a run to the gallery in a folder, or replace the same run in it.

    The folder is created if it does not exist.

    Args:
        overwrite: Replace files that specbench did not write, or that were changed since.

    Raises:
        SpecbenchError: A gallery does not accept the run (`refusal.refuse`).
        UsageError: The folder holds something else, or is not writable.
    """
    check_publishable(reading)
    try:
        _begin(folder)
        known = dict(_entries(folder))
        own = entries.entry_of(reading)
        there = next((name for name, each in known.items() if each.identity == own.identity), None)
        name = there or _free(own.name, folder / _RUNS)
        known[name] = own
        with files.staging_folder(folder, overwrite=overwrite) as staging:
            made = staging / _RUNS / name
            made.mkdir(parents=True)
            _write(reading, own, made)
            page = index_page([IndexRow(each, link(at)) for at, each in known.items()])
            (staging / INDEX).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}", hint="give another --to"
        ) from error
    return Published(own, folder / _RUNS / name / INDEX, folder / INDEX, there is not None)


def _begin(folder: Path) -> None:
    """Create the folder if needed. Raise UsageError if its index is not a gallery's."""
    (folder / _RUNS).mkdir(parents=True, exist_ok=True)
    files.check_no_link(folder / _RUNS)
    index = folder / INDEX
    page = files.read_own(index)
    if page is not None and MARK.encode() not in page:
        raise UsageError(
            f"{index} is another's page, which no gallery writes over",
            hint="give --to a folder of the gallery's own",
        )


def _entries(folder: Path) -> Iterator[tuple[str, GalleryEntry]]:
    """Yield the runs of a gallery: folder name and entry."""
    for file in sorted((folder / _RUNS).glob(f"*/{entries.FILE}")):
        yield file.parent.name, entries.load(file)


def _free(name: str, folder: Path) -> str:
    """Return a name that does not exist in a folder."""
    free, copy = name, 2
    while (folder / free).exists():
        free, copy = f"{name}-{copy}", copy + 1
    return free


def _write(reading: ReportData, entry: GalleryEntry, folder: Path) -> None:
    """Write all files of a run."""
    with tempfile.TemporaryDirectory() as drawn:
        pictures = figures.write_figures(reading, Path(drawn), heavy=MAX_SVG_BYTES)
        write_html(reading, folder, figures=pictures)
        first = [file for file in pictures if file.name == PICTURE]
        picture = next(inline_figures(first), None)
        for file in first:
            shutil.copy(file, folder / PICTURE)
    page = run_page(reading, entry, picture)
    (folder / INDEX).write_text(page, encoding="utf-8")
    entries.save(entry, folder / entries.FILE)
