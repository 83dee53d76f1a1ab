"""Every figure of a run, declared once: name, data, plot and caption.

To add a figure, declare its panels in a module of this folder and add a `FigureSpec`. The plot
kinds are in `drawing/plots.py`, the data of a run in `FigureData`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli.report.figures import (
    acceptance,
    contexts,
    cost,
    frontier,
    lanes,
    lengths,
    load,
    pareto,
    prompts,
    prompts_seen,
    speedup,
    targets,
    waterfall,
)
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.report.report_data import ReportData
from specbench_cli.summary.pareto import find_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _pareto(data: FigureData) -> Figure | None:
    sweep = find_sweep(data.summary, data.manifest)
    return None if sweep is None else pareto.draw(sweep)


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """Declaration of a figure.

    Attributes:
        name: the name of its files.
        draw: draws it. None for a run without the data for it.
        caption: one sentence about its content.
    """

    name: str
    draw: Callable[[FigureData], Figure | None]
    caption: str


FIGURES = (
    FigureSpec(
        "speedup",
        lambda data: speedup.draw(data.summary),
        "Speedup over vanilla, a bar a method, with its own 95% interval (an arrowhead: it goes"
        " on); marks are families, the grey band is A/A noise. Below a broken line: what learns"
        " over the run, so that its figures depend on the order of the prompts. Lossy rows have a"
        " figure of their own.",
    ),
    FigureSpec(
        "targets",
        targets.draw,
        "Methods and drafts on several targets: speedup over each target's own vanilla, and MAT;"
        " the darker, the higher. Speedups of two targets are ratios over two different times.",
    ),
    FigureSpec(
        "pareto",
        _pareto,
        "What a sweep's rows discard and verify, and their speedup along each parameter, with its"
        " 95% interval (an arrowhead: it goes on).",
    ),
    FigureSpec(
        "frontier",
        lambda data: frontier.draw(data.summary),
        "Lossy rows: accuracy, with the 95% interval of its difference from vanilla's, against"
        " speed. Hollow: as many accepted at random. Grey: vanilla, the draft alone, and lossless"
        " rows.",
    ),
    FigureSpec(
        "waterfall",
        waterfall.draw,
        "Where a speedup comes from and goes: from MAT, what it would be if a step took as long"
        " as a plain forward, down to the measured one.",
    ),
    FigureSpec(
        "cost",
        cost.draw,
        "Tokens a step against the cost of a step; along a grey line the decode speedup is the"
        " same.",
    ),
    FigureSpec(
        "positions",
        acceptance.draw_levels,
        "Acceptance by position: of the steps that drafted a level, the share that accepted it.",
    ),
    FigureSpec(
        "accepted",
        acceptance.draw_counts,
        "How many drafted tokens a step accepts, as a share of steps.",
    ),
    FigureSpec(
        "lengths",
        lengths.draw,
        "Speedup against the number of levels drafted a step, with its 95% interval (an"
        " arrowhead: it goes on).",
    ),
    FigureSpec(
        "load",
        load.draw,
        "Goodput, time to the first token and latency at several arrival rates, with 95%"
        " intervals; times as median (filled) and p99 (hollow). A diamond: from here on arrivals"
        " outrun the row.",
    ),
    FigureSpec(
        "contexts",
        contexts.draw,
        "Decode speedup against the length of the context, with its 95% interval (an arrowhead:"
        " it goes on); grey: the other methods.",
    ),
    FigureSpec(
        "seen",
        prompts_seen.draw,
        "MAT along a pass, of the methods that learn from one prompt for the next: of some"
        " neighbouring prompts, with its 95% interval; grey: the methods that forget, whose lines"
        " say how hard the prompts were.",
    ),
    FigureSpec(
        "prompts",
        prompts.draw,
        "Time of every output against vanilla's on the same prompt; below the line the method is"
        " faster, at the broken line twice as fast.",
    ),
    FigureSpec(
        "lanes",
        lanes.draw,
        "Who computed when in the first steps of one output: a lane a worker; numbers are the"
        " tokens that a step committed.",
    ),
)
"""Every figure, in the order of a report."""
CAPTIONS = {figure.name: figure.caption for figure in FIGURES}


def write_figures(
    data: ReportData, folder: Path, *, paper: bool = False, max_svg_bytes: int = 0
) -> list[Path]:
    """Write `NAME.svg` and `NAME.png` of each figure to `folder`.

    `folder` is created if there is a figure. With `paper`, `NAME.pdf` is written too.

    Args:
        max_svg_bytes: SVG size in bytes above which a PNG is written too.

    Returns:
        The files, in the order of `FIGURES`.
    """
    figure_data, files = FigureData.from_report(data), list[Path]()
    with style.figure_style():
        for each in FIGURES:
            figure = each.draw(figure_data)
            if figure is not None:
                files += style.write(
                    figure, folder, each.name, paper=paper, max_svg_bytes=max_svg_bytes
                )
    return files
