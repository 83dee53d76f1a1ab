"""Where a report's figures come from: a run's folder, or what is read as if it were one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Record

T = TypeVar("T")


class RecordSource(Protocol):
    """Records with a manifest that says how they were made.

    path: the folder; of several runs, the first one's.
    """

    path: Path
    manifest: dict[str, Any]

    def records(self, of: Container[str] | None = None) -> Iterator[Record]:
        """All records, with their traces and ids, or those of some prompts; may be read again and
        again, and the others are then read over."""
        ...

    def each(self, make: Callable[[Record], T]) -> Iterator[T]:
        """What a function of a module makes of every record."""
        ...

    def prompts(self) -> Iterator[Prompt]:
        """The prompts; none where they were not kept."""
        ...


def drop_details(record: Record) -> Record:
    """A record without traces, ids and drafts: most of a run's bulk, which no figure needs. Origins
    stay where counters do not say which levels were accepted: between relaxed ones."""
    if record.forwards is None and record.output_ids is None and record.drafts is None:
        return record
    relaxed = record.steps is not None and any(record.steps.relaxed or ())
    return replace(
        record,
        forwards=None,
        output_ids=None,
        origin=record.origin if relaxed else None,
        log_probs=None,
        drafts=None,
    )
