"""The plot of trends: a panel a row, each run's value relative to the series' median."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from specbench_cli.comparison.pages import words
from specbench_cli.comparison.trend import ACCEPTANCE, BAD, MAT, SPEEDUP, Series, Trends
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PANELS = 12
"""Of a page."""
_NAMES = {SPEEDUP: "speedup", MAT: "mat", ACCEPTANCE: "acceptance"}
"""The figures that are plotted, and the words of their files."""
_LEAST_REACH = 0.05
"""Of the y axis: less than that is no news, and is not blown up."""
_ROOM = 1.5
"""Of the farthest level."""
_WITHIN = 0.98
"""Of the runs are within the axes; the others are drawn at their edge."""
_LEGEND_IN = 0.14
_CHANGED = "#D55E00"


def write(trends: Trends, folder: Path) -> list[Path]:
    """Write `trend-<figure>[-<page>]` .svg and .png for every figure that is not the same in all
    runs; rows of which it is the same are left out, there is nothing to see."""
    files = []
    with style.applied():
        for figure, name in _NAMES.items():
            shown = [s for s in trends.series if s.figure == figure and len(set(s.known)) > 1]
            pages = [shown[i : i + PANELS] for i in range(0, len(shown), PANELS)]
            for number, page in enumerate(pages, start=1):
                tail = f"-{number}" if len(pages) > 1 else ""
                files += style.write(draw(trends, page), folder, f"trend-{name}{tail}")
    return files


def draw(trends: Trends, page: Sequence[Series]) -> Figure:
    """One page: panels of one figure on the same axes; at least one series."""
    titles = _titles(trends, page)
    reach = _reach(page)
    grid = panels(list(titles), columns=3, ratio=0.7, below=_LEGEND_IN)
    bad = {series.key: series.values for series in trends.series if series.figure == BAD}
    for title, series in titles.items():
        axes = grid.axes[title]
        _panel(axes, series, bad.get(series.key, ()), reach)
        axes.set(ylim=(-1.1 * reach, 1.1 * reach), xlim=(0.4, len(trends.runs) + 0.6))
        axes.locator_params(axis="x", integer=True, nbins=5)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")
    first, newest = (run.created_utc[:10] for run in (trends.runs[0], trends.runs[-1]))
    grid.finish(f"{page[0].figure} of runs, {first} to {newest}", "% off the median", _LEGEND_IN)
    looks = _looks()
    style.legend_below(grid.figure, looks, [str(look.get_label()) for look in looks], columns=5)
    return grid.figure


def _panel(axes: Axes, series: Series, bad: Sequence[float | None], reach: float) -> None:
    """A series: its runs, its levels, its change points. What is beyond `reach` is at the edge."""
    middle = median(series.known) or 1.0
    places = [i for i, value in enumerate(series.values) if value is not None]
    away = [value / middle - 1 for value in series.known]
    run, _, change, wrong, beyond = _looks()
    points = [
        (i + 1, max(-reach, min(reach, y)), abs(y) > reach, _ill(bad, i))
        for i, y in zip(places, away, strict=True)
    ]
    for look, own in (
        (run, [p for p in points if not p[2]]),
        (beyond, [p for p in points if p[2]]),
        (wrong, [p for p in points if p[3]]),
    ):
        axes.plot([p[0] for p in own], [p[1] for p in own], **_as(look))
    for point in series.changes:
        axes.axvline((point.last + point.first) / 2 + 1, color=change.get_color(), lw=0.9, ls="--")
    ends = [0, *(point.first for point in series.changes), len(series.values)]
    for start, end in pairwise(ends):
        part = [value for value in series.values[start:end] if value is not None]
        level = median(part) / middle - 1
        axes.plot([start + 0.6, end + 0.4], [level, level], color=style.INK, lw=0.8, zorder=2)


def _ill(bad: Sequence[float | None], run: int) -> bool:
    """Whether a run has bad outputs, as far as it is known."""
    return run < len(bad) and bool(bad[run])


def _looks() -> list[Line2D]:
    """What marks mean: a run, a level, a change point, a run with bad outputs."""
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], ls="", marker="o", ms=2.4, mew=0, color=style.OURS, label="run"),
        Line2D([], [], lw=0.8, color=style.INK, label="level"),
        Line2D([], [], lw=0.9, ls="--", color=_CHANGED, label="change"),
        Line2D([], [], ls="", marker="x", ms=4, mew=0.9, color=_CHANGED, label="bad outputs"),
        Line2D([], [], ls="", marker="D", ms=3, mew=0.6, mfc="w", color=style.OURS, label="beyond"),
    ]


def _as(look: Line2D) -> dict[str, Any]:
    """Points that look like an entry of the legend."""
    return {
        "ls": "",
        "marker": look.get_marker(),
        "ms": look.get_markersize(),
        "mew": look.get_markeredgewidth(),
        "color": look.get_color(),
        "mfc": look.get_markerfacecolor(),
        "clip_on": False,
        "zorder": 3,
    }


def _titles(trends: Trends, page: Sequence[Series]) -> dict[str, Series]:
    """Series by their row, with its newest value; the task is said where there are several."""
    several = len({series.key.task for series in trends.series}) > 1
    return {
        f"{words.name(series) if several else series.key.label}"
        f" {words.figure(series.figure, series.known[-1])}": series
        for series in page
    }


def _reach(page: Sequence[Series]) -> float:
    """How far the y axis goes to either side of the medians: every level has room, and all but a
    few runs have."""
    levels, away = [_LEAST_REACH], [_LEAST_REACH]
    for series in page:
        middle = median(series.known) or 1.0
        ends = [level for point in series.changes for level in (point.before, point.after)]
        levels += [_ROOM * abs(level / middle - 1) for level in ends]
        away += [abs(value / middle - 1) for value in series.known]
    return max(*levels, sorted(away)[int(_WITHIN * (len(away) - 1))])
