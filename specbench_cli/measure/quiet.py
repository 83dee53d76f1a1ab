"""Detection of noisy timings, from the CPU share of other processes while outputs are timed.

Outputs are timed in windows. If other processes used too much CPU during a window, the outputs of
this window are timed again.

The share is (busy time of all CPUs - own CPU time) / (elapsed time x number of CPUs). Busy time
includes time that a hypervisor takes from this machine. Own CPU time is the time of this process,
its descendants, and the processes that decode for it.

A window lasts at least a second. The kernel counts CPU time in ticks of 10 ms, which is too coarse
for shorter windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import psutil

WINDOW_S = 1.0
"""Minimum length of a window in seconds."""

NOISE_LIMIT = 0.05
"""Limit of the CPU share of other processes. Above it, the times of a window are not trusted."""

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""CPU states that count as busy (`psutil.cpu_times`). `guest` is part of `user` and `nice`."""


RETRIES = 2
"""Maximum number of times that a noisy window is measured again."""
TIMES_NOISY = "times noisy"
"""Message for a window that stayed noisy, so that its times are not stored."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Values of the system's CPU time counters at one moment, in seconds.

    clock: Time of the reading.
    total: CPU time of all CPUs in any state.
    busy: CPU time of all CPUs in busy states.
    own: CPU time of this process, its descendants and its helpers.
    """

    clock: float
    total: float
    busy: float
    own: float


class NoiseMeter:
    """Meter of the CPU share that other processes use during a window.

    First call `open`. Measure outputs until `is_full` returns True. Then call `close`. `open` and
    `close` take some milliseconds, so do not call them while an output is timed. A descendant
    counts as another process if its parent has ended.

    Args:
        helpers: Function that returns the ids of helpers. These are processes that work for this
            process but are not its descendants. The meter calls the function when a window
            opens.
    """

    def __init__(self, helpers: Callable[[], Collection[int]] = tuple) -> None:
        self._start: _Reading | None = None
        self._helpers = helpers
        self._pids: Collection[int] = ()

    def open(self) -> None:
        """Start a window. If a window is already open, discard it."""
        self._pids = self._helpers()
        self._start = _read(self._pids)

    def elapsed(self) -> float:
        """Return the seconds since the window was opened. Return 0 if no window is open."""
        return time.monotonic() - self._start.clock if self._start else 0.0

    def is_full(self) -> bool:
        """Return True if the window is long enough."""
        return self.elapsed() >= WINDOW_S

    def close(self) -> float | None:
        """Wait until the window is full, end it, and return the CPU share of other processes.

        Returns:
            A number from 0 to 1. None if the system's counters do not change or cannot be read.

        Raises:
            RuntimeError: no window is open.
        """
        start = self._start
        if start is None:
            raise RuntimeError("close() without open()")
        time.sleep(max(0.0, WINDOW_S - self.elapsed()))
        self._start = None
        return _other_cpu_share(start, _read(self._pids))


class Measurable(Protocol):
    """Interface of a measurement that can be repeated if the machine was noisy."""

    def measure(self) -> None:
        """Do the work and time it. A second call replaces the result of the first."""

    def finish(self, other_cpu: float | None, noisy: bool) -> None:
        """Accept the last result. After this call, `measure` is not called again.

        Args:
            other_cpu: CPU share of other processes during the measurement. None if unknown.
            noisy: True if `other_cpu` was too high, so that the times must not be used.
        """


class MeasurementWindows:
    """Sequence of measurement windows.

    All measurements in a window are accepted or repeated together.

    Args:
        meter: Noise meter.
        allow_noise: True keeps the times of noisy windows.
        before_window: Function that is called before each window.
        on_window: Function that is called after each window, with the CPU share of other processes
            and a text for the user.
    """

    def __init__(
        self,
        meter: NoiseMeter,
        *,
        allow_noise: bool,
        before_window: Callable[[], object] | None = None,
        on_window: Callable[[float | None, str], object] | None = None,
    ) -> None:
        self._meter = meter
        self._allow_noise = allow_noise
        self._before_window = before_window
        self._on_window = on_window
        self._measurables: list[Measurable] = []

    def run(self, measurable: Measurable) -> None:
        """Do a measurement in the current window, or in a new one.

        Close the window if it is full.
        """
        if not self._measurables:
            if self._before_window is not None:
                self._before_window()
            self._meter.open()
        measurable.measure()
        self._measurables.append(measurable)
        if self._meter.is_full():
            self.close()

    @property
    def open(self) -> bool:
        """True if a window is open."""
        return bool(self._measurables)

    def close(self) -> None:
        """End the window. If it was too noisy, repeat its measurements. Then finish all of them."""
        if not self._measurables:
            return
        share = self._meter.close()
        for again in range(RETRIES):
            if self._allow_noise or not is_noisy(share):
                break
            self._report(share, f"repeat {again + 2} of {RETRIES + 1}")
            self._meter.open()
            for measurable in self._measurables:
                measurable.measure()
            share = self._meter.close()
        self._report(share, "times kept" if self._allow_noise else TIMES_NOISY)
        for measurable in self._measurables:
            measurable.finish(share, is_noisy(share) and not self._allow_noise)
        self._measurables = []

    def _report(self, share: float | None, if_noisy: str) -> None:
        """Report the CPU share of other processes in a window.

        Args:
            share: The CPU share. None if unknown.
            if_noisy: Text for a noisy window, which says how its measurements are treated.
        """
        if self._on_window is None:
            return
        if share is None:
            self._on_window(share, "other CPU unknown")
        else:
            self._on_window(
                share, f"{share:.0%} other CPU, {if_noisy}" if is_noisy(share) else "quiet"
            )


def is_noisy(share: float | None) -> bool:
    """Return True if other processes used too much CPU for the timing to be trusted."""
    return share is not None and share > NOISE_LIMIT


def tree_seconds(pid: int | None = None) -> float:
    """Return the CPU seconds that a process and all its descendants have used.

    The result includes descendants that have ended.

    Args:
        pid: Id of the process. None means this process. If the process has ended, the result is
            0.
    """
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
            continue  # it has just ended: the next reading includes its time in its parent's time
    return seconds


def _other_cpu_share(start: _Reading, end: _Reading) -> float | None:
    capacity = (end.clock - start.clock) * (psutil.cpu_count() or 1)
    if not 0 < start.total < end.total:
        return None
    other_seconds = (end.busy - start.busy) - (end.own - start.own)
    return min(1.0, max(0.0, other_seconds / capacity))


def _read(helper_pids: Collection[int] = ()) -> _Reading:
    try:
        cpu = psutil.cpu_times()
        total, busy = sum(cpu), sum(getattr(cpu, state, 0.0) for state in BUSY)
        own = tree_seconds() + sum(map(tree_seconds, helper_pids))
    except (OSError, psutil.Error):
        total = busy = own = 0.0
    return _Reading(time.monotonic(), total, busy, own)
