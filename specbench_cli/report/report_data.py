"""Data of a report: the records of a run, read once, and the results computed from them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli.errors import UsageError
from specbench_cli.report.spec_bench.files import ImportedAnswers
from specbench_cli.store.jsonl import pause_garbage_collection
from specbench_cli.store.matrix import run_folders
from specbench_cli.store.record_queries import no_output_error
from specbench_cli.store.run_dir import RunDir, find_latest
from specbench_cli.store.schema import BASELINE, Record
from specbench_cli.summary import formats
from specbench_cli.summary.combined_runs import combine_runs
from specbench_cli.summary.compatibility import Incompatibility, find_incompatibilities, short_names
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.source import RecordSource, drop_details
from specbench_cli.summary.summary import Summary, summarise
from specbench_cli.summary.unranked import join_forced

if TYPE_CHECKING:
    from specbench_cli.report.spec_bench.table import SpecBench

_SAME_TOKENS = ("greedy", "coupled")
"""Decoding rules with which vanilla returns the same tokens in every run."""
_MAX_LISTED = 12
"""Maximum number of differences between runs that an error lists."""


@dataclass(slots=True)
class Incidents:
    """Outputs that a reader must know about: they differ from vanilla's, failed, or are noisy.

    Attributes:
        repeat_names: Number of a repeat -> name of the repeat in the report, if several runs are
            combined. differing, failed, noisy: Rows of the tables that list such outputs.
    """

    repeat_names: Mapping[int, str] = field(default_factory=dict)
    differing: list[Sequence[object]] = field(default_factory=list)
    failed: list[Sequence[object]] = field(default_factory=list)
    noisy: list[Sequence[object]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Add an output to the lists of differing, failed and noisy outputs, where it belongs."""
        pass_ = self.repeat_names.get(record.pass_, record.pass_)
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
            self.noisy.append((*cell, formats.percent(record.other_cpu, 1)))


@dataclass(frozen=True, slots=True)
class ReportData:
    """Data of a report on one run, or on several runs that are combined.

    Attributes:
        records: All records without token ids, origins and traces, to save memory.
            `run.records()` reads the whole records again.
        sources: The runs that `run` consists of.
        parallel: True if a method ran on several workers.
        spec_bench: Results by Spec-Bench's formulas, if requested.
    """

    run: RecordSource
    facts: Facts
    summary: Summary
    incidents: Incidents
    records: Sequence[Record] = ()
    sources: Sequence[RecordSource] = ()
    parallel: bool = False
    spec_bench: SpecBench | None = None

    @property
    def name(self) -> str:
        """Names of the runs, joined by "+"."""
        return "+".join(source.path.name for source in self.sources or (self.run,))

    @property
    def report_arguments(self) -> str:
        """Arguments with which `specbench report` reads these runs again."""
        sources = self.sources or (self.run,)
        if self.facts.targets:
            return _path_argument(sources[0].path.parent)
        forced = " --force" if self.facts.forced else ""
        return " ".join(map(_source_arguments, sources)) + forced


def _source_arguments(source: RecordSource) -> str:
    if isinstance(source, ImportedAnswers):
        return " ".join(shlex.quote(str(file)) for file in source.files)
    return _path_argument(source.path)


def _path_argument(path: Path) -> str:
    with suppress(UsageError):  # no run has finished
        if find_latest().resolve() == path.resolve():
            return "last"
    return shlex.quote(str(path))


def read_report_data(run: RecordSource) -> ReportData:
    """Read a run's records and compute its results."""
    with pause_garbage_collection():
        loaded = _LightRecords.read(run)
        incidents = Incidents()
        for record in loaded.records:
            incidents.add(record)
        summary = summarise(loaded.records, run.manifest)
    facts = Facts.from_manifest(run.manifest)
    return ReportData(run, facts, summary, incidents, loaded.records, (run,), loaded.parallel)


def read_matrix(path: Path, *, force: bool = False) -> ReportData:
    """Read all started runs of a matrix (several targets or drafts) as one.

    Raises:
        UsageError: No run was started, or the runs differ in more than their models.
    """
    runs = [RunDir.open(each) for each in run_folders(path) if RunDir.holds_run(each)]
    if not runs:
        raise UsageError(f"{path}: none of its runs has started", f"specbench run --resume {path}")
    return read_runs(runs, force=force, targets=True)


