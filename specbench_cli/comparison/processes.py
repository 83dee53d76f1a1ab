"""The processes of two sides, by what the timing gate has to know of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from specbench_cli.comparison.cell import Cell, Place
from specbench_cli.comparison.side import Side
from specbench_cli.comparison.turns import pairs_of
from specbench_cli.report.numbers.speedups import MAX_LOST
from specbench_cli.stats.regression import partnered

Outputs = Mapping[tuple[str, Place], Cell]
"""A process' outputs, by label and place."""
Pairs = Sequence[tuple[Cell, Cell]]


@dataclass(frozen=True, slots=True)
class Processes:
    """Every process of both sides, BASE's first.

    new: whether it is NEW's. pair: the number of its pair, where the sides' runs took turns.
    """

    outputs: tuple[Outputs, ...]
    new: tuple[bool, ...]
    pair: NDArray[np.int_] | None

    @property
    def pairs(self) -> int:
        """How many pairs there are; 0 where the runs took no turns."""
        if self.pair is None:
            return 0
        return len(set(self.pair[partnered(self.pair, np.array(self.new, dtype=bool))]))

    def cells(self, label: str, pairs: Pairs, *, of_new: bool) -> Iterator[Cell]:
        """A label's outputs at the pairs' places, of one side's processes."""
        places = {place_of(cell) for cell, _ in pairs}
        for own, is_new in zip(self.outputs, self.new, strict=True):
            if is_new == of_new:
                yield from (c for place in places if (c := own.get((label, place))) is not None)

    def whole(self, labels: Sequence[str], pairs: Pairs) -> Processes:
        """Those in which none of some labels lost more than a tenth of its times."""
        places = {place_of(cell) for cell, _ in pairs}
        kept = [all(_whole(own, label, places) for label in labels) for own in self.outputs]
        return Processes(
            tuple(compress(self.outputs, kept)),
            tuple(compress(self.new, kept)),
            None if self.pair is None else self.pair[np.array(kept, dtype=bool)],
        )


def _whole(outputs: Outputs, label: str, places: Iterable[Place]) -> bool:
    cells = [c for place in places if (c := outputs.get((label, place))) is not None]
    return sum(cell.times is None for cell in cells) <= MAX_LOST * len(cells)


def processes(base: Side, new: Side) -> Processes:
    """The processes of two sides."""
    sides = ((base, False), (new, True))
    both = [(cells, of_new) for side, of_new in sides for cells in side.processes]
    began = [at for side in (base, new) for at in side.began or (None,) * len(side.processes)]
    of_new = tuple(of_new for _, of_new in both)
    pair = pairs_of(began, of_new)
    return Processes(
        tuple({(cell.key.label, place_of(cell)): cell for cell in cells} for cells, _ in both),
        of_new,
        None if pair is None else np.array(pair),
    )


def place_of(cell: Cell) -> Place:
    """A cell's place."""
    return cell.key.prompt_id, cell.key.turn
