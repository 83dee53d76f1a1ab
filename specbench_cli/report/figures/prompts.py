"""Every output's time against vanilla's on the same prompt, a panel a method.

Below the line of equal times the method is faster; the broken line is twice as fast. Where outputs
differ in length, vanilla's time is scaled to the method's tokens, as in the speedup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.plots import panels
from specbench_cli.store.schema import BASELINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "oDs^vP*X"
_LEGEND_IN = 0.13
_EDGE = 1.25
_VECTORS = 500
"""Points of one family that are drawn as lines; more of them are one picture."""
_DECADE = 30
"""Times that span less have ticks between the powers of ten."""


def times(cells: Cells, label: str) -> list[tuple[str, float, float]]:
    """Family, vanilla's and the method's seconds of every output that both have a time of."""
    reference = {(r.prompt_id, r.turn, r.pass_): r for r in cells.timed(BASELINE)}
    found = list[tuple[str, float, float]]()
    for own in cells.timed(label):
        vanilla = reference.get((own.prompt_id, own.turn, own.pass_))
        if vanilla is None or not (own.ns.total and own.n_tokens):
            continue
        if vanilla.ns.total and vanilla.n_tokens:
            scaled = vanilla.ns.total * own.n_tokens / vanilla.n_tokens
            found.append((own.family, scaled / 1e9, own.ns.total / 1e9))
    return found


def draw(cells: Cells) -> Figure | None:
    """The figure; None where no method is paired with vanilla."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

    by_row = {row.label: found for row in cells.sped if (found := times(cells, row.label))}
    if not by_row:
        return None
    families = list(cells.summary.families)
    legend = _LEGEND_IN * -(-len(families) // 3) + 0.03 if len(families) > 1 else 0.02
    drawn = panels(list(by_row), 3, 1.0, legend)
    ends = [value for found in by_row.values() for _, *pair in found for value in pair]
    low, high = min(ends) / 1.25, max(ends) * 1.25
    round_ones = LogLocator(subs=(1, 2, 5) if high < _DECADE * low else (1,)).tick_values(low, high)
    # A word at a panel's edge would reach into that of the next panel.
    ticks = [value for value in round_ones if low * _EDGE < value < high / _EDGE]
    for label, axes in drawn.axes.items():
        axes.plot([low, high], [low, high], color=style.INK, lw=0.5, zorder=1)
        axes.plot([low, high], [low / 2, high / 2], color=style.MUTED, lw=0.5, ls="--", zorder=1)
        for family, marker in zip(families, _MARKERS, strict=False):
            own = [pair for named, *pair in by_row[label] if named == family]
            axes.scatter(
                [x for x, _ in own],
                [y for _, y in own],
                s=5,
                marker=marker,
                facecolor="white",
                edgecolor=style.INK,
                linewidth=0.4,
                zorder=3,
                label=family.replace("_", " "),
                rasterized=len(own) > _VECTORS,
            )
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator(ticks))
            axis.set_major_formatter(_seconds)
            axis.set_minor_locator(LogLocator(subs=range(2, 10)))
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=1.2, width=0.4)
    drawn.finish("vanilla: seconds", "method: seconds", legend)
    if len(families) > 1:
        handles, labels = next(iter(drawn.axes.values())).get_legend_handles_labels()
        style.legend_below(drawn.figure, handles, labels, columns=3)
    return drawn.figure


def _seconds(value: float, _: object) -> str:
    return f"{value:g}"
