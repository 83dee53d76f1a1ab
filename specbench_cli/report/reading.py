"""A run as reports see it: its records read once, its figures computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specbench_cli.report.facts import Facts
from specbench_cli.report.incidents import Incidents
from specbench_cli.report.summary import Summary, summarise
from specbench_cli.store.run_dir import RUNS, RunDir, latest
from specbench_cli.store.schema import Record


@dataclass(frozen=True, slots=True)
class Reading:
    """A run, read and computed."""

    run: RunDir
    facts: Facts
    summary: Summary
    incidents: Incidents

    @property
    def where(self) -> str:
        """The run as `specbench report` would be given it."""
        path = self.run.path
        usual = path.resolve().parent == RUNS.resolve()
        return "last" if usual and latest().name == path.name else str(path)


def read(run: RunDir) -> Reading:
    """Read a run's records and compute what there is to report."""
    incidents = Incidents()

    def noted() -> Iterator[Record]:
        for record in run.records():
            incidents.add(record)
            yield record

    summary = summarise(noted(), run.manifest)
    return Reading(run, Facts.of(run.manifest), summary, incidents)
