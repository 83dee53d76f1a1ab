"""Figure of speedup against context length, one panel per method.

Outputs are sorted by their mean context (the prompt and half the output) and divided into bins of
equal size. For each bin, the figure shows the decode speedup with its interval. Prompts of similar
length often belong to one task family, so the figure shows a correlation, not a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.summary.pairing import decode_time
from specbench_cli.summary.speedups import Speedup, compute_speedups

_MAX_BINS, _MIN_QUESTIONS, _MIN_RATIO = 4, 6, 1.5
"""Maximum number of bins, minimum number of questions per bin, and minimum ratio of the mean
contexts of the last and the first bin."""
_RESAMPLES = 999


@dataclass(frozen=True, slots=True)
class ContextBin:
    """A bin of outputs with similar context lengths.

    Attributes:
        context: Mean context in tokens.
        speedups: Label of a method -> decode speedup over the outputs in the bin.
    """

    context: float
    speedups: dict[str, Speedup]


def make_context_bins(data: FigureData) -> list[ContextBin]:
    """Return the bins, shortest context first, or [] if all contexts are similar."""
    contexts = {
        (r.prompt_id, r.turn): data.prompt_tokens[r.prompt_id, r.turn] + (r.n_tokens or 0) / 2
        for r in data.baseline
        if (r.prompt_id, r.turn) in data.prompt_tokens
    }
    ordered = sorted(contexts, key=lambda output: (contexts[output], output))
    count = min(_MAX_BINS, len(ordered) // _MIN_QUESTIONS)
    parts = [ordered[len(ordered) * i // count :][: len(ordered) // count] for i in range(count)]
    means = [sum(contexts[output] for output in part) / len(part) for part in parts]
    if count < 2 or means[-1] < _MIN_RATIO * means[0]:
        return []
    labels = [data.baseline[0].label, *(row.label for row in data.with_speedup)]
    bins = []
    for mean, part in zip(means, map(set, parts), strict=True):
        own = {
            label: [r for r in data.records[label] if (r.prompt_id, r.turn) in part]
            for label in labels
        }
        bins.append(ContextBin(mean, compute_speedups(own, decode_time, _RESAMPLES).by_label))
    return bins


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if contexts are similar or no method has a decode speedup."""
    bins = make_context_bins(data)
    lines = {row.label: _line(bins, row.label) for row in data.with_speedup}
    lines = {label: points for label, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    points = [point for own in lines.values() for point in own]
    top = style.speedup_axis_end([1.0, *(p.y for p in points)], [p.high or p.y for p in points])
    x = plots.Axis(low=0, high=1.08 * bins[-1].context, bins=4)
    y = plots.Axis(low=0, high=top, tick_format=style.format_ratio, bins=4)
    guides: list[plots.Mark] = [
        plots.RuleLine(y=1),
        *(plots.PlotSeries(own, style.guide_look()) for own in lines.values()),
    ]
    look = style.Look(face=style.OURS, edge=0.5, size=3.2)
    panels = {
        label: plots.Panel([*guides, plots.PlotSeries(own, look)], x, y)
        for label, own in lines.items()
    }
    return plots.small_multiples(panels, "context (tokens)", "decode speedup", ratio=0.8)


def _line(bins: Sequence[ContextBin], label: str) -> list[plots.PlotPoint]:
    """Return the points of a method: its speedup in each bin, with the interval."""
    known = [(group.context, group.speedups[label]) for group in bins]
    return [
        plots.PlotPoint(context, own.ratio, own.low or own.ratio, own.high or own.ratio)
        for context, own in known
        if own.ratio is not None
    ]
