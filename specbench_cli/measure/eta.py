"""Estimate of the time left in a run (ETA), from the work done so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

DECAY = 0.5 ** (1 / 8)
"""Factor by which the weight of an output in its method's speed falls with each further output.
After eight outputs, the weight is one half. Recent outputs count more, because the load of the
machine changes. Eight outputs are enough to average over different lengths."""


JUDGE_LOADING = 0.6
"""Time to load the transformers model for the first verdict, relative to the start of a process. A
process loads torch and the models. The ratio was 0.5 to 0.7 in runs of the embedded models."""


@dataclass(slots=True)
class Work:
    """Work of one method in a repeat, in units.

    One unit is one token of an output's maximum length. For example, an output of at most 128
    tokens is 128 units of work, even if it ends earlier.

    due: Units of the whole repeat.
    later: Units of all later repeats.
    done: Units that are finished.
    spent: Seconds that the finished units took.
    recent_done, recent_spent: Like `done` and `spent`, but recent outputs have more weight.
    """

    due: float
    later: float = 0.0
    done: float = 0.0
    spent: float = 0.0
    recent_done: float = 0.0
    recent_spent: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Add finished units of work, and the seconds that these units took."""
        self.done += units
        self.spent += seconds
        self.recent_done = self.recent_done * DECAY + units
        self.recent_spent = self.recent_spent * DECAY + seconds

    @property
    def seconds_per_unit(self) -> float:
        """Seconds per unit of work. Recent outputs have more weight than older ones."""
        return self.recent_spent / self.recent_done


def estimate_seconds_left(work: Mapping[str, Work], elapsed: float) -> float | None:
    """Estimate the seconds left in the run, from the remaining work and the speed of each method.

    A method without finished work gets the average speed. Judging and storing outputs also take
    time. The estimate assumes that their share of the time stays the same.

    Args:
        work: Work of each method, by label.
        elapsed: Seconds since the repeat began.

    Returns:
        Seconds, or None if no work is finished.
    """
    started = [each for each in work.values() if each.done]
    spent = sum(each.spent for each in started)
    if not spent:
        return None
    average = sum(each.recent_spent for each in started) / sum(each.recent_done for each in started)
    rest = sum(
        (max(0.0, each.due - each.done) + each.later)
        * (each.seconds_per_unit if each.done else average)
        for each in work.values()
    )
    return rest * max(1.0, elapsed / spent)


class EtaEstimator:
    """Estimator of the time left in a run. It times the methods of a repeat.

    Args:
        work: Work of each method, by label.
        later_processes: Number of processes that will measure the later repeats.
        start_s: Seconds that each of these later processes needs before its first prompt.
        first_judging_s: Expected seconds of the first judging of outputs. The first judging is
            slower, because it loads the transformers model.
        clock: Function that returns the time in seconds.
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
        """Time the `with` block. Add the time and the finished units of work to a method."""
        started = self._clock()
        yield
        self._work[label].add(units, self._clock() - started)

    @contextmanager
    def time_judging(self) -> Iterator[None]:
        """Time the judging of outputs in the `with` block.

        The time of the first judging is stored separately, because it includes loading a model.
        """
        started = self._clock()
        yield
        self._judgings += 1
        if self._judgings == 1:
            self._first_judging = self._clock() - started

    def drop(self, label: str) -> None:
        """Remove the remaining work of a method that is no longer measured."""
        row = self._work[label]
        row.due, row.later = row.done, 0.0

    def seconds_left(self) -> float | None:
        """Return the estimated seconds left until all outputs are measured. None if unknown."""
        spent = sum(each.spent for each in self._work.values())
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
    """Estimate the seconds that the report of a run takes, after the run's last output.

    The process reads records, computes intervals, and writes figures and files. This is Python
    work, like the start of a process. So the estimate is a multiple of the start time, which is
    longer on a slow machine. The coefficients were fitted to five runs with 5 to 45 methods and 70
    to 4365 outputs. The error was below 20%. `benchmarks/times/time_left.py` measures the error.

    Args:
        start_s: CPU seconds that the start of the process took.
        methods: Number of methods in the run.
        outputs: Number of outputs in the run.
    """
    return start_s * (1.0 + 0.12 * methods + 0.0015 * outputs)


def process_age() -> float:
    """Return the seconds since this process started."""
    started: float = psutil.Process().create_time()
    return time.time() - started
