"""Points of scaling laws: trained drafts of the study `grid`, or methods of runs with a batch
size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli import files
from specbench_cli.errors import UsageError
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir, find_run
from specbench_cli.summary.compatibility import collect_facts

SIZES = {
    "tokens": "tokens that a draft was trained on",
    "layers": "layers of the draft",
    "batch": "prompts decoded together",
}
"""Sizes that a law can be over (the x axis), with their meaning."""
FIGURES = {
    "alpha": ("alpha", "chance that a drafted token is accepted"),
    "mat": ("MAT", "tokens a verification, also called tau"),
    "tokens_per_s": ("tokens/s", "of outputs"),
}
"""Figures that a law can predict (the y axis): heading and meaning."""
RECORD = "alignment.json"
"""File in the folder of a trained draft, with its sizes and figures."""
_ALIKE = ("target", "target_sha256", "loss", "samples", "temperature", "start")
_DIGITS = 8
"""Number of shown digits of a SHA-256."""


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One point of a scaling law: a trained draft, or a method of a run.

    sizes: its sizes, by the names in `SIZES`.
    figures: its measured figures, by the names in `FIGURES`.
    alike: its other settings, which are equal for all points of one law.
    """

    name: str
    sizes: Mapping[str, float]
    figures: Mapping[str, float]
    alike: Mapping[str, str]


def read_points(words: Sequence[str]) -> list[ScalingPoint]:
    """Return the points of scaling laws from runs, and from folders with trained drafts.

    Args:
        words: runs and folders, as the user typed them.

    Raises:
        UsageError: a folder contains neither runs nor drafts, or one of its files is damaged.
    """
    found: list[ScalingPoint] = []
    for path in {path.resolve(): path for path in map(find_run, words)}.values():
        own = list(_rows(path) if RunDir.holds_run(path) else _drafts(path))
        if not own:
            raise UsageError(
                f"{path} contains neither a run nor drafts of `python -m recipes.studies grid`",
                f"python -m recipes.studies grid --out {path}",
            )
        found += own
    return found


def _drafts(path: Path) -> Iterator[ScalingPoint]:
    """Yield a point for each draft in a training folder.

    A file of the same name that contains a table is skipped.
    """
    for file in sorted(path.rglob(RECORD)):
        try:
            record = json.loads(files.read_text(file, 16 * files.MB))
            if isinstance(record, dict) and "alpha" in record:
                yield _draft(file.parent.name, record)
        except (ValueError, TypeError, KeyError, OverflowError) as fault:
            raise UsageError(
                f"{file} is no record of a draft's training", f"rm -r {file.parent}; train it again"
            ) from fault


def _draft(name: str, record: Mapping[str, Any]) -> ScalingPoint:
    alike = {what: str(record[what]) for what in _ALIKE if what in record}
    if "target_sha256" in alike:
        alike["target_sha256"] = alike["target_sha256"][:_DIGITS]
    return ScalingPoint(name, _numbers(record, SIZES), _numbers(record, FIGURES), alike)


def _numbers(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    found = {name: float(record[name]) for name in names if name in record}
    if not all(map(math.isfinite, found.values())):
        raise ValueError("a size or a figure is not finite")
    return found


def _rows(path: Path) -> Iterator[ScalingPoint]:
    """Yield a point for each method of a run that has a draft."""
    run = RunDir.open(path)
    reading, alike = read_report_data(run), collect_facts(run)
    alike.pop("batch", None)
    for row in reading.summary.rows:
        values = {name: getattr(row, name) for name in FIGURES}
        figures = {name: value for name, value in values.items() if value is not None}
        if row.alpha is not None and not row.broken:
            sizes = {"batch": float(reading.facts.batch)}
            yield ScalingPoint(row.label, sizes, figures, {"method": row.label, **alike})
