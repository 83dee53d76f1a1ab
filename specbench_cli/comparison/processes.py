"""Processes of the two sides of a comparison, with the data for the timing gate.

A process is one run, or one repeat of a run.
"""

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
    """Processes of both sides of a comparison: first those of BASE, then those of NEW.

    outputs: outputs of each process.
    new: True for each process of NEW.
    pair: index of each process's pair. None if the runs of BASE and NEW did not alternate in time.
    untimed_labels: for each process, labels of the methods that lack a time.
    """

    outputs: tuple[Outputs, ...]
    new: tuple[bool, ...]
    pair: NDArray[np.int_] | None
    untimed_labels: tuple[frozenset[str], ...]

    @property
    def pairs(self) -> int:
        """Number of pairs of processes; 0 if the runs of BASE and NEW did not alternate in time."""
        if self.pair is None:
            return 0
        return len(set(self.pair[has_partner(self.pair, np.array(self.new, dtype=bool))]))

    def select_outputs(
        self, label: str, prompt_turns: Iterable[PromptTurn], *, of_new: bool
    ) -> Iterator[ComparedOutput]:
        """Yield a method's outputs for some prompts, from the processes of BASE or of NEW."""
        for own, is_new in zip(self.outputs, self.new, strict=True):
            if is_new == of_new:
                yield from _select_outputs(own.get(label, {}), prompt_turns)

    def drop_incomplete(
        self, labels: Sequence[str], prompt_turns: Collection[PromptTurn]
    ) -> ComparedProcesses:
        """Return the processes in which each method of `labels` has at least 90% of its times."""
        kept = [
            all(label not in untimed or _is_complete(own[label], prompt_turns) for label in labels)
            for own, untimed in zip(self.outputs, self.untimed_labels, strict=True)
        ]
        return ComparedProcesses(
            tuple(compress(self.outputs, kept)),
            tuple(compress(self.new, kept)),
            None if self.pair is None else self.pair[np.array(kept, dtype=bool)],
            tuple(compress(self.untimed_labels, kept)),
        )


def _select_outputs(
    outputs: Mapping[PromptTurn, ComparedOutput], prompt_turns: Iterable[PromptTurn]
) -> Iterator[ComparedOutput]:
    return (
        output for prompt_turn in prompt_turns if (output := outputs.get(prompt_turn)) is not None
    )


def _is_complete(
    own: Mapping[PromptTurn, ComparedOutput], prompt_turns: Iterable[PromptTurn]
) -> bool:
    outputs = list(_select_outputs(own, prompt_turns))
    return sum(output.times is None for output in outputs) <= MAX_UNTIMED * len(outputs)


def collect_processes(base: Side, new: Side) -> ComparedProcesses:
    """Return the processes of BASE and of NEW."""
    sides = ((base, False), (new, True))
    both = [(outputs, of_new) for side, of_new in sides for outputs in side.processes]
    start_times = [
        at for side in (base, new) for at in side.start_times or (None,) * len(side.processes)
    ]
    of_new = tuple(of_new for _, of_new in both)
    pair = pair_processes(start_times, of_new)
    return ComparedProcesses(
        tuple(_group_by_label(outputs) for outputs, _ in both),
        of_new,
        None if pair is None else np.array(pair),
        tuple(
            frozenset(output.key.label for output in outputs if output.times is None)
            for outputs, _ in both
        ),
    )


def _group_by_label(outputs: Iterable[ComparedOutput]) -> Outputs:
    found = defaultdict[str, dict[PromptTurn, ComparedOutput]](dict)
    for output in outputs:
        found[output.key.label][output.key.prompt_turn] = output
    return dict(found)


def pair_processes(start_times: Sequence[str | None], new: Sequence[bool]) -> list[int] | None:
    """Return the pair of each process if the runs of BASE and NEW alternated in time.

    If something slows down the machine for a minute, two consecutive runs are affected equally. So
    each run is paired with its neighbour in time. A process without a partner gets `UNPAIRED`.

    Args:
        start_times: start time of each process's run, as sortable text. None means unknown.
        new: True for each process of NEW.

    Returns:
        Index of the pair of each process, or None if there are fewer than `MIN_PAIRS` pairs.
    """
    processes = list(zip(start_times, new, strict=True))
    runs = sorted({(at, side) for at, side in processes if at is not None})
    pair_of: dict[tuple[str | None, bool], int] = {}
    index = 0
    while index + 1 < len(runs):
        one, other = runs[index : index + 2]
        if one[1] == other[1]:
            index += 1
        else:
            pair_of[one] = pair_of[other] = len(pair_of) // 2
            index += 2
    if len(pair_of) < 2 * MIN_PAIRS:
        return None
    return [pair_of.get(run, UNPAIRED) for run in processes]