def read_runs(
    runs: Sequence[RecordSource], *, force: bool = False, targets: bool = False
) -> ReportData:
    """Read compatible runs as one.

    Args:
        force: True to read incompatible runs, too. Every label then contains the name of its run.
        targets: True if the runs have several targets or drafts. Every label then contains the
            name of its run, too.

    Raises:
        UsageError: The runs are not compatible. The message names the differences.
    """
    if len(runs) == 1 and not targets:
        return read_report_data(runs[0])
    short = short_names([run.path for run in runs])
    differing = find_incompatibilities(runs, short, targets=targets)
    _check_compatible(differing, runs, force)
    with pause_garbage_collection():
        loaded = [_LightRecords.read(run) for run in runs]
    if not differing and not targets:
        differing = _compare_vanilla([own.vanilla for own in loaded], short)
        _check_compatible(differing, runs, force)
    forced = [str(difference) for difference in differing]
    together = combine_runs(runs, short, [own.records for own in loaded], forced, targets=targets)
    incidents, records = Incidents(together.repeat_names), list[Record]()
    for own, names in zip(loaded, together.run_names, strict=True):
        records += map(names.rename, own.records)
    for record in records:
        incidents.add(record)
    if forced or targets:
        parts = [
            summarise(own.records, run.manifest) for own, run in zip(loaded, runs, strict=True)
        ]
        labels = [names.labels for names in together.run_names]
        summary = join_forced(parts, labels, by_method=targets)
    else:
        summary = summarise(records, together.manifest)
    return ReportData(
        together,
        Facts.from_manifest(together.manifest),
        summary,
        incidents,
        records,
        tuple(runs),
        any(own.parallel for own in loaded),
    )


@dataclass(frozen=True, slots=True)
class _LightRecords:
    """Records of a run without token ids and traces.

    Attributes:
        vanilla: (prompt id, turn) -> hash of vanilla's first output.
        parallel: True if a method ran on several workers.
    """

    records: list[Record]
    vanilla: dict[tuple[str, int], bytes]
    parallel: bool

    @classmethod
    def read(cls, run: RecordSource) -> _LightRecords:
        """Read the records of a run one at a time.

        Raises:
            UsageError: There are no records.
        """
        records: list[Record] = []
        vanilla: dict[tuple[str, int], bytes] = {}
        parallel = False
        for record, digest, several in run.map_records(_lighten):
            if digest is not None:
                vanilla.setdefault((record.prompt_id, record.turn), digest)
            parallel = parallel or several
            records.append(record)
        if not records:
            raise no_output_error(run.path)
        return cls(records, vanilla, parallel)


def _lighten(record: Record) -> tuple[Record, bytes | None, bool]:
    """Return a record without details, the hash of its output, and True if it has several workers.

    The hash is None unless the output is vanilla's and must be the same in every run.
    """
    digest = None
    if record.label == BASELINE and record.output_ids and record.sampling in _SAME_TOKENS:
        digest = hashlib.sha256(repr(record.output_ids).encode()).digest()
    several = record.forwards is not None and record.forwards.workers > 1
    return drop_details(record), digest, several


def _compare_vanilla(
    digests: Sequence[dict[tuple[str, int], bytes]], short: Sequence[str]
) -> list[Incompatibility]:
    """Return one incompatibility for each run whose vanilla outputs differ from the first run's.

    Args:
        digests: (prompt id, turn) -> hash of vanilla's output, for each run.
        short: Short names of the runs.
    """
    first, found = digests[0], []
    for name, own in zip(short[1:], digests[1:], strict=True):
        shared = first.keys() & own.keys()
        different = sum(first[at] != own[at] for at in shared)
        if different:
            value = f"{different} of {len(shared)} differ"
            found.append(Incompatibility("vanilla's outputs", {short[0]: "reference", name: value}))
    return found


def _check_compatible(
    found: Sequence[Incompatibility], runs: Sequence[RecordSource], force: bool
) -> None:
    if found and not force:
        lines = "".join(f"\n  {difference}" for difference in found[:_MAX_LISTED])
        more = f"\n  and in {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        arguments = " ".join(map(_source_arguments, runs))
        hint = f"specbench report {arguments} --force: side by side, methods with their run's name"
        if len(runs) == 2:
            hint += f"; to compare them: specbench compare {arguments}"
        raise UsageError(f"these runs cannot share one table: they differ in{lines}{more}", hint)
