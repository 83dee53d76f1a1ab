"""Detection of noisy timings: the CPU share of other processes while outputs were timed.

Outputs are timed in windows. A window is timed again if other processes used too much CPU.

Share = (busy time of all CPUs, steal included, minus own CPU time) / (elapsed time x CPUs). Own CPU
time is that of this process, its descendants, and the processes that decode for it. A window lasts
at least a second: the kernel counts in ticks of 10 ms, which would look like a load in a shorter
window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import psutil

WINDOW_S = 1.0
"""Shortest window that says something."""

CEILING = 0.05
"""Share above which a window's times are not believed."""

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""States of a CPU in which it works; the kernel counts guests' time within `user` and `nice`."""


REPEATS = 2  # how often a noisy window is measured again before its times are given up
VOID = "times void"
"""What is said of a window whose times were given up."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Seconds: of the clock, of all CPUs in any state, of all CPUs at work, of our process tree."""

    clock: float
    total: float
    busy: float
    own: float


class QuietMeter:
    """Measures other processes' share over a window.

    Open it, run cells until `full()`, close it. Reading costs some milliseconds, so read outside
    timers. A process that has left the tree (its parent died) counts as somebody else's.

    Args:
        beside: processes outside of the tree that work for this one; asked as a window opens.
    """

    def __init__(self, beside: Callable[[], Collection[int]] = tuple) -> None:
        self._start: _Reading | None = None
        self._beside = beside
        self._pids: Collection[int] = ()

    def open(self) -> None:
        """Start a window, dropping one that is open."""
        self._pids = self._beside()
        self._start = _read(self._pids)

    def elapsed(self) -> float:
        """Seconds since the window was opened, 0 if none is."""
        return time.monotonic() - self._start.clock if self._start else 0.0

    def full(self) -> bool:
        """Whether the window is long enough to be closed."""
        return self.elapsed() >= WINDOW_S

    def close(self) -> float | None:
        """End the window and return the share, from 0 to 1; idles first until the window is full.

        Returns:
            None where the system's counters stand still or cannot be read: nothing is known then.

        Raises:
            RuntimeError: no window is open.
        """
        start = self._start
        if start is None:
            raise RuntimeError("close() without open()")
        time.sleep(max(0.0, WINDOW_S - self.elapsed()))
        self._start = None
        return _share(start, _read(self._pids))


class Measurable(Protocol):
    """A cell: it can be measured, again if need be, and is told how quiet that was."""

    def measure(self) -> None:
        """Run and time it; a later call replaces the earlier one's result."""

    def settle(self, other_cpu: float | None, void: bool) -> None:
        """Take the window's verdict."""


class Windows:
    """Joins cells until they fill a window and settles them together.

    Args:
        meter: who measures the others.
        allow_noise: keep the times of noisy windows.
        between: called before each window.
        told: called after each, while none is open, with the others' share and what that means.
    """

    def __init__(
        self,
        meter: QuietMeter,
        *,
        allow_noise: bool,
        between: Callable[[], object] | None = None,
        told: Callable[[float | None, str], object] | None = None,
    ) -> None:
        self._meter = meter
        self._allow_noise = allow_noise
        self._between = between
        self._told = told
        self._cells: list[Measurable] = []

    def run(self, cell: Measurable) -> None:
        """Measure a cell inside the current window; settles the window once it is full."""
        if not self._cells:
            if self._between is not None:
                self._between()
            self._meter.open()
        cell.measure()
        self._cells.append(cell)
        if self._meter.full():
            self.settle()

    @property
    def open(self) -> bool:
        """Whether cells wait for their window's end."""
        return bool(self._cells)

    def settle(self) -> None:
        """End the window, measuring its cells again while it was too noisy, and tell them."""
        if not self._cells:
            return
        share = self._meter.close()
        for again in range(REPEATS):
            if self._allow_noise or not noisy(share):
                break
            self._tell(share, f"repeat {again + 2} of {REPEATS + 1}")
            self._meter.open()
            for cell in self._cells:
                cell.measure()
            share = self._meter.close()
        self._tell(share, "times kept" if self._allow_noise else VOID)
        for cell in self._cells:
            cell.settle(share, noisy(share) and not self._allow_noise)
        self._cells = []

    def _tell(self, share: float | None, if_noisy: str) -> None:
        """Say how quiet a window was, and what becomes of it if it was not."""
        if self._told is None:
            return
        if share is None:
            self._told(share, "other CPU unknown")
        else:
            self._told(share, f"{share:.0%} other CPU, {if_noisy}" if noisy(share) else "quiet")


def noisy(share: float | None) -> bool:
    """Return True if other processes used too much CPU for the timing to be trusted."""
    return share is not None and share > CEILING


def tree_seconds(pid: int | None = None) -> float:
    """CPU seconds of a process, this one if none is named, and all its descendants, those already
    reaped included; 0 of a process that is no more."""
    seconds = 0.0
    try:
        root = psutil.Process(pid)
        tree = (root, *root.children(recursive=True))
    except psutil.NoSuchProcess:
        return seconds
    for process in tree:
        try:
            seconds += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # ended since it was listed: its time is in its parent's next reading
    return seconds


def _share(start: _Reading, end: _Reading) -> float | None:
    capacity = (end.clock - start.clock) * (psutil.cpu_count() or 1)
    if not 0 < start.total < end.total:
        return None
    others = (end.busy - start.busy) - (end.own - start.own)
    return min(1.0, max(0.0, others / capacity))


def _read(beside: Collection[int] = ()) -> _Reading:
    try:
        cpu = psutil.cpu_times()
        total, busy = sum(cpu), sum(getattr(cpu, state, 0.0) for state in BUSY)
        own = tree_seconds() + sum(map(tree_seconds, beside))
    except (OSError, psutil.Error):
        total = busy = own = 0.0
    return _Reading(time.monotonic(), total, busy, own)
