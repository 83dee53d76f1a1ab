"""All figures of a report. Each is declared once, with its name, its function and its caption.

To add a figure, write a module in this folder with a function from `FigureData` to a matplotlib
figure, and add a `FigureSpec` here. `drawing/plots.py` has the kinds of plots.
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
        name: Name of its files, without suffix.
        draw: Draws the figure. Returns None if the run lacks the data for it.
        caption: What the figure shows.
    """

    name: str
    draw: Callable[[FigureData], Figure | None]
    caption: str


FIGURES = (
    FigureSpec(
        "speedup",
        lambda data: speedup.draw(data.summary),
        "Speedup over vanilla, one bar per method, with its 95% interval. An arrowhead marks an"
        " interval that continues beyond the axis. Marks are task families. The grey band is the"
        " A/A noise floor. Below a dashed line are methods that learn across prompts, so their"
        " speedup depends on the order of the prompts. Lossy methods have a separate figure.",
    ),
    FigureSpec(
        "targets",
        targets.draw,
        "Methods and drafts on several targets: speedup over vanilla on the same target, and MAT."
        " Darker is higher. Speedups of different targets have different baselines.",
    ),
    FigureSpec(
        "pareto",
        _pareto,
        "Discard rate and verification rate of the methods of a sweep, and their speedup against"
        " each parameter, with 95% intervals. An arrowhead marks an interval that continues beyond"
        " the axis.",
    ),
    FigureSpec(
        "frontier",
        lambda data: frontier.draw(data.summary),
        "Lossy methods: accuracy against speed, with the 95% interval of the difference from"
        " vanilla's accuracy. Hollow: controls that accept as many tokens at random. Grey: vanilla,"
        " the draft model alone, and lossless methods.",
    ),
    FigureSpec(
        "waterfall",
        waterfall.draw,
        "From the ideal speedup to the measured one. The ideal speedup is MAT: it assumes that a"
        " step takes as long as a vanilla step. Each bar is the loss to one part of a step.",
    ),
    FigureSpec(
        "cost",
        cost.draw,
        "Tokens per step against the cost of a step. The decode speedup is constant along each grey"
        " line.",
    ),
    FigureSpec(
        "positions",
        acceptance.draw_levels,
        "Acceptance by position: share of the steps that accepted a level, of those that drafted"
        " it.",
    ),
    FigureSpec(
        "accepted",
        acceptance.draw_counts,
        "Number of accepted draft tokens per step, as a share of all steps.",
    ),
    FigureSpec(
        "lengths",
        lengths.draw,
        "Speedup against the number of drafted levels per step, with 95% intervals. An arrowhead"
        " marks an interval that continues beyond the axis.",
    ),
    FigureSpec(
        "load",
        load.draw,
        "Goodput, time to the first token and latency at several arrival rates, with 95% intervals."
        " Times are the median (filled) and p99 (hollow). A diamond marks the rate at which a"
        " method saturates.",
    ),
    FigureSpec(
        "contexts",
        contexts.draw,
        "Decode speedup against the context length, with 95% intervals. An arrowhead marks an"
        " interval that continues beyond the axis. Grey: the other methods.",
    ),
    FigureSpec(
        "seen",
        prompts_seen.draw,
        "MAT of methods that learn across prompts, against the position of the prompts in a repeat."
        " A point is the MAT of some consecutive prompts, with its 95% interval. Grey: methods that"
        " do not learn. They show how difficult the prompts were.",
    ),
    FigureSpec(
        "prompts",
        prompts.draw,
        "Time of each output against vanilla's on the same prompt. Below the solid line the method"
        " is faster; at the dashed line it is twice as fast.",
    ),
    FigureSpec(
        "lanes",
        lanes.draw,
        "Forwards of each worker over time, in the first steps of one output. One lane is one"
        " worker. A number is the number of tokens that a step committed.",
    ),
)
"""All figures, in the order of the report."""
CAPTIONS = {figure.name: figure.caption for figure in FIGURES}


def write_figures(
    data: ReportData, folder: Path, *, paper: bool = False, max_svg_bytes: int = 0
) -> list[Path]:
    """Write `NAME.svg` and `NAME.png` of each figure to a folder.

    The folder is created if there is a figure.

    Args:
        paper: True to write `NAME.pdf`, too.
        max_svg_bytes: A PNG is written only if the SVG has more bytes than this.

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
