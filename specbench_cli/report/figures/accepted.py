"""How drafts are accepted: how many tokens of one, a histogram a method, and how often each level.

Of the steps that drafted level k, the share that accepted it. The darker a field, the higher; the
percentage is in it.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import heat_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_IN, _FULL = 0.3, 0.82
"""Of the histogram: height of a row, and of its tallest bar as a part of it."""
_LONGEST = 16
"""The last bar stands for this many and more."""
_FIELD_HIGH_IN, _FIELD_IN = 0.19, 0.17
"""Height of a field, and its least width; levels that find no room are left out, and the axis says
so."""


def draw_counts(cells: Cells) -> Figure | None:
    """Histograms of accepted tokens; None where no method drafts, or none says what it accepted."""
    shares = {row.label: _shares(cells, row.label) for row in cells.summary.rows}
    shares = {label: own for label, own in shares.items() if own}
    if not shares:
        return None
    longest = max(max(own) for own in shares.values())
    figure = style.blank(style.COLUMN_IN, _ROW_IN * len(shares) + 0.4)
    axes = style.frame(figure, style.room_for(shares), 0.36, 0.16, 0.31)
    for place, own in enumerate(shares.values()):
        scale = _FULL / max(own.values())
        heights = [-share * scale for share in own.values()]
        axes.bar(list(own), heights, 0.8, place, color=style.OURS, lw=0, zorder=2)
        axes.axhline(place, color=style.INK, lw=0.4, zorder=3)
        axes.annotate(
            f"{max(own.values()):.0%}",
            (1, place - 0.1),
            xycoords=("axes fraction", "data"),
            xytext=(24, 0),
            textcoords="offset points",
            ha="right",
            va="bottom",
        )
    axes.annotate(
        "tallest",
        (1, 1),
        xycoords="axes fraction",
        xytext=(24, 1),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=6.5,
        color=style.MUTED,
    )
    axes.set(xlim=(-0.6, longest + 0.6), ylim=(len(shares) - 0.9, -1.0))
    style.strip(axes)
    axes.tick_params(axis="x", length=0)
    style.name_rows(axes, list(shares), [place - 0.3 for place in range(len(shares))])
    ticks = range(0, longest + 1, 1 if longest <= 10 else 4)
    axes.set_xticks(ticks, [f"{n}+" if n == _LONGEST else str(n) for n in ticks])
    style.name_x(axes, "drafted tokens accepted in a step, share of steps")
    return figure


def _shares(cells: Cells, label: str) -> dict[int, float]:
    """Share of a row's steps by accepted tokens; empty where nothing is ever drafted."""
    steps = cells.steps(label)
    if not any(any(each.levels) for each in steps):
        return {}
    counts = Counter[int]()
    for n, times in Counter(chain.from_iterable(each.accepted for each in steps)).items():
        counts[min(n, _LONGEST)] += times
    return {n: counts[n] / counts.total() for n in sorted(counts)}


def draw_levels(cells: Cells) -> Figure | None:
    """Acceptance by level; None where no method drafts, or none says what it drafted."""
    rows = [row for row in cells.summary.rows if row.acceptance_by_position]
    if not rows:
        return None
    deepest = max(len(row.acceptance_by_position) for row in rows)
    left = style.room_for(row.label for row in rows)
    room = style.COLUMN_IN - left - 0.06
    columns = min(deepest, int(room / _FIELD_IN))
    figure = style.blank(style.COLUMN_IN, _FIELD_HIGH_IN * len(rows) + 0.36)
    axes = style.frame(figure, left, 0.06, 0.05, 0.31)
    points = min(6.5, room / columns / (1.15 * style.width_of(["100"], 1)))
    fields = [
        [(rate, f"{100 * rate:.0f}") for rate in row.acceptance_by_position[:columns]]
        for row in rows
    ]
    heat_map(axes, fields, [str(n) for n in range(1, columns + 1)], first=1, points=points)
    style.name_rows(axes, [row.label for row in rows], range(len(rows)))
    cut = f" (the first {columns} of {deepest})" if deepest > columns else ""
    style.name_x(axes, f"level of the draft{cut}: % accepted")
    return figure
