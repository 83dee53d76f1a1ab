"""MAT against the prompts seen, a panel a method that learns from one prompt for the next.

A point is the MAT of some neighbouring prompts of a pass, with the 95% interval that a ratio of
sums over them has (linearised, Student's t). Prompts differ: where the grey lines, of methods that
forget every prompt, rise as well, the prompts became easier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEWEST, _SHARE = 6, 5
"""Prompts of a point: at least so many, and one in so many of all."""


@dataclass(frozen=True, slots=True)
class Point:
    """MAT of neighbouring prompts. place: the mean of theirs, from 1. low, high: of the interval;
    every prompt counts once, with its turns and passes together."""

    place: float
    mat: float
    low: float
    high: float


def points(cells: Cells, label: str) -> list[Point]:
    """A row's points along a pass; none where there are too few prompts for two apart."""
    places: dict[int, dict[str, int]] = {}  # of each pass: prompts in the order of their outputs
    sums: dict[tuple[int, str], list[int]] = {}
    for record in cells.records[label]:
        of_pass = places.setdefault(record.pass_, {})
        place = of_pass.setdefault(record.prompt_id, len(of_pass) + 1)
        if record.steps is not None:
            held = sums.setdefault((place, record.prompt_id), [0, 0])
            held[0] += sum(record.steps.committed)
            held[1] += len(record.steps.committed)
    known = sorted((place, n, steps) for (place, _), (n, steps) in sums.items() if steps)
    width = max(_FEWEST, len(known) // _SHARE)
    if len(known) < 2 * width:
        return []
    return [_point(known[first : first + width]) for first in range(len(known) - width + 1)]


def _point(prompts: Sequence[tuple[int, int, int]]) -> Point:
    """Of prompts' places, committed tokens and steps."""
    from scipy.stats import t

    n, steps = len(prompts), sum(each[2] for each in prompts)
    mat = sum(each[1] for each in prompts) / steps
    squares = sum((committed - mat * own) ** 2 for _, committed, own in prompts)
    half = float(t.ppf(0.975, n - 1)) * sqrt(squares * n / (n - 1)) / steps
    return Point(sum(each[0] for each in prompts) / n, mat, mat - half, mat + half)


def draw(cells: Cells) -> Figure | None:
    """The figure; None where no row learns from prompt to prompt, or prompts are few."""
    drafting = [row for row in cells.summary.rows if row.acceptance_rate is not None]
    if not any(row.order_matters for row in drafting):
        return None
    lines = {row.label: found for row in drafting if (found := points(cells, row.label))}
    learning = [row.label for row in drafting if row.order_matters and row.label in lines]
    if not learning:
        return None
    drawn = panels(learning, 3, 0.8, 0.02)
    forgetting = [row.label for row in drafting if not row.order_matters and row.label in lines]
    ends = [end for label in learning for p in lines[label] for end in (p.low, p.high)]
    ends += [p.mat for label in forgetting for p in lines[label]]
    last = max(p.place for found in lines.values() for p in found)
    for label, axes in drawn.axes.items():
        for other in forgetting:
            axes.plot(*_line(lines[other]), color=style.BAND, lw=0.5, zorder=1)
        x, y = _line(lines[label])
        low, high = [p.low for p in lines[label]], [p.high for p in lines[label]]
        axes.fill_between(x, low, high, color=style.OURS, alpha=0.3, lw=0, zorder=2)
        axes.plot(x, y, color=style.INK, lw=0.9, zorder=3)
        axes.set(xlim=(0, 1.04 * last), ylim=(max(0, min(ends) - 0.1), 1.02 * max(ends)))
        axes.locator_params(nbins=4)
    drawn.finish("place of the prompts in the pass", "MAT", 0.02)
    return drawn.figure


def _line(found: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [p.place for p in found], [p.mat for p in found]
