"""Figure of tokens per step (MAT) against the cost of a step.

The cost of a step is the time of a step divided by the time of a vanilla step, on the same outputs.
So the decode speedup is MAT / cost. The decode speedup is constant along each grey line.
"""

from __future__ import annotations

from collections.abc import Iterator

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.drawing.labels import PointLabel
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.metrics import MethodSummary

_SIDE_IN = 2.75
_ROUND_IN, _MANY_IN = 0.25, 16
"""Space around a label in inches, and maximum total width of all labels in a narrow figure."""
_LINES = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
_BEYOND = 1.5
"""Lines are drawn for speedups up to this factor beyond the lowest and highest one."""


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if no method except vanilla has steps and times."""
    points = [
        (row, plots.PlotPoint(row.mat / row.decode_speedup, row.mat))
        for row in data.summary.rows
        if row.mat is not None and row.decode_speedup is not None
    ]
    if len(points) < 2:
        return None
    names = [style.text_width([style.shorten(row.label)], style.SMALL) for row, _ in points]
    many = sum(names) + _ROUND_IN * len(names) > _MANY_IN
    right, top = 1.1 * max(p.x for _, p in points), 1.1 * max(p.y for _, p in points)
    sped = [p.y / p.x for _, p in points]
    marks = [
        mark
        for speedup in _LINES
        if min(sped) / _BEYOND <= speedup <= max(sped) * _BEYOND
        for mark in _line(speedup, right, top)
    ]
    panel = plots.Panel(
        [*marks, *(_point(row, point) for row, point in points)],
        plots.Axis("cost of a step (in vanilla steps)", 0, right),
        plots.Axis("MAT (tokens per step)", 0, top),
        point_labels=[
            PointLabel(style.shorten(row.label), (p.x, p.y), style.INK) for row, p in points
        ],
        height=_SIDE_IN * (1 + 0.3 * many),
        grid=False,
    )
    return plots.page([panel], width=style.PAGE_IN if many else style.COLUMN_IN)


def _point(row: MethodSummary, point: plots.PlotPoint) -> plots.PlotSeries:
    """Return the marker of a method. Methods that are not ranked are white."""
    if row.label == BASELINE:
        face = style.REFERENCE
    else:
        face = "white" if row.peer or row.upper_bound or not row.lossless else style.OURS
    marker = "o" if row.lossless else "^"
    return plots.PlotSeries([point], style.Look(style.INK, marker, face, "", 4, 0.6))


def _line(speedup: float, right: float, top: float) -> Iterator[plots.Mark]:
    """Yield the line of one decode speedup, with its label where the line leaves the panel."""
    x, y = min(right, top / speedup), min(right * speedup, top)
    yield plots.PlotSeries(
        [plots.PlotPoint(0, 0), plots.PlotPoint(x, y)], style.guide_look(width=0.6)
    )
    look = style.SMALL, style.MUTED
    if x == right:
        yield plots.Note(f"{speedup:g}x", x, y, *look, (2, 0))
    else:
        yield plots.Note(f"{speedup:g}x", x, y, *look, (0, 1), "center", "bottom")
