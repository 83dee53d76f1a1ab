"""Several runs combined into one: each method is paired with the vanilla of its own run.

A method is the same in two runs if method, parameters, guarantee and the method's file are equal.
Then its runs count as further processes. Methods that only share a name get their run's name as a
suffix.

Repeats are renumbered, so that an output is paired with the vanilla of its own run and repeat
(`pairing`). The number modulo `LOAD_PASS_OFFSET` identifies the process. Processes can be resampled
only if all methods have the same number of them. Otherwise they count as one process.
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
    """Names of a run's methods and repeats in the report.

    Attributes:
        labels: label in the run -> label in the report.
        passes: number of a repeat in the run -> its number in the report.
    """

    labels: Mapping[str, str]
    passes: Mapping[int, int]

    def rename(self, record: Record) -> Record:
        """Return a record with its names in the report."""
        return replace(record, label=self.labels[record.label], pass_=self.passes[record.pass_])


@dataclass(slots=True)
class CombinedRuns:
    """Runs that are read as one; see `summary.source.RecordSource`.

    shown: number of a repeat in the report -> its name for readers.
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
    short: Sequence[str],
    records: Sequence[Sequence[Record]],
    forced: Sequence[str],
    *,
    targets: bool = False,
) -> CombinedRuns:
    """Combine runs.

    Args:
        short: short names of the runs.
        records: records of each run, without details.
        forced: differences, if the runs are incompatible. Then every label has its run's name.
        targets: True if the runs have several targets. Then every label has its run's name, too.
    """
    firsts = [{record.label: record for record in reversed(own)} for own in records]
    labels = _labels(runs, short, firsts, every=bool(forced) or targets)
    passes, shown = _passes(short, records, labels)
    names = [RunNames(*pair) for pair in zip(labels, passes, strict=True)]
    manifest = _manifest(runs, short, labels)
    manifest["row_files"] = {
        own[label]: file
        for run, own, first in zip(runs, labels, firsts, strict=True)
        for label, record in first.items()
        if (file := (run.manifest.get("method_files") or {}).get(record.method))
    }
    if forced:
        manifest["forced"] = list(forced)
    if targets:
        manifest["targets"] = list(short)
        manifest["left_out"] = {  # these methods have no records, so they have no new label yet
            f"{label} @{name}": why
            for name, run in zip(short, runs, strict=True)
            for label, why in (run.manifest.get("left_out") or {}).items()
        }
    if forced or targets:
        for role, model in manifest["models"].items():
            models = ((run.manifest.get("models") or {}).get(role) or {} for run in runs)
            labels_of = dict.fromkeys(str(m["label"]) for m in models if "label" in m)
            manifest["models"][role] = {**(model or {}), "label": " | ".join(labels_of)}
    return CombinedRuns(runs[0].path, manifest, runs, names, shown)


def _labels(
    runs: Sequence[RecordSource],
    short: Sequence[str],
    firsts: Sequence[Mapping[str, Record]],
    *,
    every: bool,
) -> list[dict[str, str]]:
    """Return, for each run, label -> label in the report."""
    kinds: dict[str, set[str]] = {}
    for run, first in zip(runs, firsts, strict=True):
        for label, record in first.items():
            kinds.setdefault(label, set()).add(_kind(record, run.manifest))
    return [
        {label: f"{label} @{name}" if every or len(kinds[label]) > 1 else label for label in first}
        for name, first in zip(short, firsts, strict=True)
    ]


