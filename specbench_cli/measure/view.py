"""Interface of the views that show a run. They are never called while a timer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specbench_cli.store.schema import Record


class PromptProgress(NamedTuple):
    """Progress of a run.

    Attributes:
        part: Part of the run, like "tuning" or "pass 2 of 3". Empty if there is only one.
        prompt, prompts: Number of finished prompts, and of all prompts.
        left_s: Seconds left, including later repeats. None if unknown, or if nothing is left.
    """

    part: str
    prompt: int
    prompts: int
    left_s: float | None


class RunView(Protocol):
    """A progress display, a log, or a stream of JSON events."""

    def planned(self, facts: dict[str, Any]) -> None:
        """Show the plan, before anything is loaded."""

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """Show that the folder exists, with `done` of its `cells` outputs already in it."""

    def stage(self, text: str) -> None:
        """Show the current work other than prompts, such as loading or the warm-up."""

    def prompt(self, progress: PromptProgress) -> None:
        """Show the progress. The records of the prompts may follow when their window is closed."""

    def window(self, other_cpu: float | None, text: str) -> None:
        """Show the result of a window: CPU share of other processes, and what follows."""

    def show_record(self, record: Record) -> None:
        """Show a record that was stored."""

    def hand_over(self) -> None:
        """Stop showing, because another process continues the run and shows it."""

    def flags(self) -> list[str]:
        """Return the options that make another process of this run show it in the same way."""

    def note(self, text: str) -> None:
        """Show a note to the user."""
