"""Who watches a run: called between prompts, never while the clock runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specbench_cli.store.schema import Record


class RunProgress(NamedTuple):
    """How far a run is.

    Attributes:
        part: which part of it this is: "tuning", "pass 2 of 3"; empty if it has but one.
        prompt, prompts: how many prompts of it are done, of how many.
        left_s: seconds until all is measured, in the passes to come too, or of the tuning; None
            while nothing is known, and once nothing is left to measure.
    """

    part: str
    prompt: int
    prompts: int
    left_s: float | None


class RunView(Protocol):
    """A progress display, a log, or a stream of JSON events."""

    def planned(self, facts: dict[str, Any]) -> None:
        """The plan, before anything is loaded."""

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """The run's folder stands; `done` of its `cells` were there already."""

    def stage(self, text: str) -> None:
        """What is done now that is not a prompt: loading, warming up."""

    def prompt(self, progress: RunProgress) -> None:
        """Prompts were measured; their records may come later, when their window is settled."""

    def window(self, other_cpu: float | None, text: str) -> None:
        """A window was timed: other processes' share of the machine, and the same in words with
        what follows from it."""

    def show_record(self, record: Record) -> None:
        """A record was written."""

    def handed_over(self) -> None:
        """Another process goes on with the run, and shows itself."""

    def flags(self) -> list[str]:
        """Options that make another process of this run show itself in the same way."""

    def note(self, text: str) -> None:
        """Something a person should know."""
