"""The timing gate: what became slower or faster between two sides, by component.

Four figures a row, each a ratio inside its own process, so that a slow phase of the machine hits
both of its ends:

    decode          time a token / vanilla's, same prompt
    verify forward  of the target / vanilla's forward over one token, same prompt
    draft forward   / verify forward of the same output: they alternate within milliseconds
    host            time a step / verify forward of the same output

and vanilla's own time a token over hf:vanilla's, the only one that sees what is slower for every
row. Components count where both sides did the same work (equal counters): other drafts take other
times, and that is the deterministic gate's to tell.

Where the sides' runs took turns, the machine was the same for both, and a draft forward is compared
as it is, by each output's fastest: nothing that it could be divided by is as steady.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from specbench_cli.comparison.cell import Cell, Place, RowKey
from specbench_cli.comparison.outcome import Change, Finding
from specbench_cli.comparison.processes import Processes
from specbench_cli.stats.bootstrap import WIDEST
from specbench_cli.stats.regression import MIN_PAIRS, MIN_PROMPTS, Series, shifts
from specbench_cli.store.schema import BASELINE

if TYPE_CHECKING:
    from specbench_cli.comparison.scope import Scope

DECODE, VERIFY, DRAFT, HOST = "decode", "verify forward", "draft forward", "host"
OUTSIDE = "hf:vanilla"
VANILLA = f"{BASELINE} / {OUTSIDE}"


def changes(scope: Scope, run: Processes, tolerance: float) -> dict[RowKey, tuple[Change, ...]]:
    """By row, what became of each of its figures; those that cannot be judged left out.

    Args:
        run: of the two sides.
        tolerance: the slowdown that is let pass, 0.05 for 5%.
    """
    asked: list[tuple[RowKey, str, Series]] = []
    for row, pairs in scope.pairs.items():
        places = _places(pairs)
        if _unjudged(row, places, run) is None:
            labels = _against(row.label), row.label
            asked += ((row, *one) for one in _series(row, pairs, run.whole(labels, places)))
    found = shifts([series for *_, series in asked], above=math.log1p(tolerance))
    result: dict[RowKey, tuple[Change, ...]] = {}
    for (row, figure, series), shift in zip(asked, found, strict=True):
        if shift is not None:
            low, high = _ends(shift.low, shift.high)
            change = Change(
                figure=figure,
                ratio=math.exp(shift.change),
                low=low,
                high=high,
                significant=shift.significant,
                detects=math.exp(shift.detects),
                relative=not series.disturbed,
            )
            result[row] = (*result.get(row, ()), change)
    return result


def not_judged(scope: Scope, run: Processes) -> Iterator[str]:
    """The rows whose times are not judged, or not of all runs, and why, a sentence each."""
    for row, pairs in scope.pairs.items():
        places = _places(pairs)
        if why := _unjudged(row, places, run) or _left_out(row, places, run):
            yield f"times of {row.task} {row.label}: {why}"


def findings(changes: tuple[Change, ...], tolerance: float) -> tuple[Finding, ...]:
    """What is both significant and above the tolerance: all that is slower of a row in one finding,
    the component before the whole; faster by the whole alone."""
    of = {change.figure: change for change in changes}
    slower = [
        change
        for figure in (DRAFT, VERIFY, HOST, VANILLA, DECODE)
        if (change := of.get(figure)) is not None
        and change.significant
        and change.ratio > 1 + tolerance
        and not _explained(change, of.get(VERIFY), tolerance)
    ]
    faster = [
        change
        for figure in (DECODE, VANILLA)
        if (change := of.get(figure)) is not None
        and change.significant
        and change.ratio < 1 / (1 + tolerance)
    ]
    result = []
    if slower:
        result.append(
            Finding(
                outcome="slower", says=f"{', '.join(map(str, slower))} (allowed {tolerance:+.0%})"
            )
        )
    if faster:
        result.append(Finding(outcome="faster", says=", ".join(map(str, faster))))
    return tuple(result)


def _explained(change: Change, verify: Change | None, tolerance: float) -> bool:
    """Whether a component only looks slower because what it is divided by became faster: less than
    half of the tolerance is left relative to vanilla."""
    if verify is None or change.figure not in (DRAFT, HOST) or not change.relative:
        return False
    return verify.ratio < 1 and change.ratio * verify.ratio < 1 + tolerance / 2


def _ends(low: float, high: float) -> tuple[float, float] | tuple[None, None]:
    """An interval's ends as ratios, of their logarithms; None where they are no figures."""
    if not high - low <= math.log(WIDEST):
        return None, None
    return math.exp(low), math.exp(high)


def _places(pairs: Sequence[tuple[Cell, Cell]]) -> list[Place]:
    """Where a row's outputs are, each once, whatever the passes."""
    return list(dict.fromkeys(cell.key.place for cell, _ in pairs))


