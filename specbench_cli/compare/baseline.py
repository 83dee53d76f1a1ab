"""Baselines: what a comparison needs of runs, small enough to be committed, one file a machine.

`results/baselines/NAME/<machine id>.json` holds checksums, counters and times; no texts, no tokens,
no paths. Several runs of one program are several processes of one baseline.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

from specbench_cli.compare.baseline_file import dump, parse
from specbench_cli.compare.cell import Cell, Counters
from specbench_cli.compare.from_run import read_run
from specbench_cli.compare.side import Side
from specbench_cli.errors import UsageError
from specbench_cli.report.belonging import differences, short_names
from specbench_cli.store.run_dir import RunDir

ROOT = Path("results/baselines")
"""Where baselines are, one folder a name."""

_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)


def save(name: str, runs: Sequence[Path], *, root: Path = ROOT) -> Path:
    """Write a baseline, in place of the one that this machine had by that name.

    Args:
        runs: of one program on one machine, with the same outputs; at least one.

    Returns:
        Its file.

    Raises:
        UsageError: the runs are unfinished, do not belong together, or did not all come to the same
            where steps do not depend on timing; names what differs.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a baseline: letters, digits and . _ + - are",
            hint="specbench compare --save ci last",
        )
    side = _join(name, runs)
    if side.machine is None or not _NAME.fullmatch(side.machine):
        raise UsageError(
            f"{runs[0]} does not say what machine it was run on, which baselines go by",
            hint="run it anew: specbench run",
        )
    path = root / name / f"{side.machine}.json"
    draft = path.with_suffix(".json.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(dump(side), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def load(path: Path) -> Side:
    """The side that a baseline is. Raises UsageError where there is none or it is damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="specbench compare --save NAME RUN"
        ) from error
    except (ValueError, TypeError, LookupError) as error:
        raise UsageError(
            f"{path} is no baseline, or a damaged one: {error}",
            hint=f"git checkout -- {shlex.quote(str(path))}, or specbench compare --save NAME RUN",
        ) from error


def names(root: Path = ROOT) -> list[str]:
    """All baselines."""
    return sorted({path.parent.name for path in root.glob("*/*.json")})


def find(name: str, root: Path = ROOT) -> Path | None:
    """The file of a baseline: this machine's, else the first; null where there is none."""
    files = sorted((root / name).glob("*.json")) if _NAME.fullmatch(name) else []
    if len(files) < 2:
        return files[0] if files else None
    # Asking what machine this is takes torch, and seconds.
    from specbench_cli.measure.machine import fingerprint

    own = f"{fingerprint()['id']}.json"
    return next((file for file in files if file.name == own), files[0])


def _join(name: str, runs: Sequence[Path]) -> Side:
    """Runs as one side. Raises UsageError where they are not several processes of one program."""
    if not runs:
        raise UsageError(
            "a baseline is made of a run", hint=f"specbench compare --save {name} last"
        )
    if len({run.resolve() for run in runs}) < len(runs):
        raise UsageError(
            "a run is given twice; every process counts once", hint="name each run once"
        )
    sides = [read_run(run) for run in runs]
    for run, side in zip(runs, sides, strict=True):
        if side.status != "finished":
            raise UsageError(
                f"{run} is {side.status}, and a baseline is of finished runs",
                hint=f"specbench run --resume {shlex.quote(str(run))}",
            )
    short = short_names(runs)
    apart = list(map(str, differences([RunDir.open(run) for run in runs], short)))
    for other, called in zip(sides[1:], short[1:], strict=True):
        apart += _apart(sides[0], other, short[0], called)
    if apart:
        lines = "".join(f"\n  {line}" for line in apart)
        raise UsageError(
            f"these runs are not several processes of one program; they differ in{lines}",
            hint=f"save one of them: specbench compare --save {name}"
            f" {shlex.quote(str(runs[0]))}; or see what changed: specbench compare"
            f" {' '.join(shlex.quote(str(run)) for run in runs[:2])}",
        )
    first = sides[0]
    return replace(
        first,
        name=name,
        noisy=any(side.noisy for side in sides),
        cells={key: _bare(cell) for key, cell in first.cells.items()},
        processes=tuple(
            tuple(map(_bare, process)) for process in chain(*(side.processes for side in sides))
        ),
    )


def _apart(first: Side, other: Side, first_name: str, other_name: str) -> Iterable[str]:
    """What tells runs apart that timing does not explain, by label."""
    for label in dict.fromkeys((*first.rows, *other.rows)):
        if label not in first.rows or label not in other.rows:
            lacking = first_name if label not in first.rows else other_name
            yield f"{label}: {lacking} does not have it"
        elif first.rows[label] != other.rows[label]:
            yield f"{label}: its method or parameters"
        else:
            yield from _apart_in(label, first, other, first_name, other_name)


def _apart_in(
    label: str, first: Side, other: Side, first_name: str, other_name: str
) -> Iterable[str]:
    """The first output at which two runs of a row differ."""
    ours, theirs = (
        {key: cell for key, cell in side.cells.items() if key.label == label}
        for side in (first, other)
    )
    if odd := sorted(ours.keys() ^ theirs.keys()):
        holder = first_name if odd[0] in ours else other_name
        at = f"{odd[0].prompt_id} turn {odd[0].turn} pass {odd[0].pass_}"
        yield f"{label}: {len(odd)} outputs that only one has; the first, {at}, only {holder}"
    elif first.rows[label].timing_free:
        odd = [
            key
            for key, cell in ours.items()
            if replace(cell, times=theirs[key].times) != theirs[key]
        ]
        if odd:
            key = min(odd)
            what = ", ".join(_changes(ours[key], theirs[key]))
            yield (
                f"{label}: {len(odd)} of {len(ours)} outputs; the first, {key.prompt_id} turn"
                f" {key.turn} pass {key.pass_}: {what} ({first_name} -> {other_name})"
            )


def _changes(ours: Cell, theirs: Cell) -> Iterable[str]:
    for field in fields(Cell):
        if field.name not in ("key", "counters", "times"):
            was, now = getattr(ours, field.name), getattr(theirs, field.name)
            if was != now:
                yield f"{field.name} {was} -> {now}"
    for field in fields(Counters):
        was, now = getattr(ours.counters, field.name), getattr(theirs.counters, field.name)
        if was != now:
            yield f"{field.name} {was} -> {now}"


def _bare(cell: Cell) -> Cell:
    """A cell with its error's kind alone: the text may hold paths."""
    if cell.error is None:
        return cell
    kind = cell.error.partition(":")[0]
    return replace(cell, error=kind if kind.isidentifier() else "failed")
