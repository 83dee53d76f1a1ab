"""Plot of scaling laws, with one column per kind of size, such as training tokens or layers.

Each column shows the points, lines and residuals of each figure, such as MAT. A hollow mark with an
interval is the prediction of the largest size from the smaller ones. It is drawn to the right of
the measured point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite, log10

from recipes.studies.laws import ScalingLaw
from recipes.studies.numbers import short
from recipes.studies.points import FIGURES, SIZES
from specbench_cli.report.figures.drawing import plots, style

_LAW_IN, _OFF_IN = 1.7, 0.9
_ASIDE, _MARGIN = 1.05, 1.15
"""Factors of the x position: of a prediction against its point, and of the axis ends against the
smallest and largest size."""


def draw(laws: Sequence[ScalingLaw]) -> plots.Figure:
    """Return the figure, as wide as a page with two columns."""
    looks = {
        where: style.series_look(at)
        for at, where in enumerate(dict.fromkeys(law.where for law in laws))
    }
    stacks = []
    for size in (name for name in SIZES if any(law.along == name for law in laws)):
        stack = list[plots.Panel]()
        for figure in FIGURES:
            own = [law for law in laws if (law.figure, law.along) == (figure, size)]
            stack += _panels(own, FIGURES[figure][0], SIZES[size], looks) if own else []
        stacks.append(stack)
    return plots.page(*stacks, width=style.PAGE_IN)


def _panels(
    laws: Sequence[ScalingLaw], figure: str, size: str, looks: Mapping[str, style.Look]
) -> list[plots.Panel]:
    """Return two panels of the plot: the laws of one figure (such as MAT), and their residuals."""
    seen = sorted({x for law in laws for x, _ in law.points})
    low, high = seen[0] / _MARGIN, seen[-1] * _MARGIN
    x = plots.Axis("", low, high, ticks={at: short(at) for at in seen}, log=True)
    lines = [mark for law in laws for mark in _line_series(law, looks[law.where])]
    off = [
        plots.PlotSeries(
            [plots.PlotPoint(size, y - _value_at(law, size)) for size, y in law.points],
            replace(looks[law.where], line="", size=3),
        )
        for law in laws
    ]
    zero = plots.RuleLine(y=0, colour=style.MUTED, width=0.6)
    return [
        plots.Panel(lines, x, plots.Axis(figure), height=_LAW_IN),
        plots.Panel([zero, *off], replace(x, name=size), plots.Axis("residual"), height=_OFF_IN),
    ]


def _value_at(law: ScalingLaw, size: float) -> float:
    """Return the figure (such as MAT) that a scaling law predicts at a size."""
    return law.fit.a.value + law.fit.b.value * log10(size)


def _line_series(law: ScalingLaw, look: style.Look) -> Iterator[plots.PlotSeries]:
    """Yield the line of a scaling law, its points, and its prediction for the held-out largest
    size.
    """
    ends = [plots.PlotPoint(at, _value_at(law, at)) for at in (law.fit.smallest, law.fit.largest)]
    yield plots.PlotSeries(ends, replace(look, marker=""))
    points = [plots.PlotPoint(x, y) for x, y in law.points]
    yield plots.PlotSeries(points, replace(look, line="", size=3), law.where or "all")
    if law.held_out is not None:
        said = law.held_out.predicted
        known = isfinite(said.low) and isfinite(said.high)
        interval = (said.low, said.high) if known else ()
        point = plots.PlotPoint(law.held_out.size * _ASIDE, said.value, *interval)
        yield plots.PlotSeries([point], replace(look, face="white", line=""))
