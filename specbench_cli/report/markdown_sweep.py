"""What a sweep and a tuning tried, as parts of `report.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_cli.config.sweep import settings
from specbench_cli.report.markdown_table import inline, table
from specbench_cli.report.terminal.grids import grid
from specbench_cli.summary import formats
from specbench_cli.summary.pareto import Sweep, swept


def sweep_part(sweep: Sweep, figures: Sequence[str]) -> list[str]:
    """The swept rows in the order of their parameters, and the plots of them."""
    found = grid(swept(sweep), [point.row for point in sweep.points])
    plots = [f"![discard and verification rates]({path})" for path in figures]
    return ["## Sweep", table(found.headings, found.rows), *plots]


def tuning_part(tuning: Mapping[str, Any] | None) -> list[str]:
    """What every row was tried with, on what, and what came of it."""
    if not tuning:
        return []
    by_time = tuning["by"] == "time"
    unit = "ms a token" if by_time else "target forwards a token"
    how = (
        f"At most {tuning['budget']} candidates a row, all rows on the same development questions"
        f" ({_families(tuning['development'])}), compared by"
        f" {'decode time' if by_time else 'what their forwards cost by the size of the models'}."
        f" Every figure above and below is of the held-out questions"
        f" ({_families(tuning['held_out'])})."
    )
    rows = [
        (
            label,
            " ".join(settings(tried["params"])) or formats.NONE,
            formats.number(tried["cost"], 3),
            "yes" if tried["chosen"] else None,
            found["prompts"] or None,
        )
        for label, found in tuning["rows"].items()
        for tried in found["candidates"]
    ]
    return ["## Tuning", inline(how), table(("row", "parameters", unit, "chosen", "prompts"), rows)]


def _families(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{family} {n}" for family, n in counts.items())