def _unjudged(row: RowKey, places: Sequence[Place], run: Processes) -> str | None:
    """Why a row's times are not judged; hf:vanilla's are, on vanilla's row."""
    labels = _against(row.label), row.label
    for label in labels:
        whole = run.whole((label,), places)
        for side, which in ((False, "BASE"), (True, "NEW")):
            if next(run.cells(label, places, of_new=side), None) is None:
                return f"{which} has no {label} to compare with"
            if side not in whole.new:
                cells = list(run.cells(label, places, of_new=side))
                lost = sum(cell.times is None for cell in cells)
                return f"{which}'s {label} lost {lost} of {len(cells)} (void or failed)"
    if len(places) < MIN_PROMPTS:
        return f"fewer than {MIN_PROMPTS} prompts"
    left = run.whole(labels, places)
    for side, which in ((False, "BASE"), (True, "NEW")):
        if side not in left.new:
            return f"no run of {which} is whole (void or failed outputs)"
    if run.pairs and left.pairs < MIN_PAIRS:
        return f"of {run.pairs} pairs of runs {left.pairs} are whole (void or failed outputs)"
    return None


def _left_out(row: RowKey, places: Sequence[Place], run: Processes) -> str | None:
    """How many processes a row that is judged goes without."""
    every = len(run.outputs)
    lost = every - len(run.whole((_against(row.label), row.label), places).outputs)
    return f"{lost} of {every} runs are left out (void or failed outputs)" if lost else None


def _against(label: str) -> str:
    """The row whose times a row's are divided by."""
    return OUTSIDE if label == BASELINE else BASELINE


Figure = Callable[[Cell, Cell], float | None]
"""Of an output and of the one that it is compared with; null where either cannot say."""


def _series(
    row: RowKey, pairs: Sequence[tuple[Cell, Cell]], run: Processes
) -> Iterator[tuple[str, Series]]:
    """A row's figures."""
    places = _places(pairs)
    if row.label == BASELINE:
        apart = _apart(OUTSIDE, places, run)
        yield VANILLA, _one(VANILLA, row, places, run, _relative_whole, apart)
        return
    if row.label == OUTSIDE:
        return
    apart = _apart(BASELINE, places, run)
    yield DECODE, _one(DECODE, row, places, run, _relative_pace, apart)
    changed = {was.key.place for was, now in pairs if was.counters != now.counters}
    alike = [place for place in places if place not in changed]
    for figure, of in COMPONENTS.items():
        if figure == DRAFT and run.pair is not None:
            alone = _one(figure, row, alike, run, _draft_alone, apart)
            yield figure, replace(alone, disturbed=True)
        else:
            yield figure, _one(figure, row, alike, run, of, apart)


def _one(
    figure: str, row: RowKey, places: Sequence[Place], run: Processes, of: Figure, apart: float
) -> Series:
    """A figure's logarithms at every place of every process."""
    values = np.full((len(places), len(run.outputs)), np.nan)
    for p, process in enumerate(run.outputs):
        ours, theirs = (process.get(label, {}) for label in (row.label, _against(row.label)))
        for i, place in enumerate(places):
            own, other = ours.get(place), theirs.get(place)
            value = of(own, other) if own is not None and other is not None else None
            if value:
                values[i, p] = math.log(value)
    return Series(figure, values, np.array(run.new, dtype=bool), apart, run.pair)


def _apart(label: str, places: Sequence[Place], run: Processes) -> float:
    """Logarithm of how much slower a row that stands for the machine was on NEW's side."""
    found = []
    for place in places:
        sides: tuple[list[float], list[float]] = ([], [])
        for process, is_new in zip(run.outputs, run.new, strict=True):
            cell = process.get(label, {}).get(place)
            if cell is not None and (value := _whole(cell)):
                sides[is_new].append(value)
        if all(sides):
            found.append(math.log(median(sides[1]) / median(sides[0])))
    return median(found) if found else 0.0


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _time(cell: Cell, name: str) -> float | None:
    found: float | None = None if cell.times is None else getattr(cell.times, name)
    return found


def _whole(cell: Cell) -> float | None:
    """Time a token, prefill included: all that peers say."""
    return _ratio(_time(cell, "total"), cell.counters.n_tokens)


def _pace(cell: Cell) -> float | None:
    """Time a token after the first."""
    n = cell.counters.n_tokens
    return _ratio(_time(cell, "decode"), n and n - 1)


def _relative_whole(own: Cell, other: Cell) -> float | None:
    return _ratio(_whole(own), _whole(other))


def _relative_pace(own: Cell, other: Cell) -> float | None:
    """By decoding, or by all of it where one of the two does not tell prefill apart."""
    pace = _ratio(_pace(own), _pace(other))
    return _relative_whole(own, other) if pace is None else pace


def _verify(own: Cell, other: Cell) -> float | None:
    return _ratio(_time(own, "verify_forward"), _time(other, "verify_forward"))


def _draft(own: Cell, _: Cell) -> float | None:
    return _ratio(_time(own, "draft_forward"), _time(own, "verify_forward"))


def _draft_alone(own: Cell, _: Cell) -> float | None:
    return _time(own, "draft_fastest")


def _host(own: Cell, _: Cell) -> float | None:
    step = _ratio(_time(own, "host"), own.counters.steps)
    return _ratio(step, _time(own, "verify_forward"))


COMPONENTS: dict[str, Figure] = {VERIFY: _verify, DRAFT: _draft, HOST: _host}
