"""Figure of goodput, time to first token and latency at several arrival rates.

One line per method, with 95% intervals. Times are shown as median (filled) and p99 (hollow,
dashed). A diamond at the top of the first panel marks the rate at which a method saturates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.summary.load import LoadRow, knee, load_rows

_PANELS = (
    ("goodput (tokens/s)", ("tokens_per_s",)),
    ("TTFT (s)", ("ttft_s_p50", "ttft_s_p99")),
    ("latency (s)", ("latency_s_p50", "latency_s_p99")),
)


def lines(cells: Cells) -> dict[str, list[LoadRow]]:
    """Return each method's results by label, sorted by rate, if there are several rates."""
    found: dict[str, list[LoadRow]] = {}
    for row in load_rows([record for own in cells.records.values() for record in own]):
        if row.offered is not None:
            found.setdefault(row.label, []).append(row)
    return {label: rows for label, rows in found.items() if len(rows) > 1}


def draw(cells: Cells) -> plots.Figure | None:
    """Return the figure, or None if the run does not have several rates."""
    found = lines(cells)
    if not found:
        return None
    panels = list[plots.Panel]()
    for name, keys in _PANELS:
        marks = [
            plots.Series(
                [plots.Point(row.offered or 0.0, *row.figures[key]) for row in rows],
                style.look(at, hollow=hollow, line="--" if hollow else "-", size=3.2),
                style.short(label),
            )
            for at, (label, rows) in enumerate(found.items())
            for key, hollow in zip(keys, (False, True), strict=False)
        ]
        if not panels:
            marks += _knees(found, max(p.high or p.y for own in marks for p in own.points))
        x = "offered (requests/s)" if name == _PANELS[-1][0] else ""
        panels.append(plots.Panel(marks, plots.Axis(x, 0), plots.Axis(name, 0), high=1.38))
    return plots.page(panels)


def _knees(found: Mapping[str, Sequence[LoadRow]], top: float) -> Iterator[plots.Series]:
    """Yield the rate at which each method saturates."""
    for at, rows in enumerate(found.values()):
        first = knee(rows)
        if first < len(rows):
            look = style.look(at, hollow=True, marker="D", line="", size=3.2)
            yield plots.Series([plots.Point(rows[first].offered or 0.0, 1.05 * top)], look)
