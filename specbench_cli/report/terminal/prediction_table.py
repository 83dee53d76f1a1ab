"""The tables of `specbench predict`: a run predicted, a machine's costs, two probes compared.

A person gets rounded figures with their units and the notes in between; a pipe gets one TSV on
stdout, figures unrounded, times in ns, and the notes on stderr.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from specbench_cli import output
from specbench_cli.measure.costs import BatchCost, Costs, Difference, Point
from specbench_cli.models.shapes import PREFIX as SHAPE
from specbench_cli.predict.prediction import Prediction, Row
from specbench_cli.predict.settings import Setting
from specbench_cli.summary.formats import NONE, percent

WORST = 5
"""Points of a comparison that a person is shown."""


def print_prediction(prediction: Prediction, head: Sequence[str], elsewhere: bool) -> None:
    """Rows by method and task.

    Args:
        head: what was run, and whose costs were taken.
        elsewhere: whether another machine's costs were replayed too.
    """
    notes = [
        "times: decoding, summed over outputs; error: predicted / measured - 1",
        "per output: the median size of an output's error; efficiency: predicted / measured",
        *(f"{label}: no prediction: {why}" for label, why in prediction.missing.items()),
        *(
            f"{row.label}, {row.task}: {row.void} void outputs have no error;"
            f" predicted {_seconds(row.predicted_void)}"
            for row in prediction.rows
            if row.void
        ),
        *(
            f"{row.label}, {row.task}: {percent(row.extrapolated)} of the forwards lie beyond the"
            " probe's points: extrapolated"
            for row in prediction.rows
            if row.extrapolated >= 0.01
        ),
    ]
    drawn = [_drawn(row, elsewhere) for row in prediction.rows]
    print_table(head, drawn if output.human() else map(asdict, prediction.rows), notes)


def print_settings(found: Sequence[Setting], head: Sequence[str]) -> None:
    """Rows as they would have been at other settings."""
    notes = [
        f"acceptance of {', '.join(dict.fromkeys(each.of for each in found))}: drafted tokens as"
        " they stood or fell there; those that it never tested stand as often",
        "times: decoding, summed over outputs; speedup: over plain decoding at the same costs",
        "accept: of tested tokens those that stood; break-even: where it would be no speedup",
        *_best(found),
    ]
    drawn = [
        {
            "row": each.label,
            "outputs": str(each.outputs),
            "MAT": f"{each.mat:.2f}",
            "accept": f"{each.acceptance:.2f}",
            "break-even": NONE if each.break_even is None else f"{each.break_even:.2f}",
            "modelled": _seconds(each.decode),
            "speedup": f"{each.speedup:.2f}x",
            "measured": _seconds(each.measured),
            "error": NONE if each.error is None else f"{each.error:+.1%}",
        }
        for each in found
    ]
    print_table(
        head,
        drawn
        if output.human()
        else [
            asdict(each) | {"speedup": each.speedup, "break_even": each.break_even}
            for each in found
        ],
        notes,
    )


def _best(found: Sequence[Setting]) -> list[str]:
    """Of each method that was modelled at several settings the best, and the best measured one."""
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
                line += (
                    f", which the modelled one took {best.measured / least:.3f} times as long as"
                )
        lines.append(line)
    return lines


def print_costs(costs: Costs) -> None:
    """The curves: for a person a row a number of new tokens, a column a context length."""
    head = [f"costs of {costs.label}"]
    drawn = [str(each["label"]) for each in costs.models.values() if "label" in each]
    if drawn := [label for label in drawn if label.startswith(SHAPE)]:
        head.append(f"synthetic: weights of {' and '.join(drawn)} drawn at random")
    if costs.quietness.noisy:
        head.append("noisy: other programs were running and the times were kept (--allow-noise)")
    lines = {"host": costs.host}
    for model, line in costs.hosts.items():
        lines["host, trees of draft" if model == "draft" else f"host, {model}"] = line
    notes = [
        *(
            f"{name}: {_micro(host.step)} a step, {_micro(host.draft)} more for each draft forward,"
            f" {_micro(host.node)} for each drafted token"
            for name, host in lines.items()
        ),
        *(_batch(costs.batch) if costs.batch else ()),
        f"{costs.quietness.rounds - costs.quietness.void} of {costs.quietness.rounds} rounds"
        " kept; times are means without far outliers",
    ]
    if not output.human():
        print_table(head, _points(costs), notes)
        return
    for role, curve in costs.curves.items():
        title = f"{role} {costs.models[role]['label']}: ms a forward, by new tokens and rows before"
        prefills = ", ".join(f"{_milli(ns)} for {n:g} tokens" for n, ns in curve.prefill)
        print_table([*head, title], _grid(curve.forwards), [f"prefill: {prefills}"])
        if curve.trees:
            print_table(
                [f"{role}: the same over a tree, its root included"], _grid(curve.trees), []
            )
        head = []
    print_table((), (), notes)


def _batch(batch: BatchCost) -> list[str]:
    """What several sequences together cost."""
    further = ", ".join(f"{_micro(ns)} in one of {model}" for model, ns in batch.beside.items())
    return [
        f"batches up to {batch.most}: each further sequence of a forward {further}",
        f"host, batches: {_micro(batch.step)} a step, {_micro(batch.sequence)} for each sequence,"
        f" {_micro(batch.draft)} for each of its draft forwards, {_micro(batch.node)} for each of"
        " its drafted tokens",
    ]


def print_differences(found: Sequence[Difference]) -> None:
    """The median over points and the worst ones."""
    typical, worst = median(each.relative for each in found), found[0]
    notes = [
        f"{len(found)} points: median difference {percent(typical, 1)},"
        f" worst {percent(worst.relative, 1)} ({worst.name})"
    ]
    rows = [
        {
            "point": each.name,
            "first": _milli(each.first_ns) + " ms",
            "second": _milli(each.second_ns) + " ms",
            "difference": percent(each.relative, 1),
        }
        if output.human()
        else {**each.model_dump(), "relative": each.relative}
        for each in (found[:WORST] if output.human() else found)
    ]
    print_table((), rows, notes)


def print_table(
    head: Sequence[str], rows: Iterable[Mapping[str, Any]], notes: Sequence[str]
) -> None:
    """Lines before a table, the table, and notes after it: all of it on a terminal; in a pipe rows
    on stdout, the rest on stderr."""
    say = output.data if output.human() else output.note
    for line in head:
        say(line)
    if rows := list(rows):
        _draw(rows) if output.human() else output.rows(rows)
    for line in notes:
        say(f" {line}" if output.human() else line)


def _draw(rows: Sequence[Mapping[str, Any]]) -> None:
    """Aligned lines under a heading, as reports have them: names left, figures right."""
    lines = [list(rows[0]), *([output.plain(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        cells = [
            f"{cell:<{width}}" if rows[0][heading][:1].isalpha() else f"{cell:>{width}}"
            for cell, width, heading in zip(line, widths, lines[0], strict=True)
        ]
        output.data(output.styled("  ".join(cells).rstrip(), "" if number else "bold"))


def _drawn(row: Row, elsewhere: bool) -> dict[str, str]:
    cells = {
        "method": row.label,
        "task": row.task,
        "outputs": str(row.outputs),
        "measured": _seconds(row.measured),
        "predicted": _seconds(row.predicted if row.measured is not None else row.predicted_void),
        "error": NONE if row.error is None else f"{row.error:+.1%}",
        "per output": percent(row.cell_error, 1),
        "efficiency": NONE if row.efficiency is None else f"{row.efficiency:.3f}",
    }
    return cells | ({"elsewhere": _seconds(row.elsewhere)} if elsewhere else {})


def _grid(points: Sequence[Point]) -> list[dict[str, Any]]:
    contexts = sorted({point.context for point in points})
    rows = {
        n: {"tokens": str(n), **{f"after {context}": "" for context in contexts}}
        for n in sorted({point.n_tokens for point in points})
    }
    for point in points:
        rows[point.n_tokens][f"after {point.context}"] = _milli(point.ns)
    return list(rows.values())


def _points(costs: Costs) -> list[dict[str, Any]]:
    return [
        {"model": role, "tree": tree, **point.model_dump()}
        for role, curve in costs.curves.items()
        for tree, points in ((False, (*curve.forwards, *curve.prefills)), (True, curve.trees))
        for point in points
    ]


def _seconds(ns: float | None) -> str:
    return NONE if ns is None else f"{ns / 1e9:.3f} s"


def _milli(ns: float) -> str:
    return f"{ns / 1e6:.3f}"


def _micro(ns: float) -> str:
    return f"{ns / 1e3:.0f} us"
