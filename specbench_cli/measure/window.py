"""A quiet machine or no figure: cells are timed in windows, and a noisy window is timed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from specbench_cli.measure.quiet import CEILING

REPEATS = 2  # how often a noisy window is measured again before its times are given up
VOID = "times void"
"""What is said of a window whose times were given up."""


class Meter(Protocol):
    """Measures other processes' share of the machine (`measure.quiet.QuietMeter`)."""

    def open(self) -> None:
        """Start a window."""

    def full(self) -> bool:
        """Whether the window is long enough to say something."""

    def close(self) -> float | None:
        """End it, idling until it is full: the others' share; None where unknown."""


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
        meter: Meter,
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
    """Whether others took too much of the machine for times to be believed."""
    return share is not None and share > CEILING
