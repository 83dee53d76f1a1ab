"""Who watches a run: called between prompts, never while the clock runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from specbench_cli.store.schema import Record


class RunView(Protocol):
    """A progress display, a log, or a stream of JSON events."""

    def planned(self, facts: dict[str, Any]) -> None:
        """The plan, before anything is loaded."""

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """The run's folder stands; `done` of its `cells` were there already."""

    def cell(self, record: Record) -> None:
        """A record was written."""

    def handed_over(self) -> None:
        """Another process goes on with the run, and shows itself."""

    def flags(self) -> list[str]:
        """Options that make another process of this run show itself in the same way."""

    def note(self, text: str) -> None:
        """Something a person should know."""
