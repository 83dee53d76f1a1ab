"""How often each level of a draft is accepted, a row a method, a field a level.

Of the steps that drafted level k, the share that accepted it. The darker a field, the higher; the
percentage is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_cli.report.figures import style
from specbench_cli.report.figures.cells import Cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_IN = 0.19
_FIELD_IN = 0.17
"""Least width of a field; levels that find no room are left out, and the axis says so."""
_LIGHT, _DARK = "#f3f7fb", "#0b3c66"
_PAPER = 0.58
"""Rates above it are written in white."""


def draw(cells: Cells) -> Figure | None:
    """The figure; None where no method drafts, or none says what it drafted."""
    from matplotlib.colors import LinearSegmentedColormap

    rows = [row for row in cells.summary.rows if row.acceptance_by_position]
    if not rows:
        return None
    deepest = max(len(row.acceptance_by_position) for row in rows)
    left = style.room_for(row.label for row in rows)
    room = style.COLUMN_IN - left - 0.06
    columns = min(deepest, int(room / _FIELD_IN))
    figure = style.blank(style.COLUMN_IN, _ROW_IN * len(rows) + 0.36)
    axes = style.frame(figure, left, 0.06, 0.05, 0.31)
    shades = LinearSegmentedColormap.from_list("rates", (_LIGHT, _DARK))
    points = min(6.5, room / columns / (1.15 * style.width_of(["100"], 1)))
    for place, row in enumerate(rows):
        for level, rate in enumerate(row.acceptance_by_position[:columns], start=1):
            axes.barh(place, 0.96, 0.88, level - 0.48, color=shades(rate))
            axes.text(
                level,
                place,
                f"{100 * rate:.0f}",
                ha="center",
                va="center_baseline",
                fontsize=points,
                color="white" if rate > _PAPER else style.INK,
            )
    axes.set(xlim=(0.5, columns + 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(1, columns + 1))
    style.strip(axes)
    axes.tick_params(axis="x", length=0)
    style.name_rows(axes, [row.label for row in rows], range(len(rows)))
    cut = f" (the first {columns} of {deepest})" if deepest > columns else ""
    style.name_x(axes, f"level of the draft{cut}: % accepted")
    return figure
