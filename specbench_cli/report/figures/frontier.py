"""The figure of lossy rows: how right their answers are against how fast they come.

84 mm wide. A method is a line over its settings, told apart by colour and shape; its random
controls have the same colour, hollow. What nothing is lost by, vanilla and lossless rows, is grey,
and so is the draft by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.style import MUTED
from specbench_cli.report.numbers.row import Row
from specbench_cli.report.numbers.speedups import BASELINE
from specbench_cli.report.numbers.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_IN, _LEGEND_ROW_IN, _COLUMNS = 2.6, 0.15, 2

Speed = Callable[[Row], float | None]


def draw(summary: Summary) -> Figure | None:
    """The figure; None where no lossy row was scored.

    Speed is the speedup over vanilla where every lossy row has one, else tokens a target forward,
    which no noise reaches.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lossy = [row for row in summary.lossy if row.score is not None and row.per_forward is not None]
    if not lossy:
        return None
    timed = all(row.speedup is not None for row in lossy)
    speed: Speed = (lambda row: row.speedup) if timed else (lambda row: row.per_forward)
    series = _series(lossy)
    legend = _LEGEND_ROW_IN * -(-len(series) // _COLUMNS) + 0.1
    height = _PANEL_IN + legend
    layout = ConstrainedLayoutEngine(rect=(0, legend / height, 1, 1 - legend / height))
    figure = style.blank(style.COLUMN_IN, height, layout=layout)
    axes = figure.add_subplot()
    _references(axes, summary, speed)
    for at, (name, rows) in enumerate(series.items()):
        _line(axes, name, rows, style.look(at // 2), speed, hollow=at % 2 == 1)
    axes.set_xlabel("speedup over vanilla" if timed else "tokens a target forward")
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    style.strip(axes, "left", "bottom")
    style.grid(axes)
    style.legend_below(figure, *axes.get_legend_handles_labels(), columns=_COLUMNS)
    return figure


def _series(lossy: Sequence[Row]) -> dict[str, list[Row]]:
    """By the name of a line, its rows; behind each method's line that of its random controls, which
    may be empty."""
    method = {row.label: row.method for row in lossy}
    found: dict[str, list[Row]] = {}
    for row in lossy:
        if not row.control:
            found.setdefault(row.method, [])
            found.setdefault(f"{row.method}, at random", [])
    for row in lossy:
        of = method.get(str(row.params.get("like")), row.method)
        found.setdefault(f"{of}, at random" if row.control else of, []).append(row)
    return found


def _references(axes: Axes, summary: Summary, speed: Speed) -> None:
    """Vanilla's accuracy and the draft's own as lines, lossless rows as crosses."""
    for row in summary.rows:
        if row.score is None:
            continue
        alone = row.control and row.per_forward is None
        if row.label == BASELINE or alone:
            axes.axhline(row.score, color=MUTED, lw=0.7, ls="-" if row.lossless else ":", zorder=1)
            axes.annotate(
                row.label,
                (1, row.score),
                xycoords=("axes fraction", "data"),
                xytext=(0, 1.5),
                textcoords="offset points",
                ha="right",
                fontsize=style.TINY,
                color=MUTED,
            )
        elif row.lossless and not row.peer and (at := speed(row)) is not None:
            axes.scatter([at], [row.score], marker="x", s=16, color=MUTED, linewidth=0.9, zorder=2)


def _line(
    axes: Axes,
    name: str,
    rows: Sequence[Row],
    look: tuple[str, str],
    speed: Speed,
    *,
    hollow: bool,
) -> None:
    """A line's points in the order of their speed, each with its interval."""
    colour, marker = look
    points = [(at, row) for row in rows if (at := speed(row)) is not None]
    points.sort(key=lambda point: point[0])
    if not points:
        return
    heights = [row.score or 0.0 for _, row in points]
    reach = [[-_from_mean(row, row.score_difference_low) for _, row in points],
             [_from_mean(row, row.score_difference_high) for _, row in points]]  # fmt: skip
    axes.errorbar(
        [at for at, _ in points],
        heights,
        yerr=reach,
        color=colour,
        marker=marker,
        mfc="white" if hollow else colour,
        ms=3.6,
        lw=0.9,
        ls=":" if hollow else "-",
        elinewidth=0.7,
        capsize=1.4,
        zorder=3 - hollow * 0.5,
        label=name,
    )


def _from_mean(row: Row, end: float | None) -> float:
    """How far an end of its interval lies from a row's difference."""
    return 0.0 if end is None or row.score_difference is None else end - row.score_difference
