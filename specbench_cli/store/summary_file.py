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


def describe_fastest(folder: Path) -> str | None:
    """Return the fastest lossless method of a run, with its speedup and 95% interval, as text.

    A method whose interval includes 1 is not called fastest. None without a readable summary.
    """
    rows = read_summary_rows(folder)
    best, best_speedup = "none is faster" if rows else None, 1.0
    try:
        for row in rows:
            special = {row[key] for key in ("peer", "broken", "upper_bound", "control")}
            if row["lossless"] != "True" or special != {"False"} or not row["speedup_low"]:
                continue
            speedup, low, high = (
                float(row[key]) for key in ("speedup", "speedup_low", "speedup_high")
            )
            if low > 1 and speedup > best_speedup:
                best, best_speedup = (
                    f"{row['label']} {speedup:.2f}x [{low:.2f}, {high:.2f}]",
                    speedup,
                )
    except (KeyError, ValueError):
        return None  # a summary of another version
    return best
