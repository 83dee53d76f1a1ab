"""Methods and drafts on several targets: a field for each, the darker the higher.

A panel for speedup, where something has one, and one for MAT; each field has its figure in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import Field, heat_map
from specbench_cli.summary import formats, metrics
from specbench_cli.summary.forced import ByTarget, by_target
from specbench_cli.summary.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HIGH_IN, _ENDS_IN = 0.24, 0.42
"""Height of a field, and of what is above and below all of them."""
_GAP_IN, _EDGE_IN = 0.12, 0.06
_PANELS: tuple[tuple[str, Callable[[Row], float | None], Callable[[Row], str]], ...] = (
    ("speedup", lambda row: row.speedup, metrics.speedup_or_broken),
    ("MAT", lambda row: row.mat, metrics.MAT.shown),
)


def draw(cells: Cells) -> Figure | None:
    """The figure; None where there is one target, or no figure."""
    found = by_target(cells.summary, cells.manifest.get("targets") or ())
    panels = [] if found is None else [each for each in _PANELS if _values(found, each[1])]
    if found is None or not panels:
        return None
    names = [row.label for row in found.rows]
    left = style.room_for(names)
    wide = (style.PAGE_IN - left - _EDGE_IN - _GAP_IN * (len(panels) - 1)) / len(panels)
    figure = style.blank(style.PAGE_IN, _HIGH_IN * len(names) + _ENDS_IN)
    for place, (title, value, shown) in enumerate(panels):
        start = left + place * (wide + _GAP_IN)
        axes = style.frame(figure, start, style.PAGE_IN - start - wide, 0.2, _ENDS_IN - 0.2)
        _panel(axes, found, value, shown)
        axes.set_title(title, fontsize=7, pad=3)
        style.name_rows(axes, names if not place else [""] * len(names), range(len(names)))
    return figure


def _panel(
    axes: Axes,
    found: ByTarget,
    value: Callable[[Row], float | None],
    shown: Callable[[Row], str],
) -> None:
    """The fields of a figure: a row a method, a column a target."""
    values = _values(found, value)
    low, span = min(values), (max(values) - min(values)) or 1.0

    def field(there: Row | None) -> Field:
        known = None if there is None else value(there)
        words = formats.NONE if there is None else shown(there)
        return (None if known is None else (known - low) / span), words

    fields = [[field(own.get(row.label)) for own in found.targets.values()] for row in found.rows]
    heat_map(axes, fields, [style.short(name) for name in found.targets])


def _values(found: ByTarget, value: Callable[[Row], float | None]) -> list[float]:
    figures = (value(row) for own in found.targets.values() for row in own.values())
    return [figure for figure in figures if figure is not None]
