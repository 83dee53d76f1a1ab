"""Compatibility of runs: the facts that must be equal in runs that share one table.

Speedups are not comparable between targets, prompts, seeds, machines, decoding settings, drafts or
versions of the program. Methods, their parameters and the number of repeats may differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli.summary.source import RecordSource

_SETTINGS = (
    "seed",
    "verify",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "acceptance",
    "raw",
    "own_context",
    "dtype",
    "graphs",
    "device",
    "threads",
    "batch",
    "prefill_chunk",
)
_VERSIONS = ("torch", "transformers", "python")
_STAMPED = re.compile(r"\d{8}T\d{6}Z-.*-([0-9a-f]{8})(?:-\d+)?")
"""Pattern of the default folder name of a run."""
_DIGITS = 8
"""Number of digits of a checksum that are shown."""


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """A fact that differs between runs.

    Attributes:
        what: Name of the fact.
        values: Short name of a run -> value. Runs without the fact are omitted.
    """

    what: str
    values: Mapping[str, str]

    def __str__(self) -> str:
        """Return the name and the values, such as `seed: 0 (a) against 1 (b)`."""
        by_value: dict[str, list[str]] = {}
        for run, value in self.values.items():
            by_value.setdefault(value, []).append(run)
        facts_by_run = (f"{value} ({', '.join(runs)})" for value, runs in by_value.items())
        return f"{self.what}: {' against '.join(facts_by_run)}"


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return short unique names for runs.

    The name of a run is the hash at the end of its folder's name. If a run has no hash, or two
    hashes are equal, whole folder names are used. If these are equal, a number is appended.
    """
    folder_names = [path.resolve().name for path in paths]
    hashes = [found[1] if (found := _STAMPED.fullmatch(name)) else "" for name in folder_names]
    if all(hashes) and len(set(hashes)) == len(hashes):
        return hashes
    if len(set(folder_names)) == len(folder_names):
        return folder_names
    return [f"{name}#{number}" for number, name in enumerate(folder_names, start=1)]


def find_incompatibilities(
    runs: Sequence[RecordSource], names: Sequence[str], *, targets: bool = False
) -> list[Incompatibility]:
    """Return the facts that differ between runs. The list is empty if the runs are compatible.

    A fact that a run does not have, such as its draft model, is not compared.

    Args:
        targets: True if the runs have several targets. Models, heads and formatted prompts may then
            differ.
    """
    facts_by_run = {name: collect_facts(run) for name, run in zip(names, runs, strict=True)}
    if targets:
        for run, own in zip(runs, facts_by_run.values(), strict=True):
            heads = (f"head {head}" for head in run.manifest.get("heads") or ())
            for what in ("prompts", *run.manifest.get("models", {}), *heads):
                own.pop(what, None)
    found = []
    for what in dict.fromkeys(what for own in facts_by_run.values() for what in own):
        values = {name: own[what] for name, own in facts_by_run.items() if what in own}
        if len(set(values.values())) > 1:
            found.append(Incompatibility(what, values))
    return found


def collect_facts(run: RecordSource) -> dict[str, str]:
    """Return name -> value of the facts that must be equal. Unknown facts are omitted."""
    manifest = run.manifest
    config = manifest.get("config", {}).get("effective", {})
    machine = manifest.get("machine", {})
    versions = machine.get("versions") or manifest.get("versions", {})
    commit = (machine.get("git") or manifest.get("git") or {}).get("commit")
    found: dict[str, str | None] = {}
    for role, model in manifest.get("models", {}).items():
        found[role] = None if model is None else _label_with_checksum(model.get("label"), model)
    for head, module in (manifest.get("heads") or {}).items():
        found[f"head {head}"] = _label_with_checksum(None, module)
    for task in manifest.get("tasks", []):
        found[f"task {task['name']}"] = _label_with_checksum(f"version {task.get('version')}", task)
    found["prompts"] = _prompts(run)
    for setting in _SETTINGS:
        found[setting] = str(config[setting]) if setting in config else None
    for distribution in ("grammar", "contrast"):  # older runs have neither
        found[distribution] = str(config.get(distribution))
    found["machine"] = _machine(machine)
    found["specbench"] = manifest.get("version")
    found["commit"] = commit and commit[:_DIGITS]
    for package in _VERSIONS:
        found[package] = versions.get(package)
    return {what: value for what, value in found.items() if value is not None}


def _label_with_checksum(label: str | None, part: Mapping[str, Any]) -> str:
    """Return a label with the first digits of its checksum."""
    checksum = str(part.get("sha256") or part.get("hash") or "")[:_DIGITS]
    return " ".join(word for word in (label, checksum) if word)


def _prompts(run: RecordSource) -> str | None:
    """Return the number of questions and a checksum of all prompts."""
    digest, questions = hashlib.sha256(), set()
    for prompt in sorted(run.prompts(), key=lambda p: (p.prompt_id, p.turn)):
        questions.add(prompt.prompt_id)
        digest.update(f"{prompt.prompt_id}\0{prompt.turn}\0{prompt.text}\0".encode())
    return f"{len(questions)} questions {digest.hexdigest()[:_DIGITS]}" if questions else None


def _machine(machine: Mapping[str, Any]) -> str | None:
    hardware = machine.get("hardware", machine)
    devices = [str(device.get("name", device)) for device in hardware.get("accelerators") or []]
    words = [hardware.get("cpu"), f"{hardware.get('cores')} cores", *devices, machine.get("id")]
    return ", ".join(map(str, filter(None, words))) if hardware.get("cpu") else machine.get("id")
