"""Every figure of a run, each drawn where the run has data for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli.report.figures import (
    accepted,
    contexts,
    cost,
    frontier,
    lanes,
    lengths,
    load,
    pareto,
    prompts,
    seen,
    speedup,
    targets,
    waterfall,
)
from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.reading import Reading
from specbench_cli.summary.pareto import sweep_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _pareto(cells: Cells) -> Figure | None:
    sweep = sweep_of(cells.summary, cells.manifest)
    return None if sweep is None else pareto.draw(sweep)


_FIGURES: dict[str, Callable[[Cells], Figure | None]] = {
    "speedup": lambda cells: speedup.draw(cells.summary),
    "targets": targets.draw,
    "pareto": _pareto,
    "frontier": lambda cells: frontier.draw(cells.summary),
    "waterfall": waterfall.draw,
    "cost": cost.draw,
    "positions": accepted.draw_levels,
    "accepted": accepted.draw_counts,
    "lengths": lengths.draw,
    "load": load.draw,
    "contexts": contexts.draw,
    "seen": seen.draw,
    "prompts": prompts.draw,
    "lanes": lanes.draw,
}
CAPTIONS = {
    "speedup": "Speedup over vanilla, a bar a method, with its own 95% interval (an arrowhead: it"
    " goes on); marks are families,"
    " the grey band is A/A noise. Below a broken line: what learns over the run, so that its"
    " figures depend on the order of the prompts. Lossy rows have a figure of their own.",
    "targets": "Methods and drafts on several targets: speedup over each target's own vanilla, and"
    " MAT; the darker, the higher. Speedups of two targets are ratios over two different times.",
    "pareto": "What a sweep's rows discard and verify, and their speedup along each parameter,"
    " with its 95% interval (an arrowhead: it goes on).",
    "frontier": "Lossy rows: accuracy, with the 95% interval of its difference from vanilla's,"
    " against speed. Hollow: as many accepted at random. Grey: vanilla, the draft alone, and"
    " lossless rows.",
    "waterfall": "Where a speedup comes from and goes: from MAT, what it would be if a step took as"
    " long as a plain forward, down to the measured one.",
    "cost": "Tokens a step against the cost of a step; along a grey line the decode speedup is the"
    " same.",
    "positions": "Acceptance by position: of the steps that drafted a level, the share that"
    " accepted it.",
    "accepted": "How many drafted tokens a step accepts, as a share of steps.",
    "lengths": "Speedup against the number of levels drafted a step, with its 95%"
    " interval (an arrowhead: it goes on).",
    "load": "Goodput, time to the first token and latency at several arrival rates, with 95%"
    " intervals; times as median (filled) and p99 (hollow). A diamond: from here on arrivals outrun"
    " the row.",
    "contexts": "Decode speedup against the length of the context, with its 95% interval (an"
    " arrowhead: it goes on); grey: the other methods.",
    "seen": "MAT along a pass, of the methods that learn from one prompt for the next: of some"
    " neighbouring prompts, with its 95% interval; grey: the methods that forget, whose lines say"
    " how hard the prompts were.",
    "prompts": "Time of every output against vanilla's on the same prompt; below the line the"
    " method is faster, at the broken line twice as fast.",
    "lanes": "Who computed when in the first steps of one output: a lane a worker; numbers are the"
    " tokens that a step committed.",
}
"""A sentence a figure, by the name of its file, in the order of a report."""


def write_figures(
    reading: Reading, folder: Path, *, paper: bool = False, heavy: int = 0
) -> list[Path]:
    """Write `NAME.svg` and `NAME.png` of each figure to `folder`, which is made if there is one;
    for a paper `NAME.pdf` too.

    Args:
        heavy: bytes of an SVG beyond which it has a PNG beside it.

    Returns:
        The files, figure by figure in the order of `CAPTIONS`.
    """
    cells, files = Cells.of(reading), list[Path]()
    with style.applied():
        for name, draw in _FIGURES.items():
            figure = draw(cells)
            if figure is not None:
                files += style.write(figure, folder, name, paper=paper, heavy=heavy)
    return files
