"""Figure of MAT against the number of prompts decoded so far, for methods that learn from them.

Each such method has a panel. A point is the MAT of some consecutive prompts, with the 95% interval
of a ratio of sums (linearised, Student's t). Grey lines are methods that do not learn. If the grey
lines rise, too, the later prompts are easier.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData

_MIN_PROMPTS, _MAX_POINTS = 6, 5
"""Minimum number of prompts per point, and maximum number of points that share no prompt."""


def points(data: FigureData, label: str) -> list[plots.PlotPoint]:
    """Return the points of a method, or [] if there are too few prompts for two points.

    x is the mean position of the prompts in a repeat, from 1, and y is their MAT. The turns and
    repeats of a prompt are added, so each prompt counts once.
    """
    positions: dict[int, dict[str, int]] = {}  # repeat -> prompt id -> its position in the repeat
    sums: dict[tuple[int, str], list[int]] = {}
    for record in data.records[label]:
        of_pass = positions.setdefault(record.pass_, {})
        position = of_pass.setdefault(record.prompt_id, len(of_pass) + 1)
        if record.steps is not None:
            totals = sums.setdefault((position, record.prompt_id), [0, 0])
            totals[0] += sum(record.steps.committed)
            totals[1] += len(record.steps.committed)
    prompts = sorted((position, n, steps) for (position, _), (n, steps) in sums.items() if steps)
    width = max(_MIN_PROMPTS, len(prompts) // _MAX_POINTS)
    if len(prompts) < 2 * width:
        return []
    return [_point(prompts[first : first + width]) for first in range(len(prompts) - width + 1)]


def _point(prompts: Sequence[tuple[int, int, int]]) -> plots.PlotPoint:
    """Return the point of some prompts, given as (position, committed tokens, steps)."""
    from scipy.stats import t

    n, steps = len(prompts), sum(each[2] for each in prompts)
    mat = sum(each[1] for each in prompts) / steps
    squares = sum((committed - mat * own) ** 2 for _, committed, own in prompts)
    half = float(t.ppf(0.975, n - 1)) * sqrt(squares * n / (n - 1)) / steps
    return plots.PlotPoint(sum(each[0] for each in prompts) / n, mat, mat - half, mat + half)


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if no method learns across prompts, or prompts are few."""
    drafting = [row for row in data.summary.rows if row.acceptance_rate is not None]
    if not any(row.order_matters for row in drafting):
        return None
    lines = {row.label: found for row in drafting if (found := points(data, row.label))}
    learning = [row.label for row in drafting if row.order_matters and row.label in lines]
    if not learning:
        return None
    without_memory = [row.label for row in drafting if not row.order_matters and row.label in lines]
    ends = [end for label in learning for p in lines[label] for end in (p.low, p.high)]
    ends += [p.y for label in without_memory for p in lines[label]]
    heights = [end for end in ends if end is not None]
    last = max(p.x for found in lines.values() for p in found)
    x = plots.Axis(low=0, high=1.04 * last, bins=4)
    y = plots.Axis(low=max(0, min(heights) - 0.1), high=1.02 * max(heights), bins=4)
    guides = [plots.PlotSeries(lines[label], style.guide_look()) for label in without_memory]
    look = style.Look(marker="")
    panels = {
        label: plots.Panel([*guides, plots.PlotSeries(lines[label], look, band=True)], x, y)
        for label in learning
    }
    return plots.small_multiples(panels, "position of the prompts in the repeat", "MAT", ratio=0.8)
