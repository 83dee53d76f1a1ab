"""Several runs combined into one. Each method is still compared with vanilla of its own run.

Two runs have the same method if its name, parameters, guarantee and file are equal. The outputs of
this method are then pooled, and each run counts as a further process. If methods only share a
label, the name of the run is appended to the label.

Repeats get new numbers, so that an output is paired with vanilla of its own run and repeat
(`pairing.py`). A repeat's number modulo `LOAD_PASS_OFFSET` identifies its process. Processes can be
resampled only if all methods have the same number of processes. Otherwise all processes count as
one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import BASELINE, LOAD_PASS_OFFSET, Record
from specbench_cli.summary.pairing import process_number
from specbench_cli.summary.source import RecordSource

T = TypeVar("T")

_UNFINISHED = ("interrupted", "running")


@dataclass(frozen=True, slots=True)
class RunNames:
    """New names of the methods and repeats of a run, in the report.

    Attributes:
        labels: Label in the run -> label in the report.
        passes: Number of a repeat in the run -> its number in the report.
    """

    labels: Mapping[str, str]
    passes: Mapping[int, int]

    def rename(self, record: Record) -> Record:
        """Return a record with the label and the repeat's number of the report."""
        return replace(record, label=self.labels[record.label], pass_=self.passes[record.pass_])


@dataclass(slots=True)
class CombinedRuns:
    """Several runs that are read like one (`source.RecordSource`).

    run_names: Names of the methods and repeats of each run.
    repeat_names: Number of a repeat in the report -> its name for readers.
    """

    path: Path
    manifest: dict[str, Any]
    runs: Sequence[RecordSource]
    run_names: Sequence[RunNames]
    repeat_names: dict[int, str] = field(default_factory=dict)

    def records(self, prompt_ids: Container[str] | None = None) -> Iterator[Record]:
        """Return the renamed records of all runs, or only those of some prompts."""
        for run, names in zip(self.runs, self.run_names, strict=True):
            yield from map(names.rename, run.records(prompt_ids))

    def map_records(self, make: Callable[[Record], T]) -> Iterator[T]:
        """Return the results of a function for every record."""
        return map(make, self.records())

    def prompts(self) -> Iterator[Prompt]:
        """Return every prompt once."""
        seen: set[tuple[str, int]] = set()
        for run in self.runs:
            for prompt in run.prompts():
                if (prompt.prompt_id, prompt.turn) not in seen:
                    seen.add((prompt.prompt_id, prompt.turn))
                    yield prompt


def combine_runs(
    runs: Sequence[RecordSource],
    short_names: Sequence[str],
    records: Sequence[Sequence[Record]],
    forced: Sequence[str],
    *,
    targets: bool = False,
) -> CombinedRuns:
    """Combine several runs into one.

    Args:
        short_names: Short name of each run.
        records: Records of each run, without details.
        forced: Differences, if the runs are incompatible. Every label then gets its run's name.
        targets: True if the runs have several targets. Every label then gets its run's name, too.
    """
    first_records = [{record.label: record for record in reversed(run)} for run in records]
    labels = _labels(runs, short_names, first_records, every=bool(forced) or targets)
    passes, repeat_names = _passes(short_names, records, labels)
    names = [RunNames(*pair) for pair in zip(labels, passes, strict=True)]
    manifest = _manifest(runs, short_names, labels)
    manifest["row_files"] = {
        labels_of_run[label]: file
        for run, labels_of_run, first in zip(runs, labels, first_records, strict=True)
        for label, record in first.items()
        if (file := (run.manifest.get("method_files") or {}).get(record.method))
    }
    if forced:
        manifest["forced"] = list(forced)
    if targets:
        manifest["targets"] = list(short_names)
        manifest["left_out"] = {  # these methods have no records, so `_labels` did not rename them
            f"{label} @{name}": why
            for name, run in zip(short_names, runs, strict=True)
            for label, why in (run.manifest.get("left_out") or {}).items()
        }
    if forced or targets:
        for role, model in manifest["models"].items():
            models = ((run.manifest.get("models") or {}).get(role) or {} for run in runs)
            labels_of = dict.fromkeys(str(m["label"]) for m in models if "label" in m)
            manifest["models"][role] = {**(model or {}), "label": " | ".join(labels_of)}
    return CombinedRuns(runs[0].path, manifest, runs, names, repeat_names)


def _labels(
    runs: Sequence[RecordSource],
    short_names: Sequence[str],
    first_records: Sequence[Mapping[str, Record]],
    *,
    every: bool,
) -> list[dict[str, str]]:
    """Return new labels for each run: label in the run -> label in the report.

    Args:
        every: True to append the run's name to every label. By default, it is appended only to
            labels that differ in meaning.
    """
    kinds: dict[str, set[str]] = {}
    for run, first in zip(runs, first_records, strict=True):
        for label, record in first.items():
            kinds.setdefault(label, set()).add(_kind(record, run.manifest))
    return [
        {label: f"{label} @{name}" if every or len(kinds[label]) > 1 else label for label in first}
        for name, first in zip(short_names, first_records, strict=True)
    ]


