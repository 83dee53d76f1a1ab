"""Results of a run for other programs: as mappings, CSV and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_cli.config.sweep import format_params
from specbench_cli.report import claims
from specbench_cli.report.report_data import ReportData
from specbench_cli.summary.columns import write_csv
from specbench_cli.summary.summary import ALL, Summary


def row_dicts(summary: Summary) -> list[dict[str, Any]]:
    """Return one mapping per task family and method. The family "all" comes first."""
    scopes = {ALL: summary.rows, **summary.families}
    return [{"family": family, **asdict(row)} for family, rows in scopes.items() for row in rows]


def write_summary(summary: Summary, path: Path) -> Path:
    """Write one CSV line per task family and method.

    The items of a list are separated by spaces. Parameters are written as `name=value`.
    """
    lines = [{name: _cell(value) for name, value in row.items()} for row in row_dicts(summary)]
    return write_csv(lines, path, empty="family")


def _cell(value: object) -> object:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return " ".join(format_params(value)) if isinstance(value, dict) else value


def write_json(data: ReportData, path: Path) -> None:
    """Write all results as JSON, with the names of the runs and the claims of papers."""
    summary = data.summary
    whole = {
        "runs": [source.path.name for source in data.sources],
        "forced": list(data.facts.forced),
        "prompts": summary.prompts,
        "passes": summary.passes,
        "noise_floor": summary.noise_floor,
        "vanilla_over_hf_vanilla": summary.vanilla_ratio,
        "rows": row_dicts(summary),
        "claims": [
            {"label": line.row.label, **asdict(line.claim)}
            for line in claims.compare_claims(summary, data.facts)
        ],
        "spec_bench": [asdict(found) for found in data.spec_bench.results]
        if data.spec_bench
        else [],
    }
    path.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n", encoding="utf-8")
