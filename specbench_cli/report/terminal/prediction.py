"""Tables of `specbench predict`: predicted runs and settings, measured costs, a roofline.

On a terminal, numbers are rounded and have units, and notes follow the tables. In a pipe, one TSV
is printed to stdout, with unrounded numbers and times in ns. The notes are printed to stderr.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from specbench_cli import output
from specbench_cli.measure.costs import BatchCost, CostPoint, Costs, ProbeDifference
from specbench_cli.models.shapes import SHAPE_PREFIX as SHAPE
from specbench_cli.predict.accelerators import Roofline
from specbench_cli.predict.prediction import Prediction, TaskPrediction
from specbench_cli.predict.roofline import ChangedInput, RooflineReplay, RooflineRow, rows_as_dicts
from specbench_cli.predict.settings import ModelledSetting
from specbench_cli.report.document import Grid, make_grid
from specbench_cli.report.terminal.grid import print_grid
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.columns import Column
from specbench_cli.summary.formats import NONE, number, percent, ratio

WORST = 5
"""Number of points of a comparison that the terminal shows."""


def _seconds(ns: float | None) -> str:
    return NONE if ns is None else f"{ns / 1e9:.3f} s"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f}"


def _us(ns: float) -> str:
    return f"{ns / 1e3:.0f} us"


def _error(share: float | None) -> str:
    return NONE if share is None else f"{share:+.1%}"


_ROWS: tuple[Column[TaskPrediction], ...] = (
    Column("method", align="l", format=lambda row: row.label),
    Column("task", align="l", format=lambda row: row.task),
    Column("outputs", format=lambda row: str(row.outputs)),
    Column("measured", format=lambda row: _seconds(row.measured)),
    Column(
        "predicted",
        format=lambda row: _seconds(
            row.predicted if row.measured is not None else row.predicted_void
        ),
    ),
    Column("error", format=lambda row: _error(row.error)),
    Column("per output", format=lambda row: percent(row.cell_error, 1)),
    Column("efficiency", format=lambda row: number(row.efficiency, 3)),
    Column(
        "elsewhere",
        format=lambda row: _seconds(row.elsewhere),
        when=lambda rows: any(row.elsewhere is not None for row in rows),
    ),
)
_SETTINGS: tuple[Column[ModelledSetting], ...] = (
    Column("row", align="l", format=lambda each: each.label),
    Column("outputs", format=lambda each: str(each.outputs)),
    Column("MAT", format=lambda each: number(each.mat)),
    Column("accept", format=lambda each: number(each.acceptance)),
    Column("break-even", format=lambda each: number(each.break_even)),
    Column("modelled", format=lambda each: _seconds(each.decode)),
    Column("speedup", format=lambda each: ratio(each.speedup)),
    Column("measured", format=lambda each: _seconds(each.measured)),
    Column("error", format=lambda each: _error(each.error)),
)
_DIFFERENCES: tuple[Column[ProbeDifference], ...] = (
    Column("point", align="l", format=lambda each: each.name),
    Column("first", format=lambda each: f"{_ms(each.first_ns)} ms"),
    Column("second", format=lambda each: f"{_ms(each.second_ns)} ms"),
    Column("difference", format=lambda each: percent(each.relative, 1)),
)
_ROOFLINE: tuple[Column[RooflineRow], ...] = (
    Column("method", align="l", format=lambda row: row.label),
    Column("outputs", format=lambda row: str(row.outputs)),
    Column("modelled time", format=lambda row: f"{row.ns / 1e9:.4f} s"),
    Column("modelled tokens/s", format=lambda row: number(row.tokens_per_s, 1)),
    Column("modelled speedup", format=lambda row: ratio(row.speedup)),
    Column("per device", format=lambda row: ratio(row.per_device)),
    Column("measured here", format=lambda row: ratio(row.measured)),
)


def print_prediction(prediction: Prediction, head: Sequence[str]) -> None:
    """Print a prediction by method and task.

    Args:
        head: Lines above the table: the run, and the source of the costs.
    """
    notes = [
        "times are decode times, summed over outputs; error: predicted / measured - 1",
        "per output: median absolute error of an output; efficiency: predicted / measured",
        *(f"{label}: no prediction: {why}" for label, why in prediction.missing.items()),
        *(
            f"{row.label}, {row.task}: {row.void} outputs with noisy times have no error;"
            f" predicted {_seconds(row.predicted_void)}"
            for row in prediction.rows
            if row.void
        ),
        *(
            f"{row.label}, {row.task}: {percent(row.extrapolated)} of the forwards are outside"
            " the range that the probe measured: their costs are extrapolated"
            for row in prediction.rows
            if row.extrapolated >= 0.01
        ),
    ]
    print_grid(head, make_grid(_ROWS, prediction.rows), map(asdict, prediction.rows), notes)


def print_settings(found: Sequence[ModelledSetting], head: Sequence[str]) -> None:
    """Print the modelled results of methods with other parameters."""
    notes = [
        f"acceptance of {', '.join(dict.fromkeys(each.of for each in found))}: as recorded for each"
        " draft token; tokens that were not verified there are accepted at the same rate",
        "times are decode times, summed over outputs; speedup: over vanilla with the same costs",
        "accept: share of verified draft tokens that were accepted; break-even: acceptance rate at"
        " which the speedup is 1",
        *_best(found),
    ]
    records = (
        asdict(each) | {"speedup": each.speedup, "break_even": each.break_even} for each in found
    )
    print_grid(head, make_grid(_SETTINGS, found), records, notes)


def _best(found: Sequence[ModelledSetting]) -> list[str]:
    """Return lines with each method's best modelled setting, and the best measured one."""
    lines = []
    for method in dict.fromkeys(each.label.partition(" ")[0] for each in found):
        own = [each for each in found if each.label.partition(" ")[0] == method]
        known = [(each.measured, each) for each in own if each.measured is not None]
        best = min(own, key=lambda each: each.decode)
        if len(own) < 2:
            continue
        line = f"best of {method}: modelled {best.label}"
        if len(known) > 1:
            least, measured = min(known, key=lambda each: each[0])
            line += f", measured {measured.label}"
            if best.measured is not None and best is not measured:
                line += f"; the modelled one took {best.measured / least:.3f} times as long"
        lines.append(line)
    return lines


