"""The figure of lossy rows: how right their answers are against how fast they come.

84 mm wide. A method is a line over its numbers, and a line more for each of its choices that is
named by a word (`fill=copy`), told apart by colour and shape; its random controls have the same
colour, hollow. What nothing is lost by, vanilla and lossless rows, is grey, and so is the draft by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import Point, Series
from specbench_cli.report.figures.drawing.style import MUTED
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.metrics import Row, has_partial
from specbench_cli.summary.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANDOM = "random"
"""The word by which a method's parameter asks for a coin in its rule's place."""
_BY_WORK = "tokens for a target forward's work"
_PANEL_IN, _LEGEND_ROW_IN, _COLUMNS = 2.6, 0.15, 2

Speed = Callable[[Row], float | None]


def draw(summary: Summary) -> Figure | None:
    """The figure; None where no lossy row was scored."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    series = _series(_drawn(summary))
    if not series:
        return None
    legend = _LEGEND_ROW_IN * -(-len(series) // _COLUMNS) + 0.1
    height = _PANEL_IN + legend
    layout = ConstrainedLayoutEngine(rect=(0, legend / height, 1, 1 - legend / height))
    figure = style.blank(style.COLUMN_IN, height, layout=layout)
    axes = figure.add_subplot()
    draw_on(axes, summary)
    style.legend_below(figure, *axes.get_legend_handles_labels(), columns=_COLUMNS)
    return figure


def draw_on(axes: Axes, summary: Summary) -> None:
    """Its lines, without a legend.

    Speed is the speedup over vanilla where every lossy row has one, else what no noise reaches:
    tokens a target forward, or, where a forward may be a part of one, for the work of a whole one.
    """
    lossy = _drawn(summary)
    speed: Speed = lambda row: row.per_forward  # noqa: E731 - one of three
    name = "tokens a target forward"
    if all(row.speedup is not None for row in lossy):
        speed, name = (lambda row: row.speedup), "speedup over vanilla"
    elif has_partial(lossy):
        speed, name = (lambda row: 1 / row.work if row.work else None), _BY_WORK
    _references(axes, summary, speed)
    for at, (label, rows) in enumerate(_series(lossy).items()):
        _line(axes, label, rows, style.look(at // 2), speed, hollow=at % 2 == 1)
    axes.set_xlabel(name)
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    style.strip(axes, "left", "bottom")
    style.grid(axes)


def _drawn(summary: Summary) -> list[Row]:
    """Lossy rows that have both coordinates."""
    return [row for row in summary.lossy if row.score is not None and row.per_forward is not None]


def _series(lossy: Sequence[Row]) -> dict[str, list[Row]]:
    """By the name of a line, its rows; behind each line that of its random controls, which may be
    empty."""
    name = {row.label: _named(row, lossy) for row in lossy}
    found: dict[str, list[Row]] = {}
    for row in lossy:
        if not row.control:
            found.setdefault(name[row.label], [])
            found.setdefault(f"{name[row.label]}, at random", [])
    for row in lossy:
        of = name.get(str(row.params.get("like")), name[row.label])
        tossed = row.control or RANDOM in row.params.values()
        found.setdefault(f"{of}, at random" if tossed else of, []).append(row)
    return found


def _named(row: Row, lossy: Sequence[Row]) -> str:
    """A row's method, with those words among its parameters that rows of it differ in."""
    rows = [other for other in lossy if other.method == row.method and not other.control]
    words = [
        word
        for key, word in row.params.items()
        if isinstance(word, str)
        and word != RANDOM
        and len({str(other.params.get(key)) for other in rows} - {RANDOM}) > 1
    ]
    return " ".join([row.method, *words])


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
    Series(
        points=[
            Point(
                at,
                height,
                height + _from_mean(row, row.score_difference_low),
                height + _from_mean(row, row.score_difference_high),
            )
            for height, (at, row) in zip(heights, points, strict=True)
        ],
        colour=colour,
        marker=marker,
        face="white" if hollow else "",
        line=":" if hollow else "-",
        label=name,
        zorder=3 - hollow * 0.5,
    ).draw(axes)


def _from_mean(row: Row, end: float | None) -> float:
    """How far an end of its interval lies from a row's difference."""
    return 0.0 if end is None or row.score_difference is None else end - row.score_difference
