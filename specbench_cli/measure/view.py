"""Interface of the displays that show the progress of a run to the user.

The measurement never calls a display while an output is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specbench_cli.store.schema import Record


class PromptProgress(NamedTuple):
    """Progress of a run, in prompts.

    Attributes:
        part: Name of the current part of the run, such as "tuning" or "pass 2 of 3". Empty if the
            run has only one part.
        prompt: Number of measured prompts.
        prompts: Number of all prompts.
        left_s: Estimated seconds left, including later repeats. None if unknown, or if the run is
            over.
    """

    part: str
    prompt: int
    prompts: int
    left_s: float | None


class RunView(Protocol):
    """Interface of a display: a progress bar, a log, or a stream of JSON events."""

    def planned(self, facts: dict[str, Any]) -> None:
        """Show the plan of the run, before models are loaded."""

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """Show the folder of the run after it was created.

        Args:
            cells: Number of outputs that the run will have at its end.
            done: Number of outputs that are already stored.
            run_dir: The folder.
        """

    def stage(self, text: str) -> None:
        """Show current work other than decoding prompts, such as loading models."""

    def prompt(self, progress: PromptProgress) -> None:
        """Show the number of measured prompts. The records of these prompts may be shown later."""

    def window(self, other_cpu: float | None, text: str) -> None:
        """Show how noisy the machine was during a window of measurements.

        Args:
            other_cpu: CPU share of other processes, from 0 to 1. None if unknown.
            text: Text with the CPU share, and what happens to the measurements of the window.
        """

    def show_record(self, record: Record) -> None:
        """Show a record that was stored."""

    def hand_over(self) -> None:
        """Stop this display, because another process continues the run and shows the progress."""

    def flags(self) -> list[str]:
        """Return the command-line options that select the same display in another process."""

    def note(self, text: str) -> None:
        """Show a note to the user."""
