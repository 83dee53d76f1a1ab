"""Results of a parameter sweep, and its Pareto front of discard rate and verification rate.

The discard rate is rejected draft tokens / generated tokens: the cost of drafting. The verification
rate is target forwards / generated tokens: drafting reduces it. A method is on the Pareto front if
no other method is lower in one rate and at most as high in the other. Vanilla does not draft, so it
is one end of the front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli.config.sweep import format_value
from specbench_cli.summary import metrics
from specbench_cli.summary.columns import Column, Value, write_csv
from specbench_cli.summary.formats import NONE
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary

_RATES = ("discard_rate", "verification_rate")
_GAINS = (
    *("mat", "acceptance_rate", "speedup", "speedup_low", "speedup_high"),
    "ms_per_token_p50",
)
"""Metrics in `pareto.csv` in addition to the rates."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A method of a sweep.

    swept: Swept parameter -> value.
    along: Parameter that varies along the line of the plot. None if the method is not swept.
    front: True if the method is on the Pareto front.
    """

    row: MethodSummary
    swept: dict[str, Any]
    along: str | None
    front: bool

    @property
    def series(self) -> str:
        """Name of the plotted line: the method, and the parameters that are constant along the
        line.
        """
        others = (f"{name}={value}" for name, value in self.swept.items() if name != self.along)
        return " ".join([self.row.method, *others])


@dataclass(frozen=True, slots=True)
class Sweep:
    """Methods of a parameter sweep, in the order of the configuration.

    params: Names of all swept parameters.
    """

    params: tuple[str, ...]
    points: tuple[SweepPoint, ...]


def find_sweep(summary: Summary, manifest: Mapping[str, Any]) -> Sweep | None:
    """Return the sweep of a run, or None if the run has none."""
    config = manifest.get("config", {}).get("effective", {})
    swept: dict[str, dict[str, list[Any]]] = config.get("sweep") or {}
    if not swept or config.get("tune"):
        return None
    rows = {row.label: row for row in summary.rows}
    labels = [choice["label"] for choice in config.get("methods", [])]
    front = _front([row for row in summary.rows if is_ranked(row)])
    points = []
    for row in (rows[label] for label in labels if label in rows):
        swept_params = {} if row.control else swept.get(row.method, {})
        values = {name: row.params.get(name) for name in swept_params}
        points.append(SweepPoint(row, values, _main_parameter(swept_params), row.label in front))
    params = dict.fromkeys(name for swept_params in swept.values() for name in swept_params)
    return Sweep(tuple(params), tuple(points))


def parameter_columns(sweep: Sweep) -> tuple[Column[MethodSummary], ...]:
    """Return the columns of a sweep's table: parameters, rates, speedups and the Pareto front."""
    front = {point.row.label for point in sweep.points if point.front}
    return metrics.table(
        "label",
        *map(_parameter, sweep.params),
        *("mat", "acceptance_rate", "speedup", metrics.INTERVAL, metrics.ACCURACY_LOSS),
        *(metrics.OVER_RANDOM, "n_scored", "ms_per_token_p50", "discard_rate"),
        "verification_rate",
        metrics.text_column(
            "Pareto front", "front", lambda row: "yes" if row.label in front else NONE
        ),
    )


def _parameter(name: str) -> Column[MethodSummary]:
    """Return the column of a parameter. Numbers sort as numbers."""

    def value(row: MethodSummary) -> Value:
        found = row.params.get(name)
        return found if found is None or isinstance(found, int | float) else format_value(found)

    def format_row(row: MethodSummary) -> str:
        found = row.params.get(name)
        return NONE if found is None else format_value(found)

    return Column(name, format=format_row, data={name: value})


def write_points(sweep: Sweep, path: Path) -> Path:
    """Write one CSV line per method, with all values of the plot. A missing value is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"label": point.row.label, "method": point.row.method}
        | {name: point.row.params.get(name) for name in sweep.params}
        | {name: getattr(point.row, name) for name in _RATES}
        | {"front": str(point.front).lower()}
        | {name: getattr(point.row, name) for name in _GAINS}
        for point in sweep.points
    ]
    return write_csv(lines, path, empty="label")


def is_number(value: object) -> bool:
    """Return True for numbers, which have a position on an axis. Booleans are no numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _main_parameter(swept_params: Mapping[str, Sequence[Any]]) -> str | None:
    """Return the parameter that varies along a plotted line: the one with the most
    numeric values.
    """
    return max(swept_params, key=lambda name: sum(map(is_number, swept_params[name])), default=None)


def is_ranked(row: MethodSummary) -> bool:
    """Return True if a method may be on the front.

    Broken and lossy methods, peers and upper bounds are excluded.
    """
    return row.lossless and not (row.broken or row.peer or row.upper_bound)


def _front(rows: Sequence[MethodSummary]) -> set[str]:
    """Return the labels of the methods on the Pareto front."""
    at = {
        row.label: (row.discard_rate, row.verification_rate)
        for row in rows
        if row.discard_rate is not None and row.verification_rate is not None
    }
    return {
        label
        for label, (discard, verify) in at.items()
        if not any(
            d <= discard and v <= verify and (d, v) != (discard, verify) for d, v in at.values()
        )
    }