def _kind(record: Record, manifest: Mapping[str, Any]) -> str:
    """Return a key that two records share if they are of the same method."""
    if record.label == BASELINE:
        return BASELINE
    parts = (
        record.method,
        record.params.effective,
        record.guarantee,
        (manifest.get("method_files") or {}).get(record.method),
    )
    return json.dumps(parts, sort_keys=True, default=str)


def _passes(
    short_names: Sequence[str],
    records: Sequence[Sequence[Record]],
    labels: Sequence[Mapping[str, str]],
) -> tuple[list[dict[int, int]], dict[int, str]]:
    """Number the repeats of all runs.

    Returns:
        For each run, number in the run -> number in the report; and number in the report -> name.
    """
    passes_of_runs = [sorted({record.pass_ for record in run}) for run in records]
    processes = [sorted(set(map(process_number, passes))) for passes in passes_of_runs]
    processes_before: dict[str, int] = {}
    starts = []
    for own_processes, run in zip(processes, labels, strict=True):
        rows = [label for label in run.values() if label != BASELINE]
        start = max((processes_before.get(label, 0) for label in rows), default=0)
        starts.append(start)
        processes_before.update({label: start + len(own_processes) for label in rows})
    counts = {
        sum(len(processes[i]) for i, run in enumerate(labels) if row in run.values())
        for row in processes_before
    }
    resampled = len(counts) <= 1
    numbered: list[dict[int, int]] = []
    repeat_names: dict[int, str] = {}
    for name, passes, own_processes, start in zip(
        short_names, passes_of_runs, processes, starts, strict=True
    ):
        numbered.append({})
        for pass_ in passes:
            place = start + own_processes.index(process_number(pass_)) if resampled else 0
            number = LOAD_PASS_OFFSET * len(repeat_names) + place
            numbered[-1][pass_] = number
            repeat_names[number] = f"{pass_} @{name}"
    return numbered, repeat_names


def _manifest(
    runs: Sequence[RecordSource], short_names: Sequence[str], labels: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Return the manifest of the combined runs: that of the first run, with lists from all runs."""
    manifests = [run.manifest for run in runs]
    merged: dict[str, Any] = json.loads(json.dumps(manifests[0]))
    config = merged.setdefault("config", {}).setdefault("effective", {})
    config["methods"] = _rename_labels(
        [m.get("config", {}).get("effective", {}).get("methods") or [] for m in manifests], labels
    )
    loads = [
        str(load)
        for m in manifests
        if (load := m.get("config", {}).get("effective", {}).get("load"))
    ]
    if loads:
        config["load"] = " | ".join(dict.fromkeys(loads))
    merged["rows"] = _rename_labels([m.get("rows") or [] for m in manifests], labels)
    for part in ("models", "heads", "method_files"):
        merged[part] = {}
        for manifest in manifests:
            for key, value in (manifest.get(part) or {}).items():
                merged[part][key] = merged[part].get(key) or value
    merged["upper_bounds"] = [
        labels_of_run.get(label, label)
        for manifest, labels_of_run in zip(manifests, labels, strict=True)
        for label in manifest.get("upper_bounds") or []
    ]
    merged["leaks"] = {
        labels_of_run.get(label, label): prompt
        for manifest, labels_of_run in zip(manifests, labels, strict=True)
        for label, prompt in (manifest.get("leaks") or {}).items()
    }
    statuses = [manifest.get("status", "?") for manifest in manifests]
    merged["status"] = next((s for s in _UNFINISHED if s in statuses), statuses[0])
    synthetic = dict.fromkeys(word for m in manifests if (word := m.get("synthetic")))
    merged["synthetic"] = "; ".join(synthetic) or None
    merged["noisy"] = any(manifest.get("noisy") for manifest in manifests)
    for section in ("dropped", "left_out"):
        merged[section] = {
            labels_of_run.get(label, label): why
            for manifest, labels_of_run in zip(manifests, labels, strict=True)
            for label, why in (manifest.get(section) or {}).items()
        }
    merged["mixed"] = [what for manifest in manifests for what in manifest.get("mixed") or ()]
    floors = [m["aa_noise"] for m in manifests if m.get("aa_noise") is not None]
    merged["aa_noise"] = max(floors, default=None)
    merged["near_ties"] = next((m["near_ties"] for m in manifests if m.get("near_ties")), None)
    merged["runs"] = {
        name: f"{manifest.get('created_utc')} to {manifest.get('finished_utc')}"
        for name, manifest in zip(short_names, manifests, strict=True)
    }
    return merged


def _rename_labels(
    lists: Sequence[Sequence[Mapping[str, Any]]], labels: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Return the entries of all runs with their labels in the report. Each label occurs once."""
    found: dict[str, dict[str, Any]] = {}
    for entries, labels_of_run in zip(lists, labels, strict=True):
        for entry in entries:
            label = labels_of_run.get(entry["label"], entry["label"])
            base = entry.get("baseline")
            renamed = {"baseline": labels_of_run.get(base, base)} if base else {}
            found.setdefault(label, {**entry, **renamed, "label": label})
    return list(found.values())
