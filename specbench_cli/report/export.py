"""Rows for other programs: as mappings, as CSV, as JSON."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_cli.config.sweep import settings
from specbench_cli.report.summary import ALL, Summary


def row_dicts(summary: Summary) -> list[dict[str, Any]]:
    """Every row with all its figures: `family` is "all" first, then each family."""
    scopes = {ALL: summary.rows, **summary.families}
    return [{"family": family, **asdict(row)} for family, rows in scopes.items() for row in rows]


def write_csv(summary: Summary, path: Path) -> None:
    """One line a row and scope; lists, and parameters as `name=value`, are separated by blanks; a
    missing figure is empty."""
    rows = row_dicts(summary)
    with path.open("w", newline="", encoding="utf-8") as file:
        names = list(rows[0]) if rows else ["family"]
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: object) -> object:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return " ".join(settings(value)) if isinstance(value, dict) else value


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
