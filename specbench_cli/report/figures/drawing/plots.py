"""Plot kinds that figures are made of: lines of points with intervals, panels, heat maps.

A figure defines the data. A plot kind defines sizes, margins, ticks and legends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specbench_cli.report.figures.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_ROW_IN, LEGEND_COLUMNS = 0.13, 3
"""Height of a legend's row in inches, and entries in it."""


def legend_in(entries: int) -> float:
    """Return the height of a legend in inches."""
    return LEGEND_ROW_IN * -(-entries // LEGEND_COLUMNS) + 0.03


# ---- lines ---------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A point with its interval, if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points with the same style, and the line through them.

    Attributes:
        points: points in the order of the line.
        colour, marker: see `style.look`.
        face: colour inside the markers; "" for `colour`.
        edge: width of the markers' edges; None for the default.
        line: line style; "none" for points alone.
        size: size of the markers.
        label: entry in the legend.
        zorder: higher is in front.
    """

    points: Sequence[Point]
    colour: str
    marker: str = "o"
    face: str = ""
    edge: float | None = None
    line: str = "-"
    size: float = 3.6
    label: str | None = None
    zorder: float = 3.0

    def draw(self, axes: Axes) -> None:
        """Draw the series; nothing if it has no points."""
        if not self.points:
            return
        down = [0.0 if p.low is None else max(0.0, p.y - p.low) for p in self.points]
        up = [0.0 if p.high is None else max(0.0, p.high - p.y) for p in self.points]
        axes.errorbar(
            [p.x for p in self.points],
            [p.y for p in self.points],
            yerr=(down, up),
            color=self.colour,
            marker=self.marker,
            mfc=self.face or self.colour,
            mew=self.edge,
            linestyle=self.line,
            ms=self.size,
            lw=0.9,
            elinewidth=0.7,
            capsize=1.5,
            label=self.label,
            zorder=self.zorder,
        )


@dataclass(frozen=True, slots=True)
class LinePanel:
    """A panel of a line plot.

    Attributes:
        y: the name of its y axis.
        series: series to draw.
        finish: sets the axis limits after the series are drawn.
    """

    y: str
    series: Sequence[Series]
    finish: Callable[[Axes], None]


def line_plot(
    panels: Sequence[LinePanel],
    x: str,
    *,
    entries: int,
    high: float,
    top: float,
    bottom: float,
) -> Figure:
    """Return a figure of stacked panels that share an x axis from 0, with a legend at the end.

    Args:
        x: the name of the x axis.
        entries: number of entries in the legend.
        high, top, bottom: height of a panel, and margins above and below all panels, in inches.
    """
    bottom += legend_in(entries)
    height = top + len(panels) * high + (len(panels) - 1) * _STACKED + bottom
    figure = style.blank(style.COLUMN_IN, height)
    for place, panel in enumerate(panels):
        above = top + place * (high + _STACKED)
        axes = style.frame(figure, 0.46, 0.14, above, height - above - high)
        for series in panel.series:
            series.draw(axes)
        if place == 0:
            entries_of = axes.get_legend_handles_labels()
        axes.set_xlim(left=0)
        panel.finish(axes)
        axes.set_ylabel(panel.y, labelpad=2)
        style.strip(axes, "left", "bottom")
        style.grid(axes)
        axes.tick_params(labelbottom=place == len(panels) - 1)
    axes.set_xlabel(x, labelpad=2)
    style.legend_below(figure, *entries_of, columns=LEGEND_COLUMNS)
    return figure


_STACKED = 0.12
"""Inches between two panels of a line plot."""


# ---- heat maps -----------------------------------------------------------------------------------

Field = tuple[float | None, str]
"""How dark a field is, from 0 to 1, and the words in it. None: nothing is known."""


def heat_map(
    axes: Axes,
    fields: Sequence[Sequence[Field]],
    columns: Sequence[str],
    *,
    first: int = 0,
    points: float = 6.5,
) -> None:
    """Draw a heat map. Higher values are darker.

    Args:
        fields: a row of fields for each row; rows may be of different lengths.
        columns: the names of the columns.
        first: the place of the first column.
        points: font size of the text in the fields, in points.
    """
    for place, row in enumerate(fields):
        for column, (share, words) in enumerate(row, start=first):
            style.field(axes, column, place, share, words, points)
    end = first + len(columns)
    axes.set(xlim=(first - 0.5, end - 0.5), ylim=(len(fields) - 0.5, -0.5))
    axes.set_xticks(range(first, end), columns)
    style.strip(axes)
    axes.tick_params(axis="x", length=0)


# ---- small multiples -----------------------------------------------------------------------------

_LEFT, _RIGHT, _BETWEEN, _TITLE, _LINE = 0.46, 0.08, 0.1, 0.17, 0.09
"""Inches; a title's second line takes `_LINE` more."""


@dataclass(frozen=True)
class Panels:
    """Small panels in rows, one a method, on the same axes: many methods without many colours."""

    figure: Figure
    axes: dict[str, Axes]
    outer: dict[str, tuple[bool, bool]]
    """Whether a panel is the first of its row, and the last of its column."""

    def finish(self, x: str, y: str, below: float) -> None:
        """Name the axes once for all panels; inner ones keep their ticks and lose the words."""
        for label, axes in self.axes.items():
            first, last = self.outer[label]
            axes.tick_params(labelleft=first, labelbottom=last)
        height = self.figure.get_size_inches()[1]
        self.figure.supxlabel(x, fontsize=7, x=0.54, y=below / height, va="bottom")
        self.figure.supylabel(y, fontsize=7, x=0.015, y=0.5 * (1 + (below + 0.25) / height))


def panels(labels: Sequence[str], columns: int, ratio: float, below: float) -> Panels:
    """Empty panels.

    Args:
        ratio: height of a panel over its width.
        below: inches left free below the name of the x axis.
    """
    columns = min(columns, len(labels))
    rows = -(-len(labels) // columns)
    inner = style.COLUMN_IN - _LEFT - _RIGHT - _BETWEEN * (columns - 1)
    wide = inner / columns if columns > 1 else inner * 0.75
    high = wide * ratio
    bottom = below + 0.3
    shown = style.named(labels)
    title = _TITLE + _LINE * any("\n" in word for word in shown.values())
    height = rows * (high + title) + bottom
    figure = style.blank(style.COLUMN_IN, height)
    found: dict[str, Axes] = {}
    outer: dict[str, tuple[bool, bool]] = {}
    for place, label in enumerate(labels):
        row, column = divmod(place, columns)
        x = _LEFT + column * (wide + _BETWEEN)
        y = bottom + (rows - 1 - row) * (high + title)
        axes = figure.add_axes(
            (x / style.COLUMN_IN, y / height, wide / style.COLUMN_IN, high / height)
        )
        style.strip(axes, "left", "bottom")
        style.grid(axes)
        word, size = shown[label], style.TINY if "\n" in shown[label] else 6.5
        size = min(size, 0.98 * size * wide / style.width_of([word], size))
        axes.set_title(word, fontsize=max(size, 5), pad=1.5, linespacing=0.9)
        found[label] = axes
        outer[label] = (column == 0, place + columns >= len(labels))
    return Panels(figure, found, outer)