def print_costs(costs: Costs) -> None:
    """Print the cost curves: one row per number of new tokens, one column per context length."""
    head = [f"costs of {costs.label}"]
    synthetic = [str(each["label"]) for each in costs.models.values() if "label" in each]
    if synthetic := [label for label in synthetic if label.startswith(SHAPE)]:
        head.append(f"synthetic: weights of {' and '.join(synthetic)} drawn at random")
    if costs.quietness.noisy:
        head.append("noisy: other programs were running and the times were kept (--allow-noise)")
    lines = {"host": costs.host}
    for model, line in costs.hosts.items():
        lines["host, trees of draft" if model == "draft" else f"host, {model}"] = line
    notes = [
        *(
            f"{name}: {_us(host.step)} per step, plus {_us(host.draft)} per draft forward and"
            f" {_us(host.node)} per draft token"
            for name, host in lines.items()
        ),
        *(_batch(costs.batch) if costs.batch else ()),
        f"{costs.quietness.rounds - costs.quietness.void} of {costs.quietness.rounds} rounds"
        " used (the others were noisy); times are means without outliers",
    ]
    if not output.is_interactive():
        print_grid(head, None, _points(costs), notes)
        return
    for role, curve in costs.curves.items():
        label = costs.models[role]["label"]
        title = f"{role} {label}: ms per forward, by number of new tokens and context length"
        prefills = ", ".join(f"{_ms(ns)} for {n:g} tokens" for n, ns in curve.prefill)
        print_grid([*head, title], _curve(curve.forwards), (), [f"prefill: {prefills}"])
        if curve.trees:
            print_grid(
                [f"{role}: ms per forward over a tree, by number of nodes with the root"],
                _curve(curve.trees),
                (),
            )
        head = []
    print_grid((), None, (), notes)


def _batch(batch: BatchCost) -> list[str]:
    """Return lines about the cost of batched sequences."""
    per_model = ", ".join(f"{_us(ns)} ({model})" for model, ns in batch.beside.items())
    return [
        f"batches up to {batch.most}: each further sequence of a forward takes {per_model}",
        f"host, batches: {_us(batch.step)} per step, plus {_us(batch.sequence)} per sequence,"
        f" {_us(batch.draft)} per draft forward of a sequence and {_us(batch.node)} per draft"
        " token",
    ]


