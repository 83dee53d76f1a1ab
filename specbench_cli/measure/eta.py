"""Estimate of the time left in a run, from the work done so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

DECAY = 0.5 ** (1 / 8)
"""Weight of an output relative to the next one in its method's speed: one half after eight outputs.
Recent outputs count more because the machine may become quiet or busy. Eight are enough that the
lengths of outputs average out."""


JUDGE_LOADING = 0.6
"""Time of the first verdict, which loads transformers, relative to the start of a process, which
loads torch and the models: 0.5 to 0.7 in runs of the embedded pair."""


@dataclass(slots=True)
class Work:
    """Work of one method in a repeat, in units (the maximum number of new tokens).

    due, done: Units in this repeat.
    later: Units in later repeats.
    spent: Seconds for `done`.
    recent_done, recent_spent: The same sums with more weight on recent outputs.
    """

    due: float
    later: float = 0.0
    done: float = 0.0
    spent: float = 0.0
    recent_done: float = 0.0
    recent_spent: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Count units and the seconds that they took."""
        self.done += units
        self.spent += seconds
        self.recent_done = self.recent_done * DECAY + units
        self.recent_spent = self.recent_spent * DECAY + seconds

    @property
    def seconds_per_unit(self) -> float:
        """Recent seconds per unit."""
        return self.recent_spent / self.recent_done


def estimate_seconds_left(work: Mapping[str, Work], elapsed: float) -> float | None:
    """Estimate the remaining seconds: the remaining work of each method at its speed.

    A method without finished work gets the average speed. Time outside of decoding (judging,
    writing) is added in proportion to its share so far.

    Args:
        elapsed: Seconds in which the finished work was done.

    Returns:
        None if no work is finished.
    """
    known = [row for row in work.values() if row.done]
    spent = sum(row.spent for row in known)
    if not spent:
        return None
    average = sum(row.recent_spent for row in known) / sum(row.recent_done for row in known)
    rest = sum(
        (max(0.0, row.due - row.done) + row.later) * (row.seconds_per_unit if row.done else average)
        for row in work.values()
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
        work: Mapping[str, Work],
        *,
        later_processes: int = 0,
        start_s: float = 0.0,
        first_judging_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._later, self._start, self._judging = later_processes, start_s, first_judging_s
        self._clock = clock
        self._started = clock()
        self._first_judging = 0.0
        self._judgings = 0

    @contextmanager
    def time_work(self, label: str, units: float) -> Iterator[None]:
        """Add the work units and the seconds of the `with` block to a method."""
        started = self._clock()
        yield
        self._work[label].add(units, self._clock() - started)

    @contextmanager
    def time_judging(self) -> Iterator[None]:
        """Time the `with` block as judging. The first time includes loading, so it does not predict
        others."""
        started = self._clock()
        yield
        self._judgings += 1
        if self._judgings == 1:
            self._first_judging = self._clock() - started

    def drop(self, label: str) -> None:
        """Remove the remaining work of a method."""
        row = self._work[label]
        row.due, row.later = row.done, 0.0

    def seconds_left(self) -> float | None:
        """Return the remaining seconds of the measurement; None if they are unknown."""
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


def estimate_report_seconds(start_s: float, methods: int, outputs: int) -> float:
    """Estimate the seconds from the last output to the end of the process.

    In this time records are read, intervals computed, figures and files written. It is Python work
    like the start of a process, so it is given in multiples of the start, which include the speed
    of the machine. The coefficients were fitted to the CPU times of five runs with 5 to 45 methods
    and 70 to 4365 outputs, with an error below 20%. 0.3 is added for the last window of runs with
    few methods. `benchmarks/times/time_left.py` measures the error.

    Args:
        start_s: CPU seconds of the start of the process, without waiting for uncached files.
    """
    return start_s * (1.0 + 0.12 * methods + 0.0015 * outputs)


def process_age() -> float:
    """Return the seconds since this process started."""
    started: float = psutil.Process().create_time()
    return time.time() - started
