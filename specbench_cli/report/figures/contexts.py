"""Speedup against the length of the context, a panel a method.

Outputs are put into groups of equal size by their mean context (the prompt and half the output);
the decode speedup of each group has the interval that the table's has. Prompts of one length are
often of one family: the figure shows what goes together, not what is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import Point, Series, panels
from specbench_cli.store.schema import Record
from specbench_cli.summary.pairing import decode
from specbench_cli.summary.speedups import Speedup, speedups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GROUPS, _FEWEST, _SPREAD = 4, 6, 1.5
"""At most so many groups of at least so many questions, if their contexts differ by this factor."""
_RESAMPLES = 999


@dataclass(frozen=True, slots=True)
class Group:
    """Outputs of about one context. context: their mean one, in tokens."""

    context: float
    speedups: dict[str, Speedup]


def groups(cells: Cells) -> list[Group]:
    """The groups of a run, by context; none where all contexts are alike."""
    contexts = {
        (r.prompt_id, r.turn): cells.prompt_tokens[r.prompt_id, r.turn] + (r.n_tokens or 0) / 2
        for r in cells.baseline
        if (r.prompt_id, r.turn) in cells.prompt_tokens
    }
    ordered = sorted(contexts, key=lambda output: (contexts[output], output))
    count = min(_GROUPS, len(ordered) // _FEWEST)
    parts = [ordered[len(ordered) * i // count :][: len(ordered) // count] for i in range(count)]
    means = [sum(contexts[output] for output in part) / len(part) for part in parts]
    if count < 2 or means[-1] < _SPREAD * means[0]:
        return []
    labels = [cells.baseline[0].label, *(row.label for row in cells.sped)]
    found = []
    for mean, part in zip(means, map(set, parts), strict=True):
        own = {label: _of(cells.records[label], part) for label in labels}
        found.append(Group(mean, speedups(own, decode, _RESAMPLES).of))
    return found


def draw(cells: Cells) -> Figure | None:
    """The figure; None where contexts are alike or nothing has a decode speedup."""
    found = groups(cells)
    shown = [row.label for row in cells.sped if sum(_known(g, row.label) for g in found) > 1]
    if not shown:
        return None
    drawn = panels(shown, 3, 0.8, 0.02)
    sped = [group.speedups[label] for group in found for label in shown]
    top = style.reach([1.0, *(s.ratio or 0.0 for s in sped)], [_ends(s)[1] for s in sped])
    for label, axes in drawn.axes.items():
        axes.axhline(1, color=style.INK, lw=0.5, zorder=1)
        for other in shown:
            x, y = _line(found, other)
            axes.plot(x, y, color=style.BAND, lw=0.5, zorder=1)
        _own(axes, found, label)
        axes.set(ylim=(0, top), xlim=(0, 1.08 * found[-1].context))
        own = [(group.context, group.speedups[label]) for group in found if _known(group, label)]
        style.mark_cut(axes, [(context, _ends(speedup)[1]) for context, speedup in own])
        axes.yaxis.set_major_formatter(style.as_ratio)
        axes.locator_params(nbins=4)
    drawn.finish("context (tokens)", "decode speedup", 0.02)
    return drawn.figure


def _own(axes: Axes, found: Sequence[Group], label: str) -> None:
    known = [(g.context, g.speedups[label]) for g in found if _known(g, label)]
    points = [Point(x, s.ratio or 0.0, *_ends(s)) for x, s in known]
    Series(points=points, colour=style.INK, face=style.OURS, edge=0.5, size=3.2).draw(axes)


def _line(found: Sequence[Group], label: str) -> tuple[list[float], list[float]]:
    known = [group for group in found if _known(group, label)]
    return [g.context for g in known], [g.speedups[label].ratio or 0.0 for g in known]


def _known(group: Group, label: str) -> bool:
    return group.speedups[label].ratio is not None


def _ends(speedup: Speedup) -> tuple[float, float]:
    """Of the interval; the speedup itself where there is none."""
    ratio = speedup.ratio or 0.0
    return speedup.low or ratio, speedup.high or ratio


def _of(records: Sequence[Record], outputs: set[tuple[str, int]]) -> list[Record]:
    return [r for r in records if (r.prompt_id, r.turn) in outputs]
