"""Figure of goodput, time to first token and latency at several arrival rates.

One line per method, with 95% intervals. Times are shown as median (filled) and p99 (hollow,
dashed). A diamond at the top of the first panel marks the rate at which a method saturates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.summary.load import LoadRow, load_rows, saturation_index

_PANELS = (
    ("goodput (tokens/s)", ("tokens_per_s",)),
    ("TTFT (s)", ("ttft_s_p50", "ttft_s_p99")),
    ("latency (s)", ("latency_s_p50", "latency_s_p99")),
)


def lines(data: FigureData) -> dict[str, list[LoadRow]]:
    """Return label -> results, sorted by arrival rate. Methods with one rate are omitted."""
    found: dict[str, list[LoadRow]] = {}
    for row in load_rows([record for own in data.records.values() for record in own]):
        if row.offered_rate is not None:
            found.setdefault(row.label, []).append(row)
    return {label: rows for label, rows in found.items() if len(rows) > 1}


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if the run does not have several rates."""
    found = lines(data)
    if not found:
        return None
    panels = list[plots.Panel]()
    for name, keys in _PANELS:
        marks = [
            plots.PlotSeries(
                [plots.PlotPoint(row.offered_rate or 0.0, *row.figures[key]) for row in rows],
                style.series_look(at, hollow=hollow, line="--" if hollow else "-", size=3.2),
                style.shorten(label),
            )
            for at, (label, rows) in enumerate(found.items())
            for key, hollow in zip(keys, (False, True), strict=False)
        ]
        if not panels:
            marks += _knees(found, max(p.high or p.y for own in marks for p in own.points))
        x = "arrival rate (requests/s)" if name == _PANELS[-1][0] else ""
        panels.append(plots.Panel(marks, plots.Axis(x, 0), plots.Axis(name, 0), height=1.38))
    return plots.page(panels)


def _knees(found: Mapping[str, Sequence[LoadRow]], top: float) -> Iterator[plots.PlotSeries]:
    """Yield a diamond at the arrival rate at which each method saturates."""
    for at, rows in enumerate(found.values()):
        first = saturation_index(rows)
        if first < len(rows):
            look = style.series_look(at, hollow=True, marker="D", line="", size=3.2)
            yield plots.PlotSeries(
                [plots.PlotPoint(rows[first].offered_rate or 0.0, 1.05 * top)], look
            )
