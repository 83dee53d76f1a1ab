"""The cells that a report lists one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbench_cli.store.schema import Record
from specbench_cli.summary import formats


@dataclass(slots=True)
class Incidents:
    """The cells a reader has to know of; collected while the records are read once.

    passes: what a pass is called, where that is not its number.
    """

    passes: Mapping[int, str] = field(default_factory=dict)
    differing: list[Sequence[object]] = field(default_factory=list)
    failed: list[Sequence[object]] = field(default_factory=list)
    void: list[Sequence[object]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Note a record, if there is anything to note."""
        pass_ = self.passes.get(record.pass_, record.pass_)
        cell = (record.label, record.prompt_id, record.turn, pass_)
        verdict = record.verdict
        if record.error is not None:
            self.failed.append((*cell, record.error))
        elif verdict is not None and verdict.kind in ("near-tie", "mismatch"):
            explained = {True: "yes", False: "no", None: None}[verdict.rounding]
            self.differing.append(
                (*cell, verdict.kind, verdict.position, formats.number(verdict.gap, 6), explained)
            )
        if record.void:
            self.void.append((*cell, formats.percent(record.other_cpu, 1)))
