"""The laws as a picture: a column a size, and for each figure the lines with their points, and
below them what the points lie off.

A hollow mark with an interval is the held-out point as the other points predict it, beside what it
came to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from recipes.studies.laws import Law
from recipes.studies.numbers import short
from recipes.studies.points import FIGURES, SIZES
from specbench_cli.report.figures.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAW_IN, _OFF_IN, _LEGEND_ROW_IN = 1.7, 0.9, 0.14
_LINE_POINTS = 50
_ASIDE = 0.02
"""Decades that a prediction stands beside what it is of."""


def draw(laws: Sequence[Law]) -> Figure:
    """The figure, two columns of a journal wide."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figures = [name for name in FIGURES if any(law.figure == name for law in laws)]
    sizes = [name for name in SIZES if any(law.along == name for law in laws)]
    wheres = {
        size: list(dict.fromkeys(_where(law) for law in laws if law.along == size))
        for size in sizes
    }
    legend = _LEGEND_ROW_IN * max(map(len, wheres.values())) + 0.1
    height = len(figures) * (_LAW_IN + _OFF_IN) + legend
    layout = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.03)
    page = style.blank(style.PAGE_IN, height, layout=layout)
    rows = [_LAW_IN, _OFF_IN] * len(figures) + [legend]
    grid = page.add_gridspec(len(rows), len(sizes), height_ratios=rows)
    for column, size in enumerate(sizes):
        for row, figure in enumerate(figures):
            own = [law for law in laws if (law.figure, law.along) == (figure, size)]
            if own:
                upper = page.add_subplot(grid[2 * row, column])
                lower = page.add_subplot(grid[2 * row + 1, column], sharex=upper)
                looks = {law.where: style.look(wheres[size].index(_where(law))) for law in own}
                _law(upper, own, looks)
                _off(lower, own, looks)
                _axes(upper, lower, own, figure, size)
        key = page.add_subplot(grid[-1, column])
        key.set_axis_off()
        for place, where in enumerate(wheres[size]):
            colour, marker = style.look(place)
            key.plot([], [], color=colour, marker=marker, ms=3, lw=0.9, label=where)
        key.legend(loc="upper center", frameon=False, fontsize=6, borderpad=0, labelspacing=0.25)
    return page


def _where(law: Law) -> str:
    return law.where or "all"


def _law(axes: Axes, laws: Sequence[Law], looks: dict[str, tuple[str, str]]) -> None:
    for law in laws:
        colour, marker = looks[law.where]
        x, y = np.array(law.points).T
        along = np.geomspace(law.fit.smallest, law.fit.largest, _LINE_POINTS)
        axes.plot(along, law.fit.a.value + law.fit.b.value * np.log10(along), color=colour, lw=0.9)
        axes.scatter(x, y, s=9, color=colour, marker=marker, lw=0, zorder=3)
        if law.held is not None:
            said = law.held.predicted
            ends = [[said.value - said.low], [said.high - said.value]]
            axes.errorbar(
                law.held.size * 10**_ASIDE,
                said.value,
                yerr=ends if np.isfinite(ends).all() else None,
                color=colour,
                marker=marker,
                mfc="white",
                ms=3.6,
                elinewidth=0.7,
                capsize=1.5,
                zorder=4,
            )


def _off(axes: Axes, laws: Sequence[Law], looks: dict[str, tuple[str, str]]) -> None:
    axes.axhline(0, color=style.MUTED, lw=0.6)
    for law in laws:
        colour, marker = looks[law.where]
        x, y = np.array(law.points).T
        off = y - law.fit.a.value - law.fit.b.value * np.log10(x)
        axes.scatter(x, off, s=9, color=colour, marker=marker, lw=0, zorder=3)


def _axes(upper: Axes, lower: Axes, laws: Sequence[Law], figure: str, size: str) -> None:
    upper.set_xscale("log")
    seen = sorted({x for law in laws for x, _ in law.points})
    lower.set_xticks(seen, [short(x) for x in seen])
    lower.xaxis.minorticks_off()
    upper.tick_params(labelbottom=False)
    upper.set_ylabel(FIGURES[figure][0])
    lower.set_ylabel("residual")
    lower.set_xlabel(SIZES[size])
    for axes in (upper, lower):
        style.strip(axes, "left", "bottom")
        style.grid(axes)
