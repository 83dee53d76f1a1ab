"""Reading of `summary.csv`, the table of metrics in a run's folder."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from specbench_cli import files
from specbench_cli.store.run_dir import MOST_BYTES

SUMMARY = "summary.csv"


def read_summary_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a run's summary over all tasks, in the order of the file.

    Each row maps column names to texts. If there is no readable summary, the list is empty.
    """
    try:
        lines = io.StringIO(files.read_text(folder / SUMMARY, MOST_BYTES))
        return [row for row in csv.DictReader(lines) if row["family"] == "all"]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return []
