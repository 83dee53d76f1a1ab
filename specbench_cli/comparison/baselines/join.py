"""Join of several runs of the same program to one side of a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

from specbench_cli.comparison.baselines.from_run import read_run
from specbench_cli.comparison.compared_output import ComparedOutput, Counters
from specbench_cli.comparison.side import Side
from specbench_cli.errors import UsageError
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.compatibility import find_incompatibilities, short_names


def join_runs(name: str, runs: Sequence[Path]) -> Side:
    """Join runs to one side of a comparison. Drop times of noisy runs, unless all runs are noisy.

    Args:
        runs: folders of the runs; at least one.

    Raises:
        UsageError: a run is unfinished or named twice, or the runs have different settings or
            results. The message names the differences.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise UsageError("a run is named twice", hint="name each run once")
    sides = [read_run(run) for run in runs]
    for run, side in zip(runs, sides, strict=True):
        if side.status != "finished":
            raise UsageError(
                f"{run} is {side.status}, but only finished runs can be joined",
                hint=f"specbench run --resume {shlex.quote(str(run))}",
            )
    short = short_names(runs)
    differing = list(map(str, find_incompatibilities([RunDir.open(run) for run in runs], short)))
    for other, run_name in zip(sides[1:], short[1:], strict=True):
        differing += _describe_differences(sides[0], other, short[0], run_name)
    if differing:
        lines = "".join(f"\n  {line}" for line in differing)
        raise UsageError(
            f"these runs cannot be joined, because they differ in{lines}",
            hint=f"use one of them, {shlex.quote(str(runs[0]))}, or see what changed:"
            f" specbench compare {' '.join(shlex.quote(str(run)) for run in runs[:2])}",
        )
    quiet = [side for side in sides if not side.noisy] or sides
    return replace(
        quiet[0],
        name=name,
        noisy=all(side.noisy for side in sides),
        processes=tuple(chain.from_iterable(side.processes for side in quiet)),
        start_times=tuple(chain.from_iterable(side.start_times for side in quiet)),
        left_out=tuple(
            f"times of {run_name} are left out: it is labelled noisy"
            for run_name, side in zip(short, sides, strict=True)
            if side not in quiet
        ),
    )


def _describe_differences(
    first: Side, other: Side, first_name: str, other_name: str
) -> Iterable[str]:
    """Describe the differences between the outputs of two runs, by method.

    Differences that timing can cause are omitted.
    """
    for label in dict.fromkeys((*first.rows, *other.rows)):
        if label not in first.rows or label not in other.rows:
            lacking = first_name if label not in first.rows else other_name
            yield f"{label}: {lacking} does not have it"
        elif first.rows[label] != other.rows[label]:
            yield f"{label}: its method or parameters"
        else:
            yield from _describe_row_differences(label, first, other, first_name, other_name)


def _describe_row_differences(
    label: str, first: Side, other: Side, first_name: str, other_name: str
) -> Iterable[str]:
    """Describe the first output in which two runs of a method differ."""
    ours, theirs = (
        {key: output for key, output in side.outputs.items() if key.label == label}
        for side in (first, other)
    )
    if differing := sorted(ours.keys() ^ theirs.keys()):
        holder = first_name if differing[0] in ours else other_name
        at = f"{differing[0].prompt_id} turn {differing[0].turn} pass {differing[0].pass_}"
        yield f"{label}: {len(differing)} outputs in one run only; the first, {at}, in {holder}"
    elif first.rows[label].timing_free:
        differing = [
            key
            for key, output in ours.items()
            if replace(output, times=theirs[key].times) != theirs[key]
        ]
        if differing:
            key = min(differing)
            what = ", ".join(_describe_output_changes(ours[key], theirs[key]))
            yield (
                f"{label}: {len(differing)} of {len(ours)} outputs; the first, {key.prompt_id} turn"
                f" {key.turn} pass {key.pass_}: {what} ({first_name} -> {other_name})"
            )


def _describe_output_changes(ours: ComparedOutput, theirs: ComparedOutput) -> Iterable[str]:
    for field in fields(ComparedOutput):
        if field.name not in ("key", "counters", "times"):
            was, now = getattr(ours, field.name), getattr(theirs, field.name)
            if was != now:
                yield f"{field.name} {was} -> {now}"
    for field in fields(Counters):
        was, now = getattr(ours.counters, field.name), getattr(theirs.counters, field.name)
        if was != now:
            yield f"{field.name} {was} -> {now}"
