"""Kinds of plots: rows with labels, heat maps, small multiples, and pages of panels.

A module of `figures/` declares panels: marks (points, bars, lines, text) and two axes. A function
here turns panels into a matplotlib figure and chooses sizes, margins, ticks and the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.labels import PointLabel, place_labels
from specbench_cli.report.figures.drawing.style import INK, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure

# ---- marks ---------------------------------------------------------------------------------------


class PlotPoint(NamedTuple):
    """A point, with the ends of its interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """Points with the same appearance, their intervals, and the line through them.

    Attributes:
        label: Text in the legend. None for no entry.
        horizontal: True if the intervals are along the x axis. Default: along the y axis.
        band: True to draw the intervals as a band instead of error bars.
        rasterized: True to store the points as pixels in vector formats.
    """

    points: Sequence[PlotPoint]
    look: Look
    label: str | None = None
    horizontal: bool = False
    band: bool = False
    rasterized: bool = False

    def draw(self, axes: Axes) -> None:
        """Draw the points, their intervals and the line."""
        if not self.points:
            return
        x, y = [p.x for p in self.points], [p.y for p in self.points]
        middles = x if self.horizontal else y
        pairs = list(zip(self.points, middles, strict=True))
        low = [at if p.low is None else min(p.low, at) for p, at in pairs]
        high = [at if p.high is None else max(p.high, at) for p, at in pairs]
        if self.band:
            axes.fill_between(x, low, high, color=style.OURS, alpha=0.3, lw=0, zorder=2)
        errors: dict[str, Any] = {}
        has_whiskers = self.look.whisker and not self.band
        if has_whiskers and any(p.low is not None or p.high is not None for p in self.points):
            ends = np.subtract(middles, low), np.subtract(high, middles)
            errors["xerr" if self.horizontal else "yerr"] = ends
        axes.errorbar(
            x, y, **errors, **self.look.options, label=self.label, rasterized=self.rasterized
        )

    def mark_cut(self, axes: Axes) -> None:
        """Draw an arrowhead at the end of the axis for each interval that continues beyond the
        axis.
        """
        edge = (axes.get_xlim() if self.horizontal else axes.get_ylim())[1]
        for point in self.points:
            if point.high is not None and point.high > edge:
                at = (edge, point.y) if self.horizontal else (point.x, edge)
                marker = ">" if self.horizontal else "^"
                axes.scatter(
                    *at, s=8, marker=marker, color=self.look.colour, lw=0, clip_on=False, zorder=6
                )


