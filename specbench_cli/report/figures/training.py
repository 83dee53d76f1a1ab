"""Figures of `specbench train`: loss curves, calibration, and comparison of draft losses."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from specbench_cli import files
from specbench_cli.report.figures.drawing import plots, style

if TYPE_CHECKING:
    from specbench_cli.training.acceptance import Bin
    from specbench_cli.training.align import EstimatePairs


def draw_curves(facts: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draw the loss curves of trainings, and the MAT of heads on held-out replies."""
    losses, mats = list[plots.Mark](), list[plots.Mark]()
    for at, (name, fact) in enumerate(facts.items()):
        curve = [plots.PlotPoint(point["tokens"] / 1e6, point["loss"]) for point in fact["curve"]]
        losses.append(plots.PlotSeries(curve, style.series_look(at, marker=""), name))
        if fact.get("mat"):
            step = fact["tokens"] / fact["steps"] / 1e6
            points = [plots.PlotPoint(point["step"] * step, point["mat"]) for point in fact["mat"]]
            mats.append(plots.PlotSeries(points, style.series_look(at, size=2.4), name))
    x, y = plots.Axis("training tokens (millions)"), "MAT of chains on held-out replies"
    stacks = [[plots.Panel(losses, x, plots.Axis("training loss (nats/token)", log=True))]]
    stacks += [[plots.Panel(mats, x, plots.Axis(y))]] if mats else []
    _write(path, *stacks, width=style.PAGE_IN if mats else style.COLUMN_IN)


def draw_calibration(bins: Sequence[Bin], rejection_weight: float, path: Path) -> None:
    """Draw the observed acceptance rate of an acceptance head against the predicted one."""
    shares = [at / 100 for at in range(101)]
    equal = [plots.PlotPoint(share, share) for share in shares]
    best = [plots.PlotPoint(s / (s + rejection_weight * (1 - s)), s) for s in shares]
    marks = [
        plots.PlotSeries(equal, style.guide_look(style.MUTED, width=0.8), "equal"),
        plots.PlotSeries(best, style.guide_look(style.MUTED, "--", 0.8), "minimum of the loss"),
        plots.PlotSeries(
            [plots.PlotPoint(b.predicted, b.labelled) for b in bins], style.series_look(0)
        ),
    ]
    x, y = (
        plots.Axis(name, 0, 1) for name in ("predicted probability of acceptance", "observed share")
    )
    _write(path, [plots.Panel(marks, x, y, height=3.0)])


def draw_alignment(outcomes: Mapping[str, EstimatePairs], path: Path) -> None:
    """Draw alpha and MAT of drafts trained with different losses: each seed, and the mean."""
    from specbench_cli.training.align import FIGURES, compute_half_width

    stacks, names = [], {float(at): name for at, name in enumerate(outcomes)}
    for figure in FIGURES[:2]:
        start = mean(getattr(begin, figure) for seeds in outcomes.values() for begin, _ in seeds)
        marks: list[plots.Mark] = [
            plots.RuleLine(y=start, colour=style.MUTED, width=0.8, line="--", label="before")
        ]
        for at, seeds in enumerate(outcomes.values()):
            after = [getattr(end, figure) for _, end in seeds]
            middle, half = mean(after), compute_half_width(after)
            ends = () if half is None else (middle - half, middle + half)
            points = [plots.PlotPoint(at, value) for value in after]
            marks.append(plots.PlotSeries(points, style.Look(style.BAND, line="", size=2.4)))
            marks.append(
                plots.PlotSeries([plots.PlotPoint(at + 0.2, middle, *ends)], style.series_look(0))
            )
        x = plots.Axis("loss", ticks=names, rotated=True)
        stacks.append([plots.Panel(marks, x, plots.Axis("MAT" if figure == "mat" else figure))])
    _write(path, *stacks, width=style.PAGE_IN)


def _write(path: Path, *stacks: Sequence[plots.Panel], width: float = style.COLUMN_IN) -> None:
    """Draw panels and write them to a file, in the format of its suffix."""
    content = io.BytesIO()
    with style.figure_style():
        figure = plots.page(*stacks, width=width)
        figure.savefig(content, format=path.suffix.removeprefix("."), dpi=200)
    files.write_listed(path, content.getvalue())
