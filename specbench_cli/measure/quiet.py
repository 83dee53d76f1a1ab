"""How much of the machine other processes used while something was timed.

Share = (busy time of all CPUs, steal included, minus the CPU time of this process, its descendants
and what decodes for it) / (elapsed time x CPUs), over windows of at least a second (design, section
7): the kernel counts in ticks of 10 ms, which in a shorter window would look like a load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import psutil

WINDOW_S = 1.0
"""Shortest window that says something."""

CEILING = 0.05
"""Share above which a window's times are not believed."""

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""States of a CPU in which it works; the kernel counts guests' time within `user` and `nice`."""


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


def wait_until_quiet(limit_s: float, ceiling: float = CEILING) -> float | None:
    """Idle until a window's share is at most `ceiling`, or `limit_s` seconds have passed.

    Returns:
        The last window's share; None at once where it cannot be measured.
    """
    meter = QuietMeter()
    deadline = time.monotonic() + limit_s
    while True:
        meter.open()
        share = meter.close()
        if share is None or share <= ceiling or time.monotonic() >= deadline:
            return share


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
