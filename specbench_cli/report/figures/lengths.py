"""Figure of speedup against draft length, one line per method.

The points of a line are the variants of a method with different draft lengths. If the length
changes from step to step, its mean is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.summary.metrics import MethodSummary

_MIN_DIFFERENCE = 0.05
"""Minimum difference between the longest and the shortest draft of a method."""


def lines(data: FigureData) -> dict[str, list[tuple[float, MethodSummary]]]:
    """Return method -> (mean draft length, metrics) for each variant of the method.

    Controls, and methods with a single draft length, are omitted.
    """
    found = defaultdict[str, list[tuple[float, MethodSummary]]](list)
    for row in (row for row in data.with_speedup if not row.control):
        steps = data.steps(row.label)
        counts = [levels for each in steps for levels in each.levels]
        if any(counts):
            found[row.method].append((sum(counts) / len(counts), row))
    ordered = {
        method: sorted(points, key=lambda point: point[0]) for method, points in found.items()
    }
    return {
        method: points
        for method, points in ordered.items()
        if points[-1][0] - points[0][0] > _MIN_DIFFERENCE
    }


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if no method has several draft lengths."""
    found = lines(data)
    if not found:
        return None
    series = [
        own
        for place, (method, points) in enumerate(found.items())
        for own in _series(method, points, place)
    ]
    points = [point for own in series for point in own.points]
    lows = [end for p in points for end in (p.y, p.low) if end is not None]
    highs = [p.high for p in points if p.high is not None]
    high = style.speedup_axis_end([1.0, *(p.y for p in points)], highs)
    x = plots.Axis("drafted levels per step (mean)", low=0)
    y = plots.Axis("speedup, 95% interval", 0.95 * min(1.0, *lows), high, style.format_ratio)
    return plots.page([plots.Panel([plots.RuleLine(y=1), *series], x, y)])


def _series(
    method: str, points: list[tuple[float, MethodSummary]], at: int
) -> Iterator[plots.PlotSeries]:
    """Yield the line of a method, and hollow points for variants that are not ranked."""
    for hollow in (False, True):
        own = [
            plots.PlotPoint(length, row.speedup or 0.0, row.speedup_low, row.speedup_high)
            for length, row in points
            if (row.upper_bound or not row.lossless) is hollow
        ]
        if own:
            look = style.series_look(at, hollow=hollow, line="" if hollow else "-")
            yield plots.PlotSeries(own, look, f"{method} (not ranked)" if hollow else method)
