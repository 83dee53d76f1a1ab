"""Figures of acceptance: histograms of accepted tokens per step, and a heat map by draft level.

A level is a position of the draft, counted from 1. The acceptance at level k is (steps that
accepted a token at level k) / (steps that drafted level k). In the heat map, higher shares are
darker.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData

_ROW_IN, _FULL = 0.3, 0.82
"""Height of a histogram row in inches, and height of its tallest bar in rows."""
_LONGEST = 16
"""Number of accepted tokens of the last bar. Steps with more tokens are in the last bar, too."""
_FIELD_HIGH_IN, _FIELD_IN = 0.19, 0.17
"""Height and minimum width of a field in inches. Levels that do not fit are omitted."""


def draw_counts(data: FigureData) -> plots.Figure | None:
    """Return histograms of accepted tokens, or None if no method reports accepted drafts."""
    shares = {row.label: _shares(data, row.label) for row in data.summary.rows}
    shares = {label: own for label, own in shares.items() if own}
    if not shares:
        return None
    longest = max(max(own) for own in shares.values())
    marks: list[plots.Mark] = []
    for place, own in enumerate(shares.values()):
        tallest = max(own.values())
        boxes = [plots.BarBox(n - 0.4, place, 0.8, -_FULL * own[n] / tallest) for n in own]
        marks += [plots.PlotBars(boxes, style.OURS), plots.RuleLine(y=place, width=0.4, zorder=3)]
        marks.append(plots.right_note(f"{tallest:.0%}", place - 0.3))
    numbers = range(0, longest + 1, 1 if longest <= 10 else 4)
    ticks = {float(n): f"{n}+" if n == _LONGEST else str(n) for n in numbers}
    name = "accepted draft tokens per step, share of steps"
    panel = plots.Panel(marks, plots.Axis(name, -0.6, longest + 0.6, ticks=ticks))
    names = [(label, place - 0.3) for place, label in enumerate(shares)]
    return plots.row_plot(names, [panel], _ROW_IN, heading="tallest")


def _shares(data: FigureData, label: str) -> dict[int, float]:
    """Return number of accepted tokens -> share of steps, or {} if the method never drafts."""
    steps = data.steps(label)
    if not any(any(each.levels) for each in steps):
        return {}
    counts = Counter[int]()
    for n, times in Counter(chain.from_iterable(each.accepted for each in steps)).items():
        counts[min(n, _LONGEST)] += times
    return {n: counts[n] / counts.total() for n in sorted(counts)}


def draw_levels(data: FigureData) -> plots.Figure | None:
    """Return the heat map by draft level, or None if no method reports its drafted levels."""
    rates = {r.label: r.acceptance_by_position for r in data.summary.rows}
    rates = {label: own for label, own in rates.items() if own}
    if not rates:
        return None
    deepest = max(map(len, rates.values()))
    wide = plots.row_width(list(rates))
    columns = min(deepest, int(wide / _FIELD_IN))
    cut = f" (the first {columns} of {deepest})" if deepest > columns else ""
    own = [[(rate, f"{100 * rate:.0f}") for rate in some[:columns]] for some in rates.values()]
    points = min(6.5, wide / columns / (1.15 * style.text_width(["100"], 1)))
    names = [str(level) for level in range(1, columns + 1)]
    panel = plots.heat_map(own, names, f"level of the draft{cut}: % accepted", points)
    return plots.row_plot([(label, at) for at, label in enumerate(rates)], [panel], _FIELD_HIGH_IN)
