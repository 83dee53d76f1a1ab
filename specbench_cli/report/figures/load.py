"""What requests met at several arrival rates: goodput, time to the first token, latency.

A line a row, with 95% intervals; of the two times the median (filled) and p99 (hollow, broken).
A diamond at the top of the first panel is the rate from which on arrivals outrun a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.summary.load import LoadRow, knee, load_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (
    ("goodput (tokens/s)", ("tokens_per_s",)),
    ("TTFT (s)", ("ttft_s_p50", "ttft_s_p99")),
    ("latency (s)", ("latency_s_p50", "latency_s_p99")),
)
_PANEL_IN, _BETWEEN_IN, _BELOW_IN, _LEGEND_IN = 1.15, 0.12, 0.34, 0.13


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
    legend = _LEGEND_IN * -(-len(found) // 3) + 0.03
    below = _BELOW_IN + legend
    height = below + len(_PANELS) * (_PANEL_IN + _BETWEEN_IN)
    figure = style.blank(style.COLUMN_IN, height)
    for place, (name, keys) in enumerate(_PANELS):
        top = 0.06 + place * (_PANEL_IN + _BETWEEN_IN)
        axes = style.frame(figure, 0.46, 0.14, top, height - top - _PANEL_IN)
        for at, (label, rows) in enumerate(found.items()):
            for hollow, key in enumerate(keys):
                _line(axes, label, rows, key, style.look(at), hollow=bool(hollow))
        if place == 0:
            _mark(axes, list(found.values()))
            handles = axes.get_legend_handles_labels()
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(name, labelpad=2)
        style.strip(axes, "left", "bottom")
        style.grid(axes)
        axes.tick_params(labelbottom=place == len(_PANELS) - 1)
    axes.set_xlabel("offered (requests/s)", labelpad=2)
    style.legend_below(figure, *handles, columns=3)
    return figure


def _line(
    axes: Axes,
    label: str,
    rows: Sequence[LoadRow],
    key: str,
    look: tuple[str, str],
    *,
    hollow: bool,
) -> None:
    colour, marker = look
    points = [(row.offered or 0.0, (row.rates() | row.times())[key]) for row in rows]
    axes.errorbar(
        [offered for offered, _ in points],
        [value for _, (value, _, _) in points],
        yerr=(
            [max(0.0, value - low) for _, (value, low, _) in points],
            [max(0.0, high - value) for _, (value, _, high) in points],
        ),
        color=colour,
        marker=marker,
        mfc="white" if hollow else colour,
        linestyle="--" if hollow else "-",
        ms=3.2,
        lw=0.9,
        elinewidth=0.7,
        capsize=1.5,
        label=style.short(label),
        zorder=3,
    )


def _mark(axes: Axes, found: Sequence[Sequence[LoadRow]]) -> None:
    """The rate from which on each row is saturated."""
    top = axes.get_ylim()[1]
    for at, rows in enumerate(found):
        first = knee(rows)
        if first < len(rows):
            colour, _ = style.look(at)
            axes.plot(rows[first].offered or 0.0, top, "D", mfc="white", color=colour, ms=3.2)
