"""Tokens a step against what a step costs: the two that make a speedup.

A step's cost is its decode time over that of a plain step of vanilla on the same outputs, so that
MAT / cost is the decode speedup; it is the same along each grey line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.labels import Word, write_beside
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE_IN = 2.75
_ROUND_IN, _MANY_IN = 0.25, 16
"""Inches around a name, and of names one after another; more need the width of a page."""
_LINES = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
_BEYOND = 1.5
"""Lines are drawn as far as this factor beyond the points' speedups."""


def costs(cells: Cells) -> dict[str, float]:
    """By label, decode time of a step in plain steps; of rows that have MAT and a decode
    speedup."""
    return {
        row.label: row.mat / row.decode_speedup
        for row in cells.summary.rows
        if row.mat is not None and row.decode_speedup is not None
    }


def draw(cells: Cells) -> Figure | None:
    """The figure; None where no method but vanilla has steps and times."""
    found = costs(cells)
    rows = [row for row in cells.summary.rows if row.label in found]
    if len(rows) < 2:
        return None
    names = [style.width_of([style.short(row.label)], style.SMALL) for row in rows]
    many = sum(names) + _ROUND_IN * len(names) > _MANY_IN
    figure = style.blank(style.PAGE_IN if many else style.COLUMN_IN, _SIDE_IN * (1 + 0.3 * many))
    axes = style.frame(figure, 0.36, 0.3, 0.16, 0.36)
    words = [_point(axes, row, found[row.label]) for row in rows]
    right, top = 1.1 * max(found.values()), 1.1 * max(row.mat or 0.0 for row in rows)
    axes.set(xlim=(0, right), ylim=(0, top))
    sped = [row.decode_speedup for row in rows if row.decode_speedup is not None]
    for speedup in _LINES:
        if min(sped) / _BEYOND <= speedup <= max(sped) * _BEYOND:
            _line(axes, speedup, right, top)
    axes.set_xlabel("cost of a step (plain steps of vanilla)", labelpad=2)
    axes.set_ylabel("MAT: tokens a step", labelpad=2)
    style.strip(axes, "left", "bottom")
    write_beside(axes, words)
    return figure


def _point(axes: Axes, row: Row, cost: float) -> Word:
    assert row.mat is not None
    axes.scatter(
        [cost],
        [row.mat],
        s=16,
        marker="o" if row.lossless else "^",
        facecolor=_face(row),
        edgecolor=style.INK,
        linewidth=0.6,
        zorder=3,
    )
    return Word(style.short(row.label), (cost, row.mat), style.INK)


def _face(row: Row) -> str:
    """White is not ranked."""
    if row.label == BASELINE:
        return style.REFERENCE
    return "white" if row.peer or row.upper_bound or not row.lossless else style.OURS


def _line(axes: Axes, speedup: float, right: float, top: float) -> None:
    """Where the decode speedup is the same, named where the line leaves the panel."""
    end = min(right, top / speedup)
    leaves = end == right
    axes.plot([0, end], [0, end * speedup], color=style.BAND, lw=0.6, zorder=0)
    axes.annotate(
        f"{speedup:g}x",
        (end, end * speedup),
        xytext=(2, 0) if leaves else (0, 1),
        textcoords="offset points",
        ha="left" if leaves else "center",
        va="center" if leaves else "bottom",
        fontsize=style.SMALL,
        color=style.MUTED,
    )