def _kind(record: Record, manifest: Mapping[str, Any]) -> str:
    """Return a key that is equal for two records if they are of the same method."""
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
    short: Sequence[str],
    records: Sequence[Sequence[Record]],
    labels: Sequence[Mapping[str, str]],
) -> tuple[list[dict[int, int]], dict[int, str]]:
    """Return the new numbers of each run's repeats, and new number -> name for readers."""
    own = [sorted({record.pass_ for record in run}) for run in records]
    processes = [sorted(set(map(process_number, passes))) for passes in own]
    had: dict[str, int] = {}
    starts = []
    for made, run in zip(processes, labels, strict=True):
        rows = [label for label in run.values() if label != BASELINE]
        start = max((had.get(label, 0) for label in rows), default=0)
        starts.append(start)
        had.update({label: start + len(made) for label in rows})
    counts = {
        sum(len(processes[i]) for i, run in enumerate(labels) if row in run.values()) for row in had
    }
    resampled = len(counts) <= 1
    numbered: list[dict[int, int]] = []
    shown: dict[int, str] = {}
    for name, passes, made, start in zip(short, own, processes, starts, strict=True):
        numbered.append({})
        for pass_ in passes:
            place = start + made.index(process_number(pass_)) if resampled else 0
            number = LOAD_PASS_OFFSET * len(shown) + place
            numbered[-1][pass_] = number
            shown[number] = f"{pass_} @{name}"
    return numbered, shown


def _manifest(
    runs: Sequence[RecordSource], short: Sequence[str], labels: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Return the first run's manifest, merged with those of the others."""
    all_of = [run.manifest for run in runs]
    merged: dict[str, Any] = json.loads(json.dumps(all_of[0]))
    config = merged.setdefault("config", {}).setdefault("effective", {})
    config["methods"] = _rename_labels(
        [m.get("config", {}).get("effective", {}).get("methods") or [] for m in all_of], labels
    )
    loads = [
        str(load) for m in all_of if (load := m.get("config", {}).get("effective", {}).get("load"))
    ]
    if loads:
        config["load"] = " | ".join(dict.fromkeys(loads))
    merged["rows"] = _rename_labels([m.get("rows") or [] for m in all_of], labels)
    for part in ("models", "heads", "method_files"):
        merged[part] = {}
        for manifest in all_of:
            for key, value in (manifest.get(part) or {}).items():
                merged[part][key] = merged[part].get(key) or value
    merged["upper_bounds"] = [
        own.get(label, label)
        for manifest, own in zip(all_of, labels, strict=True)
        for label in manifest.get("upper_bounds") or []
    ]
    merged["leaks"] = {
        own.get(label, label): prompt
        for manifest, own in zip(all_of, labels, strict=True)
        for label, prompt in (manifest.get("leaks") or {}).items()
    }
    statuses = [manifest.get("status", "?") for manifest in all_of]
    merged["status"] = next((s for s in _UNFINISHED if s in statuses), statuses[0])
    made_up = dict.fromkeys(word for m in all_of if (word := m.get("synthetic")))
    merged["synthetic"] = "; ".join(made_up) or None
    merged["noisy"] = any(manifest.get("noisy") for manifest in all_of)
    for given_up in ("dropped", "left_out"):
        merged[given_up] = {
            own.get(label, label): why
            for manifest, own in zip(all_of, labels, strict=True)
            for label, why in (manifest.get(given_up) or {}).items()
        }
    merged["mixed"] = [what for manifest in all_of for what in manifest.get("mixed") or ()]
    floors = [m["aa_noise"] for m in all_of if m.get("aa_noise") is not None]
    merged["aa_noise"] = max(floors, default=None)
    merged["near_ties"] = next((m["near_ties"] for m in all_of if m.get("near_ties")), None)
    merged["runs"] = {
        name: f"{manifest.get('created_utc')} to {manifest.get('finished_utc')}"
        for name, manifest in zip(short, all_of, strict=True)
    }
    return merged


def _rename_labels(
    lists: Sequence[Sequence[Mapping[str, Any]]], labels: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Return the entries with their labels in the report, each label once."""
    found: dict[str, dict[str, Any]] = {}
    for entries, own in zip(lists, labels, strict=True):
        for entry in entries:
            label = own.get(entry["label"], entry["label"])
            base = entry.get("baseline")
            renamed = {"baseline": own.get(base, base)} if base else {}
            found.setdefault(label, {**entry, **renamed, "label": label})
    return list(found.values())
