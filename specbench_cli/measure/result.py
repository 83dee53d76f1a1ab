"""Result of a run: its folder, its exit code, and whether noise made times unusable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli.errors import ExitCode
from specbench_cli.judge.broken import find_broken_methods
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import BASELINE, Record

MAX_NOISY_SHARE = 0.1
"""If a larger share of a method's outputs is noisy, the method has no speedup."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    run_dir: Folder of the run.
    exit_code: Exit code of the command.
    noisy: True if a method has no speedup, because too many of its times were noisy.
    """

    run_dir: Path
    exit_code: ExitCode
    noisy: bool


def read_result(run_dir: RunDir) -> RunResult:
    """Return the result of a run, read from its folder."""
    records = list(run_dir.records())
    return RunResult(run_dir.path, exit_code(records, run_dir.manifest), has_noisy_method(records))


def exit_code(records: Sequence[Record], manifest: Mapping[str, Any]) -> ExitCode:
    """Return the exit code of a run.

    - BAD_ANSWER: a method is broken, or an output failed. External engines are ignored.
    - ENVIRONMENT: a method has too many noisy times, a method could not run, or only vanilla has
      outputs.
    - OK: otherwise.
    """
    ours = [record for record in records if not record.peer]
    if any(record.error is not None for record in ours) or find_broken_methods(ours, manifest):
        return ExitCode.BAD_ANSWER
    incomplete = manifest.get("left_out") or lacks_comparison(records, manifest)
    return ExitCode.ENVIRONMENT if has_noisy_method(records) or incomplete else ExitCode.OK


def lacks_comparison(records: Sequence[Record], manifest: Mapping[str, Any]) -> bool:
    """Return True if all methods except vanilla were dropped, or failed on all prompts."""
    others = {record.label for record in records if record.method != BASELINE}
    measured = {record.label for record in records if record.error is None}
    return bool(others) and not others & measured - {*(manifest.get("dropped") or {})}


def has_noisy_method(records: Sequence[Record]) -> bool:
    """Return True if a method has no speedup, because too many of its times were noisy."""
    noisy: dict[str, list[bool]] = {}
    for record in records:
        noisy.setdefault(record.label, []).append(record.void)
    return any(sum(own) > MAX_NOISY_SHARE * len(own) for own in noisy.values())
