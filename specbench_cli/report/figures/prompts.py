"""Figure of the time of each output against vanilla's on the same prompt, one panel per method.

Below the line of equal times, the method is faster. The dashed line marks half of vanilla's time.
If two outputs have different lengths, vanilla's time is scaled to the method's number of tokens.
"""

from __future__ import annotations

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData

_EDGE = 1.25
_VECTORS = 500
"""Maximum number of points of a task family that are drawn as vectors. More are rasterized."""
_DECADE = 30
"""If the longest time is less than this times the shortest, the axis has ticks at 1, 2 and 5."""


def times(data: FigureData, label: str) -> list[tuple[str, float, float]]:
    """Return (task family, vanilla's seconds, method's seconds) of each output with both times."""
    found = list[tuple[str, float, float]]()
    for vanilla, own in data.pairs(label):
        if own.ns.total and own.n_tokens and vanilla.ns.total and vanilla.n_tokens:
            scaled = vanilla.ns.total * own.n_tokens / vanilla.n_tokens
            found.append((own.family, scaled / 1e9, own.ns.total / 1e9))
    return found


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if no method has a time together with vanilla."""
    from matplotlib.ticker import LogLocator

    by_row = {row.label: found for row in data.with_speedup if (found := times(data, row.label))}
    if not by_row:
        return None
    ends = [value for found in by_row.values() for _, *pair in found for value in pair]
    low, high = min(ends) / _EDGE, max(ends) * _EDGE
    round_ones = LogLocator(subs=(1, 2, 5) if high < _DECADE * low else (1,)).tick_values(low, high)
    # Omit ticks at the edges of a panel: their labels would overlap the next panel.
    ticks = {at: f"{at:g}" for at in round_ones if low * _EDGE < at < high / _EDGE}
    axis = plots.Axis(low=low, high=high, ticks=ticks, log=True)
    equal = [plots.PlotPoint(low, low), plots.PlotPoint(high, high)]
    half = [plots.PlotPoint(low, low / 2), plots.PlotPoint(high, high / 2)]
    guides = [
        plots.PlotSeries(equal, style.guide_look(style.INK)),
        plots.PlotSeries(half, style.guide_look(style.MUTED, "--")),
    ]
    panels = {}
    for label, found in by_row.items():
        marks = list(guides)
        for place, family in enumerate(data.summary.families):
            own = [plots.PlotPoint(x, y) for name, x, y in found if name == family]
            look, pixels = style.family_look(place), len(own) > _VECTORS
            name = family.replace("_", " ") if len(data.summary.families) > 1 else None
            marks.append(plots.PlotSeries(own, look, name, rasterized=pixels))
        panels[label] = plots.Panel(marks, axis, axis)
    return plots.small_multiples(panels, "vanilla: seconds", "method: seconds", ratio=1.0)
