"""Timelines of one prompt's outputs as files: figures, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbench_cli.errors import UsageError
from specbench_cli.predict.lanes import WorkerLanes, make_lanes
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.lanes import draw_lanes
from specbench_cli.report.timeline.chrome_trace import write_trace
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.comparison import OutputComparison
from specbench_cli.summary.source import RecordSource

_MAX_STEPS = 8
"""Number of steps in the figure, for the output with the longest steps. The trace has all."""


def write_lanes(run: RecordSource, found: Sequence[OutputComparison], folder: Path) -> list[Path]:
    """Write `lanes.svg`, `lanes.png` and `trace.json` of some comparisons, vanilla's outputs first.

    A question with several turns gets one figure per turn: `lanes-turn1.svg`, ...

    Raises:
        UsageError: No forward of these outputs is stored.
    """
    wanted = {(c.prompt_id, c.turn, label, c.pass_) for c in found for label in (BASELINE, c.label)}
    labels = list(dict.fromkeys([BASELINE, *(c.label for c in found)]))
    records = run.records({c.prompt_id for c in found})
    lanes = [make_lanes(record) for record in records if record.key in wanted]
    lanes = [own for own in lanes if own.decoding]
    if not lanes:
        raise UsageError(
            f"no lanes of {', '.join(labels)} on {found[0].prompt_id}: no forwards are stored",
            hint="choose with --method a method that specbench runs itself, such as sps",
        )
    lanes.sort(key=lambda own: (own.turn, labels.index(own.label)))
    by_turn: dict[int, list[WorkerLanes]] = {}
    for own in lanes:
        by_turn.setdefault(own.turn, []).append(own)
    files: list[Path] = []
    with style.figure_style():
        for turn, some in by_turn.items():
            figure = draw_lanes(some, style.PAGE_IN, _MAX_STEPS)
            if figure is not None:
                name = "lanes" if len(by_turn) == 1 else f"lanes-turn{turn}"
                files += style.write(figure, folder, name)
    return [*files, write_trace(lanes, folder / "trace.json")]
