"""A replay on a roofline as text: a table of methods, and one of what their speedups hang on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_cli import output
from specbench_cli.predict.accelerators import Roofline
from specbench_cli.predict.roofline import Moved, Replayed, RooflineRow, lines_of
from specbench_cli.report.terminal.prediction_table import print_table
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.formats import NONE

ABREAST = 5
"""Methods beside each other in the table of inputs."""

NOTES = (
    "modelled, not measured: no kernel reaches a roofline, so times are lower bounds; never ranked"
    " with measured rows",
    "measured here: the same outputs' speedup on the run's own machine",
    "sensitivity: what 10% less / 10% more of an input does to the modelled speedup",
)


def head(roofline: Roofline, models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was modelled, in words."""
    device = roofline.accelerator
    shapes = " + ".join(roofline.names.values())
    recorded = " + ".join(str(facts.get("label")) for facts in models.values())
    context = "recorded ones" if roofline.context is None else f"{roofline.context} rows"
    bytes_held = sum(roofline.held(1).values())
    lines = [
        f"modelled: {roofline.devices} x {device.name}, {shapes}, {roofline.dtype}, batch"
        f" {roofline.batch}, contexts: {context},"
        f" {roofline.overhead / 1e3:g} us a forward beside the roofline",
        f"a device: {device.bandwidth / 1e12:g} TB/s,"
        f" {device.flops[roofline.dtype] / 1e12:g} TFLOP/s, {device.memory / 1e9:g} GB"
        f" ({device.source}); held: {bytes_held / 1e9:.3g} GB and the texts' rows",
        f"acceptance and lengths: as recorded with {recorded}",
    ]
    sources = [f"{n}: {roofline.shapes[role].source}" for role, n in roofline.names.items()]
    return [*lines, f"shapes: {'; '.join(sources)}"]


def print_replayed(found: Replayed, roofline: Roofline, lines: Sequence[str]) -> None:
    """The tables: rounded for a person, all figures for a pipe."""
    missing = [f"{label}: not modelled: {why}" for label, why in found.missing.items()]
    if not output.human():
        print_table(lines, lines_of(found.rows), [*NOTES, *missing])
        return
    print_table(lines, [_drawn(row) for row in found.rows], missing)
    drafting = [row for row in found.rows if row.sensitivity and row.label != BASELINE]
    for first in range(0, len(drafting), ABREAST):
        some = drafting[first : first + ABREAST]
        print_table(
            (),
            [
                {"input": name, **{row.label: _moved(row.sensitivity[name]) for row in some}}
                for name in roofline.inputs
            ],
            (),
        )
    print_table((), (), NOTES)


def _drawn(row: RooflineRow) -> dict[str, str]:
    return {
        "method": row.label,
        "outputs": str(row.outputs),
        "modelled time": f"{row.ns / 1e9:.4f} s",
        "modelled tokens/s": f"{row.tokens_per_s:.1f}",
        "modelled speedup": _times(row.speedup),
        "per device": _times(row.per_device),
        "measured here": _times(row.measured),
    }


def _times(speedup: float | None) -> str:
    return NONE if speedup is None else f"{speedup:.2f}x"


def _moved(moved: Moved) -> str:
    return " / ".join(f"{round(each, 3) + 0.0:+.1%}" for each in (moved.less, moved.more))
