"""A comparison, or trends, as a JSON document."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from specbench_cli.comparison.outcome import Comparison
from specbench_cli.comparison.pages import columns, words
from specbench_cli.comparison.trend import Trends

SCHEMA = 1
"""Version of the documents. It increases if a key is renamed or its meaning changes."""


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return the JSON document: pass or fail, then every row with its findings and times."""
    counts = Counter(words.outcome_name(row) for row in comparison.rows)
    return {
        "schema": SCHEMA,
        "kind": "comparison",
        "base": comparison.base,
        "new": comparison.new,
        "passed": not comparison.failed_rows,
        "headline": words.headline(comparison),
        "fail_on": list(comparison.fail_on),
        "tolerance": comparison.tolerance,
        "timing": comparison.timing,
        "counts": dict(counts),
        "not_compared": list(comparison.not_compared),
        "facts": comparison.facts,
        "rows": [columns.document_row(row, comparison) for row in comparison.rows],
    }


def trends_as_dict(trends: Trends) -> dict[str, Any]:
    """Return trends as a JSON document: the runs, and each metric with its change points."""
    return {
        "schema": SCHEMA,
        "kind": "trends",
        "runs": [asdict(run) for run in trends.runs],
        "left_out": list(trends.left_out),
        "level": trends.level,
        "series": [
            {
                "task": series.key.task,
                "label": series.key.label,
                "figure": series.figure,
                "noisy": series.noisy,
                "values": list(series.values),
                "changes": [
                    {
                        "run": trends.runs[point.first].name,
                        "created_utc": trends.runs[point.first].created_utc,
                        "commit": {
                            "before": trends.runs[point.last].commit,
                            "after": trends.runs[point.first].commit,
                        },
                        **asdict(point),
                    }
                    for point in series.changes
                ],
            }
            for series in trends.series
        ],
    }
