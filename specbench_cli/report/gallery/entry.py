"""Data of a published run for the gallery's index page, stored in `entry.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from specbench_cli import files, output
from specbench_cli.config.problems import format_first_problem
from specbench_cli.errors import UsageError
from specbench_cli.report.gallery.sentences import write_sentences
from specbench_cli.report.html.facts import hide_paths
from specbench_cli.report.report_data import ReportData
from specbench_cli.store.schema import GUARANTEES, STRICT
from specbench_cli.summary import metrics
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import MethodSummary

FILE = "entry.json"


@dataclass(frozen=True, slots=True)
class LeaderboardRow:
    """A method of a run on the leaderboard.

    Attributes:
        scope: "run" or "corpus" if the method learns across prompts, so that its results depend on
            their order. Otherwise "prompt".
        low, high: 95% interval of the speedup.
        output: Verdicts on the method's outputs, as text.
        draft: Draft model of the method. None if it has no draft model.
    """

    __pydantic_config__ = STRICT

    label: str
    peer: bool
    guarantee: Annotated[str, Field(pattern=f"^({'|'.join(GUARANTEES)})$")]
    scope: str
    speedup: float
    low: float | None
    high: float | None
    mat: float | None
    tokens_per_s: float | None
    output: str
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class GalleryEntry:
    """A published run, as `entry.json` stores it.

    Attributes:
        identity: Id of the run. Publishing the same run again replaces the entry with its id.
            prompts: Number of questions by task.
        plumbing: Tasks that the embedded target was not trained on. They only test the program, so
            their speedups mean nothing.
        machine: Id of the machine.
        hardware: Description of the machine.
        setting: Description of the decoding settings. Methods with different settings are not
            ranked together.
    """

    __pydantic_config__ = STRICT

    identity: str
    name: str
    created_utc: str
    version: str
    target: str
    draft: str | None
    prompts: dict[str, int]
    plumbing: tuple[str, ...]
    machine: str
    hardware: str
    setting: str
    sentences: tuple[str, str, str]
    lines: tuple[LeaderboardRow, ...]

    @property
    def tasks(self) -> str:
        """Names of the tasks, separated by commas."""
        return ", ".join(sorted(self.prompts))


def entry_of(data: ReportData) -> GalleryEntry:
    """Return the entry of a run that passed `check_publishable`."""
    manifest, summary, facts = data.run.manifest, data.summary, data.facts
    machine = manifest["machine"]
    created = str(manifest.get("created_utc", "?"))
    effective = manifest.get("config", {}).get("effective", {})
    identity = json.dumps([created, machine["id"], effective], sort_keys=True)
    return GalleryEntry(
        identity=hashlib.sha256(identity.encode()).hexdigest()[:16],
        name=hide_paths(data.run.path.resolve().name),
        created_utc=created,
        version=facts.version,
        target=hide_paths(facts.target),
        draft=None if facts.draft is None else hide_paths(facts.draft),
        prompts={hide_paths(task): n for task, n in summary.prompts.items()},
        plumbing=tuple(map(hide_paths, facts.plumbing)),
        machine=str(machine["id"]),
        hardware=hardware(machine),
        setting=_setting(facts, effective),
        sentences=write_sentences(summary),
        lines=tuple(_line(row) for row in summary.rows if _is_ranked(row)),
    )


def hardware(machine: Mapping[str, Any]) -> str:
    """Return CPU, cores, memory and accelerators of a machine as text."""
    parts = machine.get("hardware") or {}
    cores, memory = parts.get("cores"), parts.get("memory_gib")
    words = [str(parts.get("cpu") or "unknown CPU")]
    words += [f"{cores} cores"] * bool(cores) + [f"{memory} GiB"] * bool(memory)
    for accelerator in parts.get("accelerators") or ():
        words.append(str(accelerator.get("name", "accelerator")))
    return ", ".join(words)


def load(file: Path) -> GalleryEntry:
    """Read an entry from its file.

    Raises:
        UsageError: The entry is damaged.
    """
    try:
        return _entries().validate_json(files.read_own(file) or b"")
    except (OSError, ValidationError) as error:
        why = format_first_problem(error) if isinstance(error, ValidationError) else error
        raise UsageError(
            f"{file} is not a valid gallery entry: {why}",
            hint=f"remove {file.parent} and publish its run again",
        ) from error


def save(entry: GalleryEntry, file: Path) -> None:
    document = _entries().dump_json(entry, indent=2).decode()
    file.write_text(f"{output.escape_json(document)}\n", encoding="utf-8")


@cache
def _entries() -> TypeAdapter[GalleryEntry]:
    return TypeAdapter(GalleryEntry)


def _is_ranked(row: MethodSummary) -> bool:
    """Return True if the leaderboard ranks the method.

    Methods of other engines are not ranked, because they are compared with their own engine's
    vanilla.
    """
    return row.speedup is not None and not (row.upper_bound or row.broken or row.engine)


def _line(row: MethodSummary) -> LeaderboardRow:
    assert row.speedup is not None
    return LeaderboardRow(
        label=hide_paths(row.label),
        peer=row.peer,
        guarantee=row.guarantee,
        scope=row.state_scope or "prompt",
        speedup=row.speedup,
        low=row.speedup_low,
        high=row.speedup_high,
        mat=row.mat,
        tokens_per_s=row.tokens_per_s,
        output="; ".join(filter(None, (metrics.verdicts(row), metrics.accuracy_note(row)))),
        draft=None if row.draft_model is None else hide_paths(row.draft_model),
    )


def _setting(facts: Facts, effective: Mapping[str, Any]) -> str:
    """Return the settings that methods must share to be ranked together.

    Methods that are ranked together also share target, tasks and machine.
    """
    words = [f"{facts.decoding} {facts.dtype}".strip(), facts.device]
    devices = effective.get("devices")
    if devices:
        words.append(", ".join(f"{role} on {place}" for role, place in devices.items()))
    if facts.threads:
        words.append(f"{facts.threads} threads")
    if facts.constraints:
        words.append(facts.constraints)
    if facts.batch > 1:
        words.append(f"batch {facts.batch}")
    if facts.load:
        words.append(f"load {facts.load}")
    if "target" in facts.hosted:
        words.append(f"target{facts.engine_suffix('target')}")
    if (longest := effective.get("max_new_tokens")) is not None:
        words.append(f"at most {longest} tokens")
    return hide_paths("; ".join(word for word in words if word))
