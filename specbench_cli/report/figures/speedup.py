"""The default figure: who is faster than vanilla, by how much, how sure, and on what.

One panel, 84 mm wide (a journal's column), legible in grey: bars are told apart by lightness,
families by the shape of their dots. The files are the same bytes for the same records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.style import INK, MUTED
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary import formats, text
from specbench_cli.summary.metrics import Row
from specbench_cli.summary.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_IN, _LEGEND_IN, _BAR = 0.225, 0.13, 0.7
_WHISKER, _DOT = -0.13, 0.17
"""Where in a bar the interval and the families' dots lie, from its middle downwards."""
_DOTS = "oDs^vP*X"
_DOT_IN = 0.03
_GAP = 0.7
"""Between rows of one kind and of the next, in rows."""
_WORDS = {text.RUN_SCOPE: "run"}
"""Beside the border between them; rows of another engine are over that one's vanilla."""


def draw(summary: Summary) -> Figure | None:
    """The figure; None where no lossless row has a speedup. A lossy row's does not stand without
    what it costs: `frontier`."""
    rows = summary.lossless
    if not any(row.speedup is not None for row in rows):
        return None
    kinds = text.sections(rows)
    places = {
        row.label: place + _GAP * sum(start <= place for start, _ in kinds)
        for place, row in enumerate(rows)
    }
    families = list(summary.families) if len(summary.families) > 1 else []
    legend = _LEGEND_IN * -(-len(families) // 3) + 0.03 * bool(families)
    figure = style.blank(
        style.COLUMN_IN, _ROW_IN * (len(places) + _GAP * len(kinds)) + 0.49 + legend
    )
    axes = style.frame(figure, style.room_for(places), 0.36, 0.16, 0.33 + legend)
    if summary.noise_floor is not None:
        floor = summary.noise_floor
        axes.axvspan(1 - floor, 1 + floor, color=style.BAND, linewidth=0, zorder=0)
    axes.axvline(1, color=INK, linewidth=0.5, zorder=1)
    by_row = {
        row.label: [
            of_row.speedup
            for family in families
            for of_row in summary.families[family]
            if of_row.label == row.label and of_row.speedup is not None
        ]
        for row in rows
    }
    overall = [row.speedup for row in rows if row.speedup is not None]
    of_families = [speedup for speedups in by_row.values() for speedup in speedups]
    ends = [row.speedup_high for row in rows if row.speedup_high is not None]
    axes.set_xlim(0, style.reach([1.0, *overall, *of_families], ends))
    axes.set_xlim(0, max(_end(axes, row, by_row[row.label]) for row in rows))
    for row in rows:
        _bar(axes, row, places[row.label], by_row[row.label])
    cut = ((places[row.label] + _WHISKER, row.speedup_high or 0.0) for row in rows)
    style.mark_cut(axes, cut, along_x=True)
    for family, marker in zip(families, _DOTS, strict=False):
        _dots(axes, summary.families[family], places, family, marker)
    for number, (start, kind) in enumerate(kinds):
        border = start - 0.5 + _GAP * (number + 0.5)
        axes.axhline(border, color=MUTED, linewidth=0.5, dashes=(2, 2))
        _beside(axes, _WORDS.get(kind, "engine"), border, fontsize=6.5, color=MUTED)
    _dress(axes, places)
    if families:
        style.legend_below(figure, *axes.get_legend_handles_labels(), columns=3)
    return figure


def _bar(axes: Axes, row: Row, place: float, families: Sequence[float]) -> None:
    """A row's bar with its interval and its figures; the families' marks are drawn elsewhere."""
    if row.speedup is None:
        words = "BROKEN" if row.broken else "no speedup"
        axes.text(0.03, place, words, va="center", fontsize=6, color=MUTED, style="italic")
    else:
        unranked = row.peer or row.upper_bound
        colour = (
            style.REFERENCE if row.label == BASELINE else style.PEER if unranked else style.OURS
        )
        axes.barh(place, row.speedup, _BAR, color=colour, edgecolor="white", lw=0, zorder=2)
        _value(axes, row, place, families)
    if row.speedup is not None and row.speedup_low is not None and row.speedup_high is not None:
        whiskers = [[row.speedup - row.speedup_low], [row.speedup_high - row.speedup]]
        axes.errorbar(
            row.speedup,
            place + _WHISKER,
            xerr=whiskers,
            fmt="none",
            ecolor=INK,
            elinewidth=0.9,
            capsize=1.8,
            capthick=0.9,
            zorder=5,
        )
    _beside(axes, formats.number(row.mat), place)


def _value(axes: Axes, row: Row, place: float, families: Sequence[float]) -> None:
    """A bar's own figure, on any shade of bar: at its foot, or beyond all that is drawn of the row
    where that begins there."""
    from matplotlib.patheffects import withStroke

    begin, end = _drawn(row, families)
    edge, share = axes.get_xlim()[1], _share(axes, row)
    beyond = min(end + _DOT_IN / _inches(axes) * edge, (1 - share) * edge)
    axes.annotate(
        formats.ratio(row.speedup),
        (0 if share * edge < begin else beyond, place),
        xytext=(2, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=6,
        color=INK,
        zorder=6,
        path_effects=[withStroke(linewidth=1.4, foreground="white")],
    )


def _end(axes: Axes, row: Row, families: Sequence[float]) -> float:
    """Where the axis has to end for a row's figure to stand beyond all that is drawn of the row:
    now, or farther out. Over an interval that is cut it stands at the axis's end."""
    edge = axes.get_xlim()[1]
    begin, end = _drawn(row, families)
    share = _share(axes, row)
    if row.speedup is None or share * edge < begin or end > edge:
        return edge
    return max(edge, end / (1 - share - _DOT_IN / _inches(axes)))


def _drawn(row: Row, families: Sequence[float]) -> tuple[float, float]:
    """From where to where a row's interval and marks go, its bar's end among them."""
    seen = [row.speedup or 0.0, *families]
    seen += [at for at in (row.speedup_low, row.speedup_high) if at is not None]
    return min(seen), max(seen)


def _share(axes: Axes, row: Row) -> float:
    """The share of the axis that a bar's figure takes."""
    return (style.width_of([formats.ratio(row.speedup)], style.SMALL) + 0.08) / _inches(axes)


def _inches(axes: Axes) -> float:
    return float(axes.bbox.width / axes.figure.dpi)


def _beside(axes: Axes, word: str, place: float, **look: Any) -> None:
    """A word in the column at the right."""
    axes.annotate(
        word,
        (1, place),
        xycoords=("axes fraction", "data"),
        xytext=(24, 0),
        textcoords="offset points",
        ha="right",
        va="center_baseline",
        **look,
    )


def _dots(
    axes: Axes, rows: tuple[Row, ...], places: dict[str, float], family: str, marker: str
) -> None:
    shown = [
        row
        for row in rows
        if row.speedup is not None and row.label in places and row.label != BASELINE
    ]
    axes.scatter(
        [row.speedup for row in shown if row.speedup is not None],
        [places[row.label] + _DOT for row in shown],
        s=8,
        marker=marker,
        facecolor="white",
        edgecolor=INK,
        linewidth=0.45,
        zorder=4,
        label=family.replace("_", " "),
    )


def _dress(axes: Axes, places: dict[str, float]) -> None:
    axes.set_ylim(max(places.values()) + 0.6, -0.6)
    style.strip(axes, "bottom")
    style.name_rows(axes, list(places), list(places.values()))
    axes.xaxis.set_major_formatter(style.as_ratio)
    style.name_x(axes, "speedup over vanilla, 95% interval")
    _beside(axes, "MAT", -0.82, fontsize=6.5, color=MUTED)
