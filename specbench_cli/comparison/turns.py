"""Whether the runs of two sides took turns: then neighbours in time are compared with each other.

What slows a machine for a minute hits a run and the one after it alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.stats.regression import ALONE, MIN_PAIRS


def pairs_of(began: Sequence[str | None], new: Sequence[bool]) -> list[int] | None:
    """The number of the pair that each process belongs to, `ALONE` where its run has no partner.

    Args:
        began: when a process' run began, as text that sorts; None where that is not known.
        new: whether it is NEW's.

    Returns:
        None where one side's run followed the other's fewer than `MIN_PAIRS` times.
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
