"""Rows for other programs: as mappings, as CSV, as JSON."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_cli.report.summary import ALL, Summary


def row_dicts(summary: Summary) -> list[dict[str, Any]]:
    """Every row with all its figures: `family` is "all" first, then each family."""
    scopes = {ALL: summary.rows, **summary.families}
    return [{"family": family, **asdict(row)} for family, rows in scopes.items() for row in rows]


def write_csv(summary: Summary, path: Path) -> None:
    """One line a row and scope; lists are separated by blanks, a missing figure is empty."""
    rows = row_dicts(summary)
    with path.open("w", newline="", encoding="utf-8") as file:
        names = list(rows[0]) if rows else ["family"]
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            listed = {k: " ".join(map(str, v)) for k, v in row.items() if isinstance(v, tuple)}
            writer.writerow(row | listed)


def write_json(summary: Summary, path: Path) -> None:
    """The rows, and what belongs to the run as a whole."""
    whole = {
        "prompts": summary.prompts,
        "passes": summary.passes,
        "noise_floor": summary.noise_floor,
        "vanilla_over_hf_vanilla": summary.vanilla_ratio,
        "rows": row_dicts(summary),
    }
    path.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n", encoding="utf-8")
