"""Small panels in rows, one a method, on the same axes: many methods without many colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench_cli.report.figures.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _RIGHT, _BETWEEN, _TITLE, _LINE = 0.46, 0.08, 0.1, 0.17, 0.09
"""Inches; a title's second line takes `_LINE` more."""


@dataclass(frozen=True)
class Panels:
    """A figure and its panels, by label."""

    figure: Figure
    axes: dict[str, Axes]
    outer: dict[str, tuple[bool, bool]]
    """Whether a panel is the first of its row, and the last of its column."""

    def finish(self, x: str, y: str, below: float) -> None:
        """Name the axes once for all panels; inner ones keep their ticks and lose the words."""
        for label, axes in self.axes.items():
            first, last = self.outer[label]
            axes.tick_params(labelleft=first, labelbottom=last)
        height = self.figure.get_size_inches()[1]
        self.figure.supxlabel(x, fontsize=7, x=0.54, y=below / height, va="bottom")
        self.figure.supylabel(y, fontsize=7, x=0.015, y=0.5 * (1 + (below + 0.25) / height))


def panels(labels: Sequence[str], columns: int, ratio: float, below: float) -> Panels:
    """Empty panels.

    Args:
        ratio: height of a panel over its width.
        below: inches left free below the name of the x axis.
    """
    columns = min(columns, len(labels))
    rows = -(-len(labels) // columns)
    inner = style.COLUMN_IN - _LEFT - _RIGHT - _BETWEEN * (columns - 1)
    wide = inner / columns if columns > 1 else inner * 0.75
    high = wide * ratio
    bottom = below + 0.3
    shown = style.named(labels)
    title = _TITLE + _LINE * any("\n" in word for word in shown.values())
    height = rows * (high + title) + bottom
    figure = style.blank(style.COLUMN_IN, height)
    found: dict[str, Axes] = {}
    outer: dict[str, tuple[bool, bool]] = {}
    for place, label in enumerate(labels):
        row, column = divmod(place, columns)
        x = _LEFT + column * (wide + _BETWEEN)
        y = bottom + (rows - 1 - row) * (high + title)
        axes = figure.add_axes(
            (x / style.COLUMN_IN, y / height, wide / style.COLUMN_IN, high / height)
        )
        style.strip(axes, "left", "bottom")
        style.grid(axes)
        word, size = shown[label], style.TINY if "\n" in shown[label] else 6.5
        size = min(size, 0.98 * size * wide / style.width_of([word], size))
        axes.set_title(word, fontsize=max(size, 5), pad=1.5, linespacing=0.9)
        found[label] = axes
        outer[label] = (column == 0, place + columns >= len(labels))
    return Panels(figure, found, outer)