def print_differences(found: Sequence[ProbeDifference]) -> None:
    """Print how much two probes differ: the median over all points, and the worst points."""
    typical, worst = median(each.relative for each in found), found[0]
    notes = [
        f"{len(found)} points: median difference {percent(typical, 1)},"
        f" worst {percent(worst.relative, 1)} ({worst.name})"
    ]
    records = ({**each.model_dump(), "relative": each.relative} for each in found)
    print_grid((), make_grid(_DIFFERENCES, found[:WORST]), records, notes)


def _curve(points: Sequence[CostPoint]) -> Grid:
    """Return a line per number of new tokens, and a column per context length."""
    ms = {(point.n_tokens, point.context): _ms(point.ns) for point in points}

    def context_column(context: int) -> Column[int]:
        return Column(f"after {context}", format=lambda n: ms.get((n, context), ""))

    contexts = sorted({point.context for point in points})
    columns: list[Column[int]] = [Column("tokens", format=str), *map(context_column, contexts)]
    return make_grid(columns, sorted({point.n_tokens for point in points}))


def _points(costs: Costs) -> list[dict[str, Any]]:
    return [
        {"model": role, "tree": tree, **point.model_dump()}
        for role, curve in costs.curves.items()
        for tree, points in ((False, (*curve.forwards, *curve.prefills)), (True, curve.trees))
        for point in points
    ]


MAX_METHODS = 5
"""Maximum number of methods side by side in the table of inputs."""
NOTES = (
    "modelled, not measured: no kernel reaches a roofline, so times are lower bounds; they are"
    " never ranked with measured methods",
    "measured here: speedup of the same outputs on the machine of the run",
    "sensitivity: change of the modelled speedup if an input is 10% smaller / 10% larger",
)


def roofline_head(roofline: Roofline, models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describe the modelled hardware and its source."""
    device = roofline.accelerator
    shapes = " + ".join(roofline.names.values())
    recorded = " + ".join(str(facts.get("label")) for facts in models.values())
    context = "as recorded" if roofline.context is None else f"{roofline.context} tokens"
    model_bytes = sum(roofline.memory_use(1).values())
    lines = [
        f"modelled: {roofline.devices} x {device.name}, {shapes}, {roofline.dtype}, batch"
        f" {roofline.batch}, context: {context},"
        f" {roofline.overhead / 1e3:g} us of overhead per forward",
        f"per device: {device.bandwidth / 1e12:g} TB/s,"
        f" {device.flops[roofline.dtype] / 1e12:g} TFLOP/s, {device.memory / 1e9:g} GB"
        f" ({device.source}); memory in use: {model_bytes / 1e9:.3g} GB, plus the KV cache of"
        " further tokens",
        f"acceptance and lengths: as recorded with {recorded}",
    ]
    sources = [f"{n}: {roofline.shapes[role].source}" for role, n in roofline.names.items()]
    return [*lines, f"shapes: {'; '.join(sources)}"]


def print_replayed(found: RooflineReplay, roofline: Roofline, lines: Sequence[str]) -> None:
    """Print a replay on a roofline: the methods, and the inputs that determine their speedups."""
    missing = [f"{label}: not modelled: {why}" for label, why in found.missing.items()]
    if not output.is_interactive():
        print_grid(lines, None, rows_as_dicts(found.rows), [*NOTES, *missing])
        return
    print_grid(lines, make_grid(_ROOFLINE, found.rows), (), missing)
    drafting = [row for row in found.rows if row.sensitivity and row.label != BASELINE]
    for first in range(0, len(drafting), MAX_METHODS):
        change = map(_input, drafting[first : first + MAX_METHODS])
        columns: list[Column[str]] = [Column("input", align="l", format=str), *change]
        print_grid((), make_grid(columns, list(roofline.inputs)), ())
    print_grid((), None, (), NOTES)


def _input(row: RooflineRow) -> Column[str]:
    """Return a method's column in the sensitivity table.

    It shows how much each input of the model changes the speedup.
    """
    return Column(row.label, format=lambda name: _format_change(row.sensitivity[name]))


def _format_change(change: ChangedInput) -> str:
    return " / ".join(f"{round(each, 3) + 0.0:+.1%}" for each in (change.less, change.more))
