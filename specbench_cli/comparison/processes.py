"""Processes of two sides, with the data for the timing gate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from specbench_cli.comparison.compared_output import ComparedOutput, PromptTurn
from specbench_cli.comparison.side import Side
from specbench_cli.stats.regression import MIN_PAIRS, UNPAIRED, has_partner
from specbench_cli.summary.speedups import MAX_UNTIMED

Outputs = Mapping[str, Mapping[PromptTurn, ComparedOutput]]
"""Outputs of a process, by label, then by prompt and turn."""


@dataclass(frozen=True, slots=True)
class ComparedProcesses:
    """Processes of both sides, BASE's first.

    new: True for processes of NEW.
    pair: index of each process's pair if the runs took turns, else None.
    lost: labels with missing times in each process.
    """

    outputs: tuple[Outputs, ...]
    new: tuple[bool, ...]
    pair: NDArray[np.int_] | None
    untimed_labels: tuple[frozenset[str], ...]

    @property
    def pairs(self) -> int:
        """Number of pairs; 0 if the runs did not take turns."""
        if self.pair is None:
            return 0
        return len(set(self.pair[has_partner(self.pair, np.array(self.new, dtype=bool))]))

    def select_outputs(
        self, label: str, places: Iterable[PromptTurn], *, of_new: bool
    ) -> Iterator[ComparedOutput]:
        """Yield a method's outputs for some prompts, from the processes of one side."""
        for own, is_new in zip(self.outputs, self.new, strict=True):
            if is_new == of_new:
                yield from _select_outputs(own.get(label, {}), places)

    def drop_incomplete(
        self, labels: Sequence[str], places: Collection[PromptTurn]
    ) -> ComparedProcesses:
        """Return the processes in which no label lost more than a tenth of its times."""
        kept = [
            all(label not in lost or _is_complete(own[label], places) for label in labels)
            for own, lost in zip(self.outputs, self.untimed_labels, strict=True)
        ]
        return ComparedProcesses(
            tuple(compress(self.outputs, kept)),
            tuple(compress(self.new, kept)),
            None if self.pair is None else self.pair[np.array(kept, dtype=bool)],
            tuple(compress(self.untimed_labels, kept)),
        )


def _select_outputs(
    cells: Mapping[PromptTurn, ComparedOutput], places: Iterable[PromptTurn]
) -> Iterator[ComparedOutput]:
    return (cell for place in places if (cell := cells.get(place)) is not None)


def _is_complete(own: Mapping[PromptTurn, ComparedOutput], places: Iterable[PromptTurn]) -> bool:
    cells = list(_select_outputs(own, places))
    return sum(cell.times is None for cell in cells) <= MAX_UNTIMED * len(cells)


def collect_processes(base: Side, new: Side) -> ComparedProcesses:
    """Return the processes of two sides."""
    sides = ((base, False), (new, True))
    both = [(cells, of_new) for side, of_new in sides for cells in side.processes]
    began = [at for side in (base, new) for at in side.start_times or (None,) * len(side.processes)]
    of_new = tuple(of_new for _, of_new in both)
    pair = pair_processes(began, of_new)
    return ComparedProcesses(
        tuple(_group_by_label(cells) for cells, _ in both),
        of_new,
        None if pair is None else np.array(pair),
        tuple(
            frozenset(cell.key.label for cell in cells if cell.times is None) for cells, _ in both
        ),
    )


def _group_by_label(cells: Iterable[ComparedOutput]) -> Outputs:
    found = defaultdict[str, dict[PromptTurn, ComparedOutput]](dict)
    for cell in cells:
        found[cell.key.label][cell.key.prompt_turn] = cell
    return dict(found)


def pair_processes(began: Sequence[str | None], new: Sequence[bool]) -> list[int] | None:
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
    return [number.get(run, UNPAIRED) for run in of]
