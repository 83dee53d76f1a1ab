"""Interface through which reports read records: of a run's folder, or of several runs."""

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

    path: Folder of the run. For several runs, the folder of the first one.
    """

    path: Path
    manifest: dict[str, Any]

    def records(self, prompt_ids: Container[str] | None = None) -> Iterator[Record]:
        """Return all records, or only the records of some prompts, with traces and token ids.

        May be called repeatedly.
        """
        ...

    def map_records(self, make: Callable[[Record], T]) -> Iterator[T]:
        """Return the result of a function for every record.

        Args:
            make: A function at the top level of a module, since other processes may call it.
        """
        ...

    def prompts(self) -> Iterator[Prompt]:
        """Return the stored prompts, if there are any."""
        ...


def drop_details(record: Record) -> Record:
    """Return a record without trace, token ids and drafts, which need much memory.

    Metrics do not need these. The origin of each token is kept if a lossy rule accepted some
    tokens, because counters alone do not show which levels were accepted.
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
