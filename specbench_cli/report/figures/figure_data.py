"""Data that the figures of a run are drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench_cli.report.report_data import ReportData
from specbench_cli.store.schema import BASELINE, Record, Steps
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.pairing import untimed_reason
from specbench_cli.summary.summary import Summary


@dataclass(frozen=True)
class FigureData:
    """Summary and records of a run.

    Attributes:
        records: Label -> records of the method, without token ids and traces.
        prompt_tokens: (prompt id, turn) -> number of tokens of the prompt.
        traced: One record per method with its trace of forwards, all of the same prompt.
    """

    summary: Summary
    manifest: dict[str, Any]
    records: dict[str, list[Record]]
    prompt_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    traced: Sequence[Record] = ()

    @classmethod
    def from_report(cls, data: ReportData) -> FigureData:
        """Return the figures' data from the data of a report.

        One record per method is read again, because the records of a report have no traces.
        """
        found: dict[str, list[Record]] = {row.label: [] for row in data.summary.rows}
        for record in data.records:
            found[record.label].append(record)
        lengths = {(p.prompt_id, p.turn): len(p.ids) for p in data.run.prompts()}
        traced = list(_read_traces(data))
        return cls(data.summary, data.run.manifest, found, lengths, traced)

    @property
    def baseline(self) -> list[Record]:
        """Vanilla's records."""
        return self.records.get(BASELINE, [])

    @property
    def with_speedup(self) -> list[MethodSummary]:
        """All methods with a speedup except vanilla, in the order of the table."""
        rows = self.summary.rows
        return [row for row in rows if row.speedup is not None and row.label != BASELINE]

    def timed_records(self, label: str) -> list[Record]:
        """Return the records of a method whose times are trusted."""
        return [record for record in self.records.get(label, []) if untimed_reason(record) is None]

    def pairs(self, label: str) -> list[tuple[Record, Record]]:
        """Return pairs of records: vanilla's and the method's of the same prompt, turn and repeat.

        Pairs with a time that is not trusted are omitted.
        """
        vanilla = {(r.prompt_id, r.turn, r.pass_): r for r in self.timed_records(BASELINE)}
        own = {(r.prompt_id, r.turn, r.pass_): r for r in self.timed_records(label)}
        return [(vanilla[output], own[output]) for output in own if output in vanilla]

    def steps(self, label: str) -> list[Steps]:
        """Return the steps of a method's outputs. Outputs without reported steps are omitted."""
        return [r.steps for r in self.records[label] if r.steps is not None]


def _read_traces(data: ReportData) -> Iterator[Record]:
    """Yield one record per method with its trace.

    The records are of the first prompt with a trusted time.
    """
    timed = [record for record in data.records if untimed_reason(record) is None]
    if not timed:
        return
    wanted = {record.key for record in timed if _output_key(record) == _output_key(timed[0])}
    for record in data.run.records({timed[0].prompt_id}):
        if record.key in wanted:
            yield record
            wanted.remove(record.key)
        if not wanted:
            return


def _output_key(record: Record) -> tuple[str, int, int]:
    return record.prompt_id, record.turn, record.pass_
