"""Heat map of methods and drafts on several targets.

The figure has one panel for speedup and one for MAT. A field shows its value, and higher values are
darker.
"""

from __future__ import annotations

from collections.abc import Callable

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.summary import formats, metrics
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.unranked import TargetSummaries, group_by_target

_ROW_IN = 0.24
_PANELS: tuple[
    tuple[str, Callable[[MethodSummary], float | None], Callable[[MethodSummary], str]], ...
] = (
    ("speedup", lambda row: row.speedup, metrics.speedup_or_broken),
    ("MAT", lambda row: row.mat, metrics.MAT.format),
)


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if the run has only one target, or no values."""
    found = group_by_target(data.summary, data.manifest.get("targets") or ())
    panels = [panel for each in _PANELS if found and (panel := _panel(found, *each))]
    if found is None or not panels:
        return None
    names = [(row.label, place) for place, row in enumerate(found.rows)]
    return plots.row_plot(names, panels, _ROW_IN, width=style.PAGE_IN)


def _panel(
    found: TargetSummaries,
    title: str,
    value: Callable[[MethodSummary], float | None],
    format_entry: Callable[[MethodSummary], str],
) -> plots.Panel | None:
    """Return the panel of a metric, with one row per method and one column per target.

    Args:
        value: Returns the metric of a method.
        format_entry: Returns the text of a field.

    Returns:
        None if no method has a value.
    """
    rows = [[own.get(row.label) for own in found.targets.values()] for row in found.rows]
    all_values = [value(row) for own in found.targets.values() for row in own.values()]
    values = [each for each in all_values if each is not None]
    if not values:
        return None
    low, span = min(values), (max(values) - min(values)) or 1.0

    def field(row: MethodSummary | None) -> tuple[float | None, str]:
        own = None if row is None else value(row)
        share = None if own is None else (own - low) / span
        return share, formats.NONE if row is None else format_entry(row)

    names = [style.shorten(name) for name in found.targets]
    return plots.heat_map([[field(row) for row in some] for some in rows], names, title=title)
