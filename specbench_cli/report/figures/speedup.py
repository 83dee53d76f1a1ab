"""Main figure of a report: speedup of each method over vanilla, with its interval.

A bar is the speedup over all prompts. Marks are the speedups of single task families. Lossy methods
are not in this figure but in `frontier.py`, together with their loss of accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.drawing.style import MUTED
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary import formats, text
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary

_ROW_IN, _BAR = 0.225, 0.7
"""Height of a row in inches, and of its bar in rows."""
_WHISKER, _DOT = -0.13, 0.17
"""Vertical offsets of the interval and of the family marks from the middle of a bar, in rows."""
_TEXT_IN, _DOT_IN = 0.08, 0.03
"""Space around the text of a bar, and between a mark and the text, in inches."""
_GAP = 0.7
"""Space between sections in rows."""
_SECTION_LABELS = {text.RUN_SCOPE: "run"}
"""Title of a section -> short label next to its border. Other sections get "engine"."""


def draw(summary: Summary) -> plots.Figure | None:
    """Return the figure, or None if no lossless method has a speedup."""
    rows = [(row, row.speedup) for row in summary.lossless if row.speedup is not None]
    if not rows:
        return None
    kinds = text.sections(summary.lossless)
    places = {
        row.label: place + _GAP * sum(start <= place for start, _ in kinds)
        for place, row in enumerate(summary.lossless)
    }
    families = _families(summary, places)
    edge, values = _values(rows, places, [point for own in families for point in own.points])
    whiskers = [
        plots.PlotPoint(speedup, places[row.label] + _WHISKER, row.speedup_low, row.speedup_high)
        for row, speedup in rows
        if row.speedup_low is not None and row.speedup_high is not None
    ]
    marks: list[plots.Mark] = [
        *(plots.PlotBars([_bar(places[row.label], speedup)], _colour(row))
          for row, speedup in rows),
        *(plots.Note("BROKEN" if row.broken else "no speedup", 0.03, places[row.label], 6, MUTED)
          for row in summary.lossless if row.speedup is None),
        *(plots.right_note(formats.number(row.mat), places[row.label]) for row in summary.lossless),
        plots.RuleLine(x=1),
        plots.PlotSeries(whiskers, style.Look(marker="", line="", zorder=5), horizontal=True),
        *families,
        *values,
    ]  # fmt: skip
    for number, (start, kind) in enumerate(kinds):
        border = start - 0.5 + _GAP * (number + 0.5)
        marks.append(plots.RuleLine(y=border, colour=MUTED, line=(0, (2, 2))))
        marks.append(plots.right_note(_SECTION_LABELS.get(kind, "engine"), border, 6.5, MUTED))
    if (floor := summary.noise_floor) is not None:
        marks.insert(0, plots.RuleLine(x=1 - floor, to=1 + floor, colour=style.BAND))
    x = plots.Axis("speedup over vanilla, 95% interval", 0, edge, style.format_ratio)
    return plots.row_plot([*places.items()], [plots.Panel(marks, x)], _ROW_IN, heading="MAT")


def _bar(place: float, speedup: float) -> plots.BarBox:
    return plots.BarBox(0, place - _BAR / 2, speedup, _BAR)


def _colour(row: MethodSummary) -> str:
    if row.label == BASELINE:
        return style.REFERENCE
    return style.PEER if row.peer or row.upper_bound else style.OURS


def _families(summary: Summary, places: Mapping[str, float]) -> list[plots.PlotSeries]:
    """Return the marks of each task family, or [] if there is only one family."""
    found = []
    for place, (family, rows) in enumerate(summary.families.items()):
        plotted = [row for row in rows if row.label in places and row.label != BASELINE]
        points = [
            plots.PlotPoint(row.speedup, places[row.label] + _DOT)
            for row in plotted
            if row.speedup is not None
        ]
        found.append(plots.PlotSeries(points, style.family_look(place), family.replace("_", " ")))
    return found if len(found) > 1 else []


def _values(
    rows: Sequence[tuple[MethodSummary, float]],
    places: Mapping[str, float],
    dots: Sequence[plots.PlotPoint],
) -> tuple[float, list[plots.Note]]:
    """Return the end of the x axis, and the text of each bar.

    The text is at the left end inside the bar. If a mark would cover the text there, it is placed
    to the right of all marks.
    """
    wide = plots.row_width(list(places), with_right_column=True)
    ends = [row.speedup_high for row, _ in rows if row.speedup_high is not None]
    edge = style.speedup_axis_end([1.0, *(at for _, at in rows), *(dot.x for dot in dots)], ends)
    found = []
    for row, speedup in rows:
        own = [dot.x for dot in dots if dot.y == places[row.label] + _DOT]
        ends_of_marks = [
            at for at in (speedup, row.speedup_low, row.speedup_high, *own) if at is not None
        ]
        value = formats.ratio(speedup)
        share = (style.text_width([value], style.SMALL) + _TEXT_IN) / wide
        found.append((value, places[row.label], share, min(ends_of_marks), max(ends_of_marks)))
    gap = _DOT_IN / wide
    edge = max(
        last / (1 - share - gap) if first <= share * edge and last <= edge else edge
        for _, _, share, first, last in found
    )
    notes = []
    for value, place, share, first, last in found:
        at = 0.0 if share * edge < first else min(last + gap * edge, (1 - share) * edge)
        notes.append(plots.Note(value, at, place, 6, offset=(2, 0), halo=1.4))
    return edge, notes
