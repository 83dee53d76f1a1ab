"""The processes of two sides, by what the timing gate has to know of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from specbench_cli.comparison.cell import Cell, Place
from specbench_cli.comparison.side import Side
from specbench_cli.stats.regression import ALONE, MIN_PAIRS, partnered
from specbench_cli.summary.speedups import MAX_LOST

Outputs = Mapping[str, Mapping[Place, Cell]]
"""A process' outputs, by label and place."""


@dataclass(frozen=True, slots=True)
class Processes:
    """Every process of both sides, BASE's first.

    new: whether it is NEW's. pair: the number of its pair, where the sides' runs took turns. lost:
    the labels that lost any of their times there.
    """

    outputs: tuple[Outputs, ...]
    new: tuple[bool, ...]
    pair: NDArray[np.int_] | None
    lost: tuple[frozenset[str], ...]

    @property
    def pairs(self) -> int:
        """How many pairs there are; 0 where the runs took no turns."""
        if self.pair is None:
            return 0
        return len(set(self.pair[partnered(self.pair, np.array(self.new, dtype=bool))]))

    def cells(self, label: str, places: Iterable[Place], *, of_new: bool) -> Iterator[Cell]:
        """A label's outputs at some places, of one side's processes."""
        for own, is_new in zip(self.outputs, self.new, strict=True):
            if is_new == of_new:
                yield from _at(own.get(label, {}), places)

    def whole(self, labels: Sequence[str], places: Collection[Place]) -> Processes:
        """Those in which none of some labels lost more than a tenth of its times."""
        kept = [
            all(label not in lost or _whole(own[label], places) for label in labels)
            for own, lost in zip(self.outputs, self.lost, strict=True)
        ]
        return Processes(
            tuple(compress(self.outputs, kept)),
            tuple(compress(self.new, kept)),
            None if self.pair is None else self.pair[np.array(kept, dtype=bool)],
            tuple(compress(self.lost, kept)),
        )


def _at(cells: Mapping[Place, Cell], places: Iterable[Place]) -> Iterator[Cell]:
    return (cell for place in places if (cell := cells.get(place)) is not None)


def _whole(own: Mapping[Place, Cell], places: Iterable[Place]) -> bool:
    cells = list(_at(own, places))
    return sum(cell.times is None for cell in cells) <= MAX_LOST * len(cells)


def processes(base: Side, new: Side) -> Processes:
    """The processes of two sides."""
    sides = ((base, False), (new, True))
    both = [(cells, of_new) for side, of_new in sides for cells in side.processes]
    began = [at for side in (base, new) for at in side.began or (None,) * len(side.processes)]
    of_new = tuple(of_new for _, of_new in both)
    pair = pairs_of(began, of_new)
    return Processes(
        tuple(_by_label(cells) for cells, _ in both),
        of_new,
        None if pair is None else np.array(pair),
        tuple(
            frozenset(cell.key.label for cell in cells if cell.times is None) for cells, _ in both
        ),
    )


def _by_label(cells: Iterable[Cell]) -> Outputs:
    found = defaultdict[str, dict[Place, Cell]](dict)
    for cell in cells:
        found[cell.key.label][cell.key.place] = cell
    return dict(found)


def pairs_of(began: Sequence[str | None], new: Sequence[bool]) -> list[int] | None:
    """Return the pair of each process if the runs of both sides took turns.

    Anything that slows the machine for a minute affects a run and the next one equally, so each run
    is compared with its neighbour in time. A process without a partner is `ALONE`.

    Args:
        began: start time of each process's run, as sortable text. None means unknown.
        new: True for each process of NEW.

    Returns:
        Index of the pair of each process, or None if there are fewer than `MIN_PAIRS` pairs.
    """
    of = list(zip(began, new, strict=True))
    runs = sorted({(at, side) for at, side in of if at is not None})
    number: dict[tuple[str | None, bool], int] = {}
    place = 0
    while place + 1 < len(runs):
        one, other = runs[place : place + 2]
        if one[1] == other[1]:
            place += 1
        else:
            number[one] = number[other] = len(number) // 2
            place += 2
    if len(number) < 2 * MIN_PAIRS:
        return None
    return [number.get(run, ALONE) for run in of]
