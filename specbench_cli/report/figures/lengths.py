"""Speedup against how many levels are drafted a step, a line a method.

Rows of one method that draft differently, by a sweep or by a rule, are points of a line; where
a rule decides, the length is the mean over steps.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.summary.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_APART = 0.05
"""Of a level: two rows that draft as long are one point, and no line."""
_LEGEND_IN = 0.13


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
    legend = _LEGEND_IN * -(-len(found) // 3) + 0.03
    figure = style.blank(style.COLUMN_IN, 2.1 + legend)
    axes = style.frame(figure, 0.46, 0.14, 0.08, 0.36 + legend)
    axes.axhline(1, color=style.INK, lw=0.5, zorder=1)
    for place, (method, points) in enumerate(found.items()):
        _line(axes, method, points, style.look(place))
    rows = [row for points in found.values() for _, row in points]
    sped = [row.speedup for row in rows if row.speedup is not None]
    lows = [row.speedup_low for row in rows if row.speedup_low is not None]
    highs = [row.speedup_high for row in rows if row.speedup_high is not None]
    axes.set_xlim(left=0)
    axes.set_ylim(0.95 * min(1.0, *sped, *lows), style.reach([1.0, *sped], highs))
    for place, points in enumerate(found.values()):
        ends = ((length, row.speedup_high or 0.0) for length, row in points)
        style.mark_cut(axes, ends, style.look(place)[0])
    axes.yaxis.set_major_formatter(style.as_ratio)
    axes.set_xlabel("levels drafted a step (mean)", labelpad=2)
    axes.set_ylabel("speedup, 95% interval", labelpad=2)
    style.strip(axes, "left", "bottom")
    style.grid(axes)
    style.legend_below(figure, *axes.get_legend_handles_labels(), columns=3)
    return figure


def _line(axes: Axes, method: str, points: list[tuple[float, Row]], look: tuple[str, str]) -> None:
    """Rows that are not ranked (upper bounds, peers, lossy ones) are hollow, and off the line."""
    colour, marker = look
    for hollow in (False, True):
        own = [
            (length, row)
            for length, row in points
            if (row.upper_bound or not row.lossless) is hollow
        ]
        if not own:
            continue
        speedups = [row.speedup or 0.0 for _, row in own]
        lows = [row.speedup_low or row.speedup or 0.0 for _, row in own]
        highs = [row.speedup_high or row.speedup or 0.0 for _, row in own]
        axes.errorbar(
            [length for length, _ in own],
            speedups,
            yerr=(
                [at - low for at, low in zip(speedups, lows, strict=True)],
                [high - at for at, high in zip(speedups, highs, strict=True)],
            ),
            color=colour,
            marker=marker,
            mfc="white" if hollow else colour,
            linestyle="none" if hollow else "-",
            ms=3.6,
            lw=0.9,
            elinewidth=0.7,
            capsize=1.5,
            label=f"{method} (not ranked)" if hollow else method,
            zorder=3,
        )
