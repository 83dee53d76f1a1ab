"""Figure of a parameter sweep: discard rate against verification rate, and speedup.

The left panel shows the two rates, with the value of the parameter at each point. There is one
right panel per swept parameter, with the speedup against its value. The figure is 174 mm wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

from specbench_cli.config.document import parse_scalar
from specbench_cli.config.sweep import format_value
from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.drawing.labels import PointLabel
from specbench_cli.summary.pareto import Sweep, is_number, is_ranked
from specbench_cli.summary.pareto import SweepPoint as SweepPoint

_FRONT = "#b5b5b5"

Lines = dict[str, list[SweepPoint]]
"""Name of a line -> its points."""


def draw(sweep: Sweep) -> plots.Figure | None:
    """Return the figure, or None if no lossless method of the sweep has known rates."""
    series: Lines = {}
    for point in sweep.points:
        known = point.row.discard_rate is not None and point.row.verification_rate is not None
        if known and point.row.lossless:  # the figure "frontier" shows lossy methods
            series.setdefault(point.series, []).append(point)
    if not any(point.along for points in series.values() for point in points):
        return None
    swept = list(dict.fromkeys(p.along for own in series.values() for p in own if p.along))
    times = [_times(name, series) for name in swept]
    return plots.page([_rates(series)], times, width=style.PAGE_IN, columns=4)


def _rates(series: Lines) -> plots.Panel:
    """Return the left panel: discard and verification rates of the methods.

    If a method that is not swept has a far larger discard rate, it is drawn at the right edge, with
    its rate as text. Otherwise the lines would be too narrow.
    """
    edge = _PANEL_MARGIN * max(
        _rate(p).x for points in series.values() for p in points if _sets_panel_width(p)
    )
    front = sorted(_rate(p) for points in series.values() for p in points if p.front)
    steps = [corner for a, b in pairwise(front) for corner in (a, a._replace(x=b.x))]
    marks, words = list[plots.Mark](), list[PointLabel]()
    look = style.guide_look(_FRONT, width=2.2)
    marks.append(plots.PlotSeries([*steps, *front[-1:]], look, "Pareto front"))
    for at, (name, points) in enumerate(series.items()):
        colour = style.series_look(at).colour
        line = [_rate(p) for p in points if p.along and is_number(p.swept[p.along])]
        marks.append(plots.PlotSeries(line, style.guide_look(colour, width=0.9)))
        for hollow, label in ((False, name), (True, f"{name} (not ranked)")):
            own = [_rate(p) for p in points if is_ranked(p.row) is not hollow]
            own = [p._replace(x=min(p.x, edge)) if edge else p for p in own]
            look = style.series_look(at, hollow=hollow, line="", size=4.1, edge=0.9)
            marks += [plots.PlotSeries(own, look, label)] if own else []
        for p in points:
            x, y, *_ = _rate(p)
            far = not p.along and x > edge > 0
            text = format_value(p.swept[p.along]) if p.along else f"at {x:.2g}" if far else ""
            words.append(PointLabel(text, (edge if far else x, y), colour))
    return plots.Panel(
        marks,
        plots.Axis("discard rate (drafted, not accepted / generated)"),
        plots.Axis("verification rate\n(target forwards / generated)"),
        point_labels=words,
        height=2.7,
    )


_MAX_TICKS = 12
"""Maximum number of labelled numbers on an axis. Values that are words are always labelled."""
_PANEL_MARGIN = 1.15
"""Width of the left panel relative to the largest discard rate of the swept methods."""


def _sets_panel_width(point: SweepPoint) -> bool:
    """Return True if the x axis of the left panel must include a point."""
    return point.along is not None or point.front


def _times(name: str, series: Lines) -> plots.Panel:
    """Return a right panel: speedup against the value of a parameter.

    If no method has a speedup, the panel shows ms per token.
    """
    lines = [(at, own) for at, own in enumerate(series.values()) if own[0].along == name]
    points = [p for _, own in lines for p in own]
    has_speedup = any(p.row.speedup is not None for p in points)
    places = _axis_positions([p.swept[name] for p in points])
    marks, plotted = list[plots.Mark](), list[plots.PlotPoint]()
    if has_speedup:
        vanilla = plots.Note("vanilla", None, 1, 6, style.MUTED, (2, 0))
        marks += [plots.RuleLine(y=1, width=0.6), vanilla]
    for shift, (at, own) in enumerate(lines):
        offset = 0.008 * max(places.values()) * (shift - (len(lines) - 1) / 2)
        for number, ranked in product((True, False), (True, False)):
            known = [
                point
                for p in own
                if (is_number(p.swept[name]), is_ranked(p.row)) == (number, ranked)
                and (point := _time(p, places[format_value(p.swept[name])] + offset, has_speedup))
                is not None
            ]
            look = style.series_look(at, hollow=not ranked, line="-" if number and ranked else "")
            marks.append(plots.PlotSeries(known, look))
            plotted += known
    numbers = [word for word in places if is_number(parse_scalar(word))]
    labelled = set(numbers[:: 1 + len(places) // _MAX_TICKS]) | (places.keys() - set(numbers))
    ticks = {place: word for word, place in places.items() if word in labelled}
    x = plots.Axis(name, ticks=ticks, rotated=any(len(word) > 5 for word in ticks.values()))
    if not has_speedup:
        return plots.Panel(marks, x, plots.Axis("ms/token (median)"))
    top = style.speedup_axis_end([1.0, *(p.y for p in plotted)], [p.high or p.y for p in plotted])
    low = 0.98 * min(1.0, *(p.low or p.y for p in plotted))
    return plots.Panel(marks, x, plots.Axis("speedup (95% interval)", low, top, style.format_ratio))


def _axis_positions(values: Sequence[Any]) -> dict[str, float]:
    """Return value as text -> position on the axis. Words are placed after the numbers."""
    numbers = sorted({value for value in values if is_number(value)})
    gaps = sorted(b - a for a, b in pairwise(numbers))
    step = gaps[len(gaps) // 2] if gaps else 1.0
    found = {format_value(value): float(value) for value in numbers}
    end = numbers[-1] if numbers else 0.0
    for word in dict.fromkeys(format_value(value) for value in values if not is_number(value)):
        end += step
        found[word] = end
    return found


def _rate(point: SweepPoint) -> plots.PlotPoint:
    """Return the point of a method in the left panel."""
    assert point.row.discard_rate is not None
    assert point.row.verification_rate is not None
    return plots.PlotPoint(point.row.discard_rate, point.row.verification_rate)


def _time(point: SweepPoint, x: float, has_speedup: bool) -> plots.PlotPoint | None:
    """Return the point of a method in a right panel, with its interval."""
    row = point.row
    height = row.speedup if has_speedup else row.ms_per_token_p50
    if height is None:
        return None
    if not has_speedup or row.speedup_low is None or row.speedup_high is None:
        return plots.PlotPoint(x, height, height, height)
    return plots.PlotPoint(x, height, row.speedup_low, row.speedup_high)
