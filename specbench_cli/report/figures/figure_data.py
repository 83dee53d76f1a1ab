"""Data of figures: a run's summary, and its records without ids and traces."""

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
    """Records and summary of a run, for figures.

    Attributes:
        records: label -> its records without ids and traces, in the order of the summary.
        prompt_tokens: Number of tokens by prompt and turn.
        traced: Records of one output per method, all of the same prompt, with their traces.
    """

    summary: Summary
    manifest: dict[str, Any]
    records: dict[str, list[Record]]
    prompt_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    traced: Sequence[Record] = ()

    @classmethod
    def from_report(cls, data: ReportData) -> FigureData:
        """Return the data of a run. Reads one output per method again, with its trace."""
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
        """Methods that have a speedup, in the table's order, without vanilla."""
        rows = self.summary.rows
        return [row for row in rows if row.speedup is not None and row.label != BASELINE]

    def timed_records(self, label: str) -> list[Record]:
        """Return a method's records that have valid times."""
        return [record for record in self.records.get(label, []) if untimed_reason(record) is None]

    def pairs(self, label: str) -> list[tuple[Record, Record]]:
        """Return vanilla's and a method's records of the same outputs in pairs, if both times are
        valid."""
        vanilla = {(r.prompt_id, r.turn, r.pass_): r for r in self.timed_records(BASELINE)}
        own = {(r.prompt_id, r.turn, r.pass_): r for r in self.timed_records(label)}
        return [(vanilla[output], own[output]) for output in own if output in vanilla]

    def steps(self, label: str) -> list[Steps]:
        """Return the steps of a method's outputs that report them."""
        return [r.steps for r in self.records[label] if r.steps is not None]


def _read_traces(data: ReportData) -> Iterator[Record]:
    """Yield each method's record of the first prompt that has times, with its trace."""
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
