"""Source of a report's records: the folder of a run, or several runs combined."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Record

T = TypeVar("T")


class RecordSource(Protocol):
    """Records of a run and its manifest.

    path: folder of the run; for several runs, the folder of the first.
    """

    path: Path
    manifest: dict[str, Any]

    def records(self, prompt_ids: Container[str] | None = None) -> Iterator[Record]:
        """Return all records, with traces and ids, or only those of some prompts.

        May be called repeatedly.
        """
        ...

    def map_records(self, make: Callable[[Record], T]) -> Iterator[T]:
        """Return the results of a function, at the top level of a module, for every record."""
        ...

    def prompts(self) -> Iterator[Prompt]:
        """Return the prompts; none if they were not stored."""
        ...


def drop_details(record: Record) -> Record:
    """Return a record without traces, ids and drafts, which take most memory and no metric needs.

    Origins are kept only if there are relaxed levels: then counters do not determine which levels
    were accepted.
    """
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
