"""What requests met at several arrival rates: goodput, time to the first token, latency.

A line a row, with 95% intervals; of the two times the median (filled) and p99 (hollow, broken).
A diamond at the top of the first panel is the rate from which on arrivals outrun a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import LinePanel, Point, Series, line_plot
from specbench_cli.summary.load import LoadRow, knee, load_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (
    ("goodput (tokens/s)", ("tokens_per_s",)),
    ("TTFT (s)", ("ttft_s_p50", "ttft_s_p99")),
    ("latency (s)", ("latency_s_p50", "latency_s_p99")),
)


def lines(cells: Cells) -> dict[str, list[LoadRow]]:
    """By label, the row under each of several rates, the lowest first."""
    found: dict[str, list[LoadRow]] = {}
    for row in load_rows([record for own in cells.records.values() for record in own]):
        if row.offered is not None:
            found.setdefault(row.label, []).append(row)
    return {label: rows for label, rows in found.items() if len(rows) > 1}


def draw(cells: Cells) -> Figure | None:
    """The figure; None of a run without several rates."""
    found = lines(cells)
    if not found:
        return None
    looks = {label: style.look(at) for at, label in enumerate(found)}
    panels = list[LinePanel]()
    for name, keys in _PANELS:
        series = [
            _series(label, rows, key, looks[label], hollow=bool(hollow))
            for label, rows in found.items()
            for hollow, key in enumerate(keys)
        ]
        marked = list(found.values()) if not panels else []
        panels.append(LinePanel(name, series, partial(_finish, marked)))
    return line_plot(
        panels, "offered (requests/s)", entries=len(found), high=1.15, top=0.06, bottom=0.4
    )


def _series(
    label: str, rows: Sequence[LoadRow], key: str, look: tuple[str, str], *, hollow: bool
) -> Series:
    colour, marker = look
    return Series(
        points=[Point(row.offered or 0.0, *row.figures[key]) for row in rows],
        colour=colour,
        marker=marker,
        face="white" if hollow else "",
        line="--" if hollow else "-",
        size=3.2,
        label=style.short(label),
    )


def _finish(marked: Sequence[Sequence[LoadRow]], axes: Axes) -> None:
    _mark(axes, marked)
    axes.set_ylim(bottom=0)


def _mark(axes: Axes, found: Sequence[Sequence[LoadRow]]) -> None:
    """The rate from which on each row is saturated."""
    top = axes.get_ylim()[1]
    for at, rows in enumerate(found):
        first = knee(rows)
        if first < len(rows):
            colour, _ = style.look(at)
            axes.plot(rows[first].offered or 0.0, top, "D", mfc="white", color=colour, ms=3.2)
