"""How long the rest of a run takes, by what was seen of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

DECAY = 0.5 ** (1 / 8)
"""What an output weighs in its row's pace beside the next one: half after eight. Where a machine
becomes quiet, or busy, what it took before says little of what is left; eight and those before them
are enough that the lengths of outputs cancel."""


JUDGE_LOADING = 0.6
"""What judging first takes, which loads transformers, to the start of a process, which loads torch
and the models: 0.5 to 0.7 in runs of the embedded pair."""


@dataclass(slots=True)
class Work:
    """Work of one method in a repeat, in units (the maximum number of new tokens).

    due, done: units in this repeat. later: units in the repeats after it. spent: seconds for
    `done`.
    faded_done, faded_spent: the same sums, with more weight on recent outputs.
    """

    due: float
    later: float = 0.0
    done: float = 0.0
    spent: float = 0.0
    recent_done: float = 0.0
    recent_spent: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Count units that took so long."""
        self.done += units
        self.spent += seconds
        self.recent_done = self.recent_done * DECAY + units
        self.recent_spent = self.recent_spent * DECAY + seconds

    @property
    def seconds_per_unit(self) -> float:
        """Seconds a unit, of late."""
        return self.recent_spent / self.recent_done


def estimate_seconds_left(rows: Mapping[str, Work], elapsed: float) -> float | None:
    """Seconds that remain: of each row what is left, at its pace.

    A row that has done nothing yet counts as the others do. What is no cell's time (judging,
    writing) comes on top in the measure in which it has come so far.

    Args:
        elapsed: seconds in which all that is done was done.

    Returns:
        None while nothing is known.
    """
    known = [row for row in rows.values() if row.done]
    spent = sum(row.spent for row in known)
    if not spent:
        return None
    average = sum(row.recent_spent for row in known) / sum(row.recent_done for row in known)
    rest = sum(
        (max(0.0, row.due - row.done) + row.later) * (row.seconds_per_unit if row.done else average)
        for row in rows.values()
    )
    return rest * max(1.0, elapsed / spent)


class EtaEstimator:
    """Times of the methods in a repeat, from which the time left is estimated.

    Args:
        rows: Work of each method.
        later: Number of processes that measure the repeats after this one.
        start: Seconds that such a process needs before its first prompt.
        judging: Expected seconds of the first judging, which loads what later ones use.
        clock: Returns seconds.
    """

    def __init__(
        self,
        rows: Mapping[str, Work],
        *,
        later: int = 0,
        start: float = 0.0,
        judging: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = rows
        self._later, self._start, self._judging = later, start, judging
        self._clock = clock
        self._started = clock()
        self._first_judging = 0.0
        self._judgings = 0

    @contextmanager
    def spent(self, label: str, units: float) -> Iterator[None]:
        """Add the work units and the seconds of the `with` block to a method."""
        started = self._clock()
        yield
        self._work[label].add(units, self._clock() - started)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Judge cells inside. The first time loads what is needed later on, too, and tells nothing
        of how long the others take."""
        started = self._clock()
        yield
        self._judgings += 1
        if self._judgings == 1:
            self._first_judging = self._clock() - started

    def drop(self, label: str) -> None:
        """Nothing more is done for a row."""
        row = self._work[label]
        row.due, row.later = row.done, 0.0

    def left(self) -> float | None:
        """Seconds that remain until all is measured; None while nothing is known."""
        spent = sum(row.spent for row in self._work.values())
        other = self._clock() - self._started - self._first_judging - spent
        if self._judgings > 1:
            other *= self._judgings / (self._judgings - 1)
        rest = estimate_seconds_left(self._work, spent + other)
        if rest is None:
            return None
        first, due = (
            (self._first_judging, 0.0) if self._judgings else (self._judging, self._judging)
        )
        return rest + self._later * (self._start + first) + due


def estimate_report_seconds(start_s: float, rows: int, cells: int) -> float:
    """Seconds from the last cell to the end of the process: records are read, intervals drawn,
    figures and files written.

    It is work of Python's own, as the start of a process is, and is counted in such starts: how
    fast the machine is is in both. The shares were fitted to the processor times of five runs, of
    5 to 45 rows and 70 to 4365 cells, and meet them within 20%; 0.3 more are for the last window of
    a run with few methods. `benchmarks/times/time_left.py` measures the error of the estimate.

    Args:
        start_s: seconds of processor time that the process took to start. The first start after an
            installation waits for files that no cache holds yet: that is no part of them.
    """
    return start_s * (1.0 + 0.12 * rows + 0.0015 * cells)


def process_age() -> float:
    """Seconds since this process began."""
    started: float = psutil.Process().create_time()
    return time.time() - started
