"""Speedup against how many levels are drafted a step, a line a method.

Rows of one method that draft differently, by a sweep or by a rule, are points of a line; where
a rule decides, the length is the mean over steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import LinePanel, Point, Series, line_plot
from specbench_cli.summary.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_APART = 0.05
"""Of a level: two rows that draft as long are one point, and no line."""


def lines(cells: Cells) -> dict[str, list[tuple[float, Row]]]:
    """By method, its rows by the mean number of levels a step, its own controls left out; methods
    that have several."""
    found = defaultdict[str, list[tuple[float, Row]]](list)
    for row in (row for row in cells.sped if not row.control):
        steps = cells.steps(row.label)
        counts = [levels for each in steps for levels in each.levels]
        if any(counts):
            found[row.method].append((sum(counts) / len(counts), row))
    ordered = {
        method: sorted(points, key=lambda point: point[0]) for method, points in found.items()
    }
    return {
        method: points
        for method, points in ordered.items()
        if points[-1][0] - points[0][0] > _APART
    }


def draw(cells: Cells) -> Figure | None:
    """The figure; None where no method is there with several lengths."""
    found = lines(cells)
    if not found:
        return None
    rows = [row for points in found.values() for _, row in points]
    sped = [row.speedup for row in rows if row.speedup is not None]
    lows = [row.speedup_low for row in rows if row.speedup_low is not None]
    highs = [row.speedup_high for row in rows if row.speedup_high is not None]

    def finish(axes: Axes) -> None:
        axes.axhline(1, color=style.INK, lw=0.5, zorder=1)
        axes.set_ylim(0.95 * min(1.0, *sped, *lows), style.reach([1.0, *sped], highs))
        for place, points in enumerate(found.values()):
            ends = ((length, row.speedup_high or 0.0) for length, row in points)
            style.mark_cut(axes, ends, style.look(place)[0])
        axes.yaxis.set_major_formatter(style.as_ratio)

    series = [
        own
        for place, (method, points) in enumerate(found.items())
        for own in _series(method, points, style.look(place))
    ]
    return line_plot(
        [LinePanel("speedup, 95% interval", series, finish)],
        "levels drafted a step (mean)",
        entries=len(found),
        high=1.66,
        top=0.08,
        bottom=0.36,
    )


def _series(
    method: str, points: list[tuple[float, Row]], look: tuple[str, str]
) -> Iterator[Series]:
    """Yield a method's line, and its unranked rows (upper bounds, lossy) as hollow points."""
    colour, marker = look
    for hollow in (False, True):
        own = [
            Point(length, row.speedup or 0.0, row.speedup_low, row.speedup_high)
            for length, row in points
            if (row.upper_bound or not row.lossless) is hollow
        ]
        if own:
            yield Series(
                points=own,
                colour=colour,
                marker=marker,
                face="white" if hollow else "",
                line="none" if hollow else "-",
                label=f"{method} (not ranked)" if hollow else method,
            )
