"""Plot of trends, with one panel per row (a method on a task).

A panel shows the value of each run, relative to the median over the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from specbench_cli.comparison.pages import words
from specbench_cli.comparison.trend import ACCEPTANCE, BAD, MAT, SPEEDUP, Trends, TrendSeries
from specbench_cli.report.figures.drawing import plots, style

PANELS = 12
"""Maximum number of panels on a page."""
_NAMES = {SPEEDUP: "speedup", MAT: "mat", ACCEPTANCE: "acceptance"}
"""Plotted figures and their names in file names."""
_MIN_REACH = 0.05
"""Minimum half height of the y axis, as a relative deviation, so that small changes look small."""
_MARGIN = 1.5
"""Half height of the y axis, relative to the largest deviation of a level (a median)."""
_VISIBLE_SHARE = 0.98
"""Share of runs within the axes; the others are drawn at their edge."""
_CHANGE_COLOUR = "#D55E00"


def write(trends: Trends, folder: Path) -> list[Path]:
    """Write `trend-<metric>[-<page>]` as .svg and .png for every metric that changes between runs.

    Rows that are equal in all runs are left out.
    """
    files = []
    with style.figure_style():
        for figure, name in _NAMES.items():
            shown = [
                s for s in trends.series if s.figure == figure and len(set(s.known_values)) > 1
            ]
            pages = [shown[i : i + PANELS] for i in range(0, len(shown), PANELS)]
            for number, page in enumerate(pages, start=1):
                tail = f"-{number}" if len(pages) > 1 else ""
                files += style.write(draw(trends, page), folder, f"trend-{name}{tail}")
    return files


def draw(trends: Trends, page: Sequence[TrendSeries]) -> plots.Figure:
    """Draw one page. All panels show the same metric and have the same axes.

    Args:
        page: series of the panels; at least one.
    """
    reach = _axis_reach(page)
    bad = {series.key: series.values for series in trends.series if series.figure == BAD}
    x = plots.Axis(low=0.4, high=len(trends.runs) + 0.6, bins=5)
    percent = lambda value, _: f"{100 * value:.3g}"  # noqa: E731 - the form that an axis expects
    y = plots.Axis(low=-1.1 * reach, high=1.1 * reach, tick_format=percent)
    panels = {
        title: plots.Panel(marks=_marks(series, bad.get(series.key, ()), reach), x=x, y=y)
        for title, series in _titles(trends, page).items()
    }
    first, newest = (run.created_utc[:10] for run in (trends.runs[0], trends.runs[-1]))
    name = f"{page[0].figure} of runs, {first} to {newest}"
    return plots.small_multiples(panels, name, "% off the median", ratio=0.7, columns=5)


def _marks(series: TrendSeries, bad: Sequence[float | None], reach: float) -> list[plots.Mark]:
    """Return the marks of a series: its runs, the medians between change points, and change points.

    Args:
        bad: number of errors and mismatches of each run, if known.
        reach: half of the height of the y axis. A run beyond it is drawn at the edge.
    """
    middle = median(series.known_values) or 1.0
    deviations = {
        run: value / middle - 1 for run, value in enumerate(series.values) if value is not None
    }
    inside = [plots.PlotPoint(run + 1, y) for run, y in deviations.items() if abs(y) <= reach]
    beyond = [
        plots.PlotPoint(run + 1, reach if y > 0 else -reach)
        for run, y in deviations.items()
        if abs(y) > reach
    ]
    wrong = [
        plots.PlotPoint(run + 1, max(-reach, min(reach, y)))
        for run, y in deviations.items()
        if run < len(bad) and bad[run]
    ]
    ends = [0, *(point.first for point in series.changes), len(series.values)]
    levels = list[plots.PlotSeries]()
    for start, end in pairwise(ends):
        level = median(y for run, y in deviations.items() if start <= run < end)
        line = [plots.PlotPoint(start + 0.6, level), plots.PlotPoint(end + 0.4, level)]
        levels.append(plots.PlotSeries(line, style.guide_look(style.INK, width=0.8), "level"))
    changes = [(point.last + point.first) / 2 + 1 for point in series.changes]
    return [
        plots.PlotSeries(inside, style.Look(style.OURS, line="", size=2.4, edge=0), "run"),
        *levels,
        *(
            plots.RuleLine(x=x, colour=_CHANGE_COLOUR, width=0.9, line="--", label="change")
            for x in changes
        ),
        plots.PlotSeries(wrong, style.Look(_CHANGE_COLOUR, "x", "", "", 4, 0.9), "bad outputs"),
        plots.PlotSeries(beyond, style.Look(style.OURS, "D", "white", "", 3, 0.6), "beyond"),
    ]


def _titles(trends: Trends, page: Sequence[TrendSeries]) -> dict[str, TrendSeries]:
    """Return the series by panel title.

    A title has the method and the newest value. It has the task, too, if there are several tasks.
    """
    several = len({series.key.task for series in trends.series}) > 1
    return {
        f"{words.row_name(series) if several else series.key.label}"
        f" {words.format_figure(series.figure, series.known_values[-1])}": series
        for series in page
    }


def _axis_reach(page: Sequence[TrendSeries]) -> float:
    """Return half the height of the y axis, so that all medians and nearly all runs are visible."""
    levels, deviations = [_MIN_REACH], [_MIN_REACH]
    for series in page:
        middle = median(series.known_values) or 1.0
        ends = [level for point in series.changes for level in (point.before, point.after)]
        levels += [_MARGIN * abs(level / middle - 1) for level in ends]
        deviations += [abs(value / middle - 1) for value in series.known_values]
    return max(*levels, sorted(deviations)[int(_VISIBLE_SHARE * (len(deviations) - 1))])