class BarBox(NamedTuple):
    """A rectangle: its lower left corner and its size, in data coordinates."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class PlotBars:
    """Rectangles with the same colour: bars of a chart, boxes of a timeline, or heat map fields.

    Attributes:
        hatch: Hatching pattern of matplotlib, or None.
        edge: Colour of the border.
        line: Width of the border.
    """

    boxes: Sequence[BarBox]
    colour: str
    hatch: str | None = None
    label: str | None = None
    edge: str = "white"
    line: float = 0.0

    def draw(self, axes: Axes) -> None:
        """Draw the rectangles."""
        if self.boxes:
            x, y, width, height = zip(*self.boxes, strict=True)
            look: Any = {"hatch": self.hatch, "edgecolor": self.edge, "lw": self.line, "zorder": 2}
            axes.bar(x, height, width, y, align="edge", color=self.colour, label=self.label, **look)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLine:
    """A line across the whole panel at one x or y. If `to` is set, a vertical band from
    x to `to`.
    """

    x: float | None = None
    y: float | None = None
    to: float | None = None
    colour: str = INK
    width: float = 0.5
    line: str | tuple[float, tuple[float, ...]] = "-"
    zorder: float = 1.0
    label: str | None = None

    def draw(self, axes: Axes) -> None:
        """Draw the line or the band."""
        look: Any = {"color": self.colour, "label": self.label}
        if self.x is not None and self.to is not None:
            axes.axvspan(self.x, self.to, **look, lw=0, zorder=0)
            return
        look |= {"lw": self.width, "ls": self.line, "zorder": self.zorder}
        if self.x is not None:
            axes.axvline(self.x, **look)
        if self.y is not None:
            axes.axhline(self.y, **look)


@dataclass(frozen=True, slots=True)
class Note:
    """Text at a point of a panel.

    Attributes:
        x: x coordinate. None for the right edge of the panel.
        offset: Distance from the point, in pt.
        halo: Width of the white outline of the letters, in pt.
    """

    text: str
    x: float | None
    y: float
    size: float = 7
    colour: str = INK
    offset: tuple[float, float] | None = None
    ha: Literal["left", "center", "right"] = "left"
    va: Literal["center_baseline", "baseline", "bottom", "top"] = "center_baseline"
    halo: float = 0.0
    label: None = None

    def draw(self, axes: Axes) -> None:
        """Write the text, above all marks."""
        from matplotlib.patheffects import withStroke

        edge, halo = self.x is None, withStroke(linewidth=self.halo, foreground="white")
        axes.annotate(
            self.text,
            (1 if self.x is None else self.x, self.y),
            xycoords=("axes fraction", "data") if edge else "data",
            xytext=self.offset,
            textcoords=None if self.offset is None else "offset points",
            ha=self.ha,
            va=self.va,
            fontsize=self.size,
            color=self.colour,
            zorder=6,
            path_effects=[halo] if self.halo else None,
        )


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two points of a panel."""

    start: tuple[float, float]
    end: tuple[float, float]
    label: None = None

    def draw(self, axes: Axes) -> None:
        """Draw the arrow."""
        look = {"arrowstyle": "-|>", "lw": 0.4, "mutation_scale": 4, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", self.end, self.start, arrowprops=look | {"color": INK}, zorder=3)


Mark = PlotSeries | PlotBars | RuleLine | Note | Arrow


def right_note(text: str, y: float, size: float = 7, colour: str = INK) -> Note:
    """Return text in the column to the right of the panel, next to a row of `row_plot`."""
    return Note(text, None, y, size, colour, (24, 0), "right")


# ---- panels --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a panel.

    Attributes:
        name: Quantity with its unit.
        low, high: Limits. None uses the range of the data.
        tick_format: Returns the text of a tick.
        ticks: Position -> text of each tick. None uses matplotlib's ticks.
        bins: Maximum number of intervals between ticks. On an x axis, ticks are integers.
        rotated: True to rotate the text of the ticks.
    """

    name: str = ""
    low: float | None = None
    high: float | None = None
    tick_format: Callable[[float, object], str] | None = None
    ticks: Mapping[float, str] | None = None
    bins: int | None = None
    log: bool = False
    rotated: bool = False

    def apply(self, axes: Axes, which: Literal["x", "y"]) -> None:
        """Set scale, limits and ticks of the x or y axis of `axes`."""
        from matplotlib.ticker import LogFormatter, NullFormatter

        axis = axes.xaxis if which == "x" else axes.yaxis
        if self.log:
            axes.set(**{f"{which}scale": "log"})
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(NullFormatter() if self.ticks else LogFormatter())
            axes.tick_params(axis=which, which="minor", length=1.2, width=0.4)
        axes.set(**{f"{which}lim": (self.low, self.high)})
        if self.bins is not None:
            axes.locator_params(axis=which, nbins=self.bins, integer=which == "x")
        if self.ticks is not None:
            turn: Any = {"rotation": 30, "ha": "right"} if self.rotated else {}
            axis.set_ticks(list(self.ticks), list(self.ticks.values()), **turn)
        elif self.tick_format is not None:
            axis.set_major_formatter(self.tick_format)


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot with two axes and marks.

    Attributes:
        point_labels: Labels of points. They are placed so that they do not overlap.
        height: Height in inches on a page, including text.
        grid: True for faint grid lines.
    """

    marks: Sequence[Mark]
    x: Axis = Axis()
    y: Axis = Axis()
    title: str = ""
    point_labels: Sequence[PointLabel] = ()
    height: float = 2.1
    grid: bool = True

    def draw(self, axes: Axes, *sides: str) -> None:
        """Draw the marks, the axes, and some sides of the frame, such as "left"."""
        for mark in self.marks:
            mark.draw(axes)
        self.x.apply(axes, "x")
        self.y.apply(axes, "y")
        style.show_sides(axes, *sides)
        if self.grid:
            style.grid(axes)
        if self.x.name:
            style.label_x_axis(axes, self.x.name)
        axes.set_ylabel(self.y.name, labelpad=2)
        for mark in self.marks:
            if isinstance(mark, PlotSeries) and mark.look.whisker:
                mark.mark_cut(axes)


# ---- legends -------------------------------------------------------------------------------------


def _entries(panels: Sequence[Panel]) -> list[str]:
    labels = (mark.label for panel in panels for mark in panel.marks if mark.label is not None)
    return list(dict.fromkeys(labels))


def _legend_in(panels: Sequence[Panel], columns: int) -> float:
    """Return the height of a legend in inches."""
    rows = -(-len(_entries(panels)) // columns)
    return 0.13 * rows + 0.03 * bool(rows)


def _legend(figure: Figure, panels: Sequence[Panel], columns: int) -> None:
    """Draw one legend for all panels below them."""
    handles: dict[str, Any] = {}
    for axes in reversed(
        figure.axes
    ):  # if panels share a label, the legend shows the mark of the first
        own, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(reversed(labels), reversed(own), strict=True))
    names = [name for name in _entries(panels) if name in handles]
    if names:
        own = [handles[name] for name in names]
        figure.legend(own, names, loc="lower center", ncols=columns)


# ---- plot kinds ----------------------------------------------------------------------------------

_RIGHT_IN, _ASIDE_IN, _GAP_IN = 0.12, 0.36, 0.12
"""Widths in inches: right margin, right margin with a text column, and space between panels."""


def row_width(
    names: Sequence[str],
    width: float = style.COLUMN_IN,
    with_right_column: bool = False,
    panels: int = 1,
) -> float:
    """Return the width of a panel of `row_plot` in inches."""
    right = _ASIDE_IN if with_right_column else _RIGHT_IN
    return (width - style.label_width(names) - right - _GAP_IN * (panels - 1)) / panels


def row_plot(
    rows: Sequence[tuple[str, float]],
    panels: Sequence[Panel],
    unit: float,
    *,
    width: float = style.COLUMN_IN,
    heading: str = "",
    columns: int = 3,
) -> Figure:
    """Return a figure whose rows have labels on the left, such as a bar chart of methods.

    Args:
        rows: (label, position) of each row. The y axis points down.
        panels: Panels side by side.
        unit: Height of one unit of the y axis in inches.
        heading: Heading of the text column on the right (`right_note`). "" for no such column.
        columns: Number of columns of the legend.
    """
    labels, places = [label for label, _ in rows], [place for _, place in rows]
    panel_width = row_width(labels, width, bool(heading), len(panels))
    y = Axis("", max(places) + 0.6, min(places) - 0.6)
    top = 0.18 if heading or panels[0].title else 0.05
    bottom = (0.33 if panels[0].x.name else 0.22) + _legend_in(panels, columns)
    figure = style.new_figure(width, unit * (max(places) - min(places) + 1.2) + top + bottom)
    left = style.label_width(labels)
    for panel in panels:
        axes = style.add_axes(figure, left, width - left - panel_width, top, bottom)
        sides = () if panel.x.ticks else ("bottom",)
        replace(panel, y=y, grid=False).draw(axes, *sides)
        axes.set_title(panel.title, fontsize=7, pad=3)
        style.label_rows(axes, labels if panel is panels[0] else [""] * len(labels), places)
        left += panel_width + _GAP_IN
        if heading:
            at, look = (24, 1), (6.5, style.MUTED)
            Note(heading, None, min(places) - 0.6, *look, at, "right", "bottom").draw(axes)
    _legend(figure, panels, columns)
    return figure


_FIELDS, _LIGHT_TEXT = ("#f3f7fb", "#0b3c66"), 0.58
"""Colours of the lowest and the highest field, and the share above which text is white."""


def heat_map(
    rows: Sequence[Sequence[tuple[float | None, str]]],
    columns: Sequence[str],
    x: str = "",
    points: float = 6.5,
    title: str = "",
) -> Panel:
    """Return a heat map as a panel for `row_plot`. Higher values are darker.

    Args:
        rows: Fields of each row, as (share from 0 to 1, text). A field without a share is white.
            Rows may have different lengths.
        columns: Names of the columns.
        x: Name of the x axis.
        points: Font size of the text.
    """
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = LinearSegmentedColormap.from_list("fields", _FIELDS)
    marks = list[Mark]()
    for y, row in enumerate(rows):
        for place, (share, text) in enumerate(row):
            colour = "white" if share is None else to_hex(shades(share))
            ink = "white" if share is not None and share > _LIGHT_TEXT else INK
            marks.append(PlotBars([BarBox(place - 0.48, y - 0.44, 0.96, 0.88)], colour))
            marks.append(Note(text, place, y, points, ink, ha="center"))
    axis = Axis(x, -0.5, len(columns) - 0.5, ticks=dict(enumerate(columns)))
    return Panel(marks, axis, title=title)


_LEFT_IN, _EDGE_IN, _BETWEEN_IN, _TITLE_IN, _LINE_IN, _NAME_IN = 0.46, 0.08, 0.1, 0.17, 0.09, 0.3
"""Sizes of small multiples in inches: left and right margin, space between panels, height of a
title, of its second line, and of the x axis."""


def small_multiples(
    panels: Mapping[str, Panel], x: str, y: str, *, ratio: float, columns: int = 3
) -> Figure:
    """Return a figure of small panels with the same axes, three per row.

    Args:
        panels: Title -> panel. A title is usually a method.
        x, y: Names of the axes.
        ratio: Height of a panel divided by its width.
        columns: Number of columns of the legend.
    """
    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    inner = style.COLUMN_IN - _LEFT_IN - _EDGE_IN - _BETWEEN_IN * (n_columns - 1)
    panel_width = inner / n_columns if n_columns > 1 else inner * 0.75
    high, below = panel_width * ratio, max(0.02, _legend_in(list(panels.values()), columns))
    titles = style.wrap_labels(panels)
    title = _TITLE_IN + _LINE_IN * any("\n" in word for word in titles.values())
    height = n_rows * (high + title) + below + _NAME_IN
    figure = style.new_figure(style.COLUMN_IN, height)
    for place, (label, panel) in enumerate(panels.items()):
        row, column = divmod(place, n_columns)
        left = _LEFT_IN + column * (panel_width + _BETWEEN_IN)
        bottom = below + _NAME_IN + (n_rows - 1 - row) * (high + title)
        right, top = style.COLUMN_IN - left - panel_width, height - bottom - high
        axes = style.add_axes(figure, left, right, top, bottom)
        panel.draw(axes, "left", "bottom")
        last = place + n_columns >= len(panels)
        axes.tick_params(labelleft=column == 0, labelbottom=last)
        word, size = titles[label], style.TINY if "\n" in titles[label] else 6.5
        size = min(size, 0.98 * size * panel_width / style.text_width([word], size))
        axes.set_title(word, fontsize=max(size, 5), pad=1.5, linespacing=0.9)
    figure.supxlabel(x, fontsize=7, x=0.54, y=below / height, va="bottom")
    figure.supylabel(y, fontsize=7, x=0.015, y=0.5 * (1 + (below + 0.25) / height))
    _legend(figure, list(panels.values()), columns)
    return figure


def page(*stacks: Sequence[Panel], width: float = style.COLUMN_IN, columns: int = 3) -> Figure:
    """Return a figure with stacks of panels side by side, and a legend below them.

    Args:
        stacks: Panels of each stack, from top to bottom. All stacks get the same height. A panel
            whose x axis has no name shares the axis of the panel below.
        columns: Number of columns of the legend.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = [panel for stack in stacks for panel in stack]
    below = _legend_in(panels, columns)
    height = max(sum(panel.height for panel in stack) for stack in stacks) + below
    layout = ConstrainedLayoutEngine(w_pad=0.06, rect=(0, below / height, 1, 1 - below / height))
    figure = style.new_figure(width, height, layout=layout)
    grid = figure.add_gridspec(1, len(stacks))
    for place, stack in enumerate(stacks):
        ratios = [panel.height for panel in stack]
        cells = grid[place].subgridspec(len(stack), 1, height_ratios=ratios)
        for row, panel in enumerate(stack):
            axes = figure.add_subplot(cells[row])
            panel.draw(axes, "left", "bottom")
            axes.tick_params(labelbottom=bool(panel.x.name))
    _legend(figure, panels, columns)
    for axes, panel in zip(figure.axes, panels, strict=True):
        if panel.point_labels:
            figure.draw_without_rendering()  # labels are placed in pt, so the layout must be final
            place_labels(axes, panel.point_labels)
    return figure
