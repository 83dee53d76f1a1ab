"""`report.md`: the table, the figure, how it was measured, and what did not go as it should."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specbench_cli.config.sweep import settings, written
from specbench_cli.report import text
from specbench_cli.report.facts import Facts
from specbench_cli.report.incidents import Incidents
from specbench_cli.report.pareto import Sweep
from specbench_cli.report.row import Row
from specbench_cli.report.summary import Summary
from specbench_cli.report.table import run_text

_LISTED = 50
"""Cells of a kind that are listed one by one."""


def report(
    summary: Summary,
    manifest: Mapping[str, Any],
    incidents: Incidents,
    figures: Sequence[str],
    sweep: Sweep | None = None,
) -> str:
    """The whole report; `figures` are paths of images, relative to it."""
    cell = ("method", "prompt", "turn", "pass")
    parts = [
        f"# specbench: {', '.join(summary.prompts) or 'no prompts'}",
        f"```\n{run_text(summary, Facts.of(manifest))}\n```",
        *(f"![speedup over vanilla]({path})" for path in figures if "pareto" not in path),
        *(_sweep(sweep, figures) if sweep is not None else ()),
        *_tuning(manifest.get("tuning")),
        "## By task family",
        _by_family(summary),
        "## In detail",
        _table(_DETAIL_HEADINGS, map(_detail, summary.rows)),
        "## Equivalence",
        _table(_EQUIVALENCE_HEADINGS, map(_equivalence, summary.rows)),
        *_evidence(summary),
        "## How it was measured",
        _table(("setting", "value"), _settings(manifest)),
        *_cells("Outputs that differ", (*cell, *_DIFFERENCE), incidents.differing),
        *_cells("Failed cells", (*cell, "error"), incidents.failed),
        *_cells("Void cells", (*cell, "other processes' CPU"), incidents.void),
    ]
    return "\n\n".join(parts) + "\n"


_DIFFERENCE = ("verdict", "position", "gap", "explained by width")

_EQUIVALENCE_HEADINGS = (
    "method",
    "guarantee",
    "outputs",
    "questions checked",
    "mismatched",
    "at most (95%)",
    "near-ties",
    "expected at most",
    "p",
    "explained by width",
    "broken",
)

_EVIDENCE_HEADINGS = ("method", "log-likelihood a token", "p", "length", "p")


def _equivalence(row: Row) -> Sequence[object]:
    return (
        row.label,
        row.guarantee,
        text.verdicts(row),
        row.questions_checked,
        row.questions_mismatched,
        text.percent(row.mismatch_bound, 2),
        row.near_tie,
        text.number(row.near_tie_expected),
        text.number(row.near_tie_p, 3),
        row.near_tie_explained,
        row.broken_why,
    )


def _evidence(summary: Summary) -> list[str]:
    """Sampled outputs against vanilla's; nothing where none were compared."""
    rows = [
        (
            row.label,
            text.number(row.log_likelihood_difference, 4),
            text.number(row.log_likelihood_p, 3),
            text.number(row.length_difference),
            text.number(row.length_p, 3),
        )
        for row in summary.rows
        if row.log_likelihood_difference is not None
    ]
    if not rows:
        return []
    title = "## Sampled outputs, less vanilla's: evidence and no proof"
    return [title, _table(_EVIDENCE_HEADINGS, rows)]


def _sweep(sweep: Sweep, figures: Sequence[str]) -> list[str]:
    """The swept rows in the order of their parameters, and the plot of them."""
    rows = [
        (
            point.row.label,
            *(_value(point.row.params, name) for name in sweep.params),
            text.number(point.row.mat),
            text.percent(point.row.acceptance_rate),
            text.speedup(point.row),
            text.interval(point.row),
            text.number(point.row.ms_per_token_p50),
            text.number(point.row.discard_rate),
            text.number(point.row.verification_rate),
            "yes" if point.front else None,
        )
        for point in sweep.points
    ]
    headings = ("row", *sweep.params, *_SWEEP_HEADINGS)
    plots = [f"![discard and verification rates]({path})" for path in figures if "pareto" in path]
    return ["## Sweep", _table(headings, rows), *plots]


_SWEEP_HEADINGS = (
    "MAT",
    "accept",
    "speedup",
    "95% CI",
    "ms/token p50",
    "discarded",
    "verified",
    "Pareto front",
)


def _tuning(tuning: Mapping[str, Any] | None) -> list[str]:
    """What every row was tried with, on what, and what came of it."""
    if not tuning:
        return []
    by_time = tuning["by"] == "time"
    unit = "ms a token" if by_time else "target forwards a token"
    how = (
        f"At most {tuning['budget']} candidates a row, all rows on the same development questions"
        f" ({_families(tuning['development'])}), compared by"
        f" {'decode time' if by_time else 'what their forwards cost by the size of the models'}."
        f" Every figure above and below is of the held-out questions"
        f" ({_families(tuning['held_out'])})."
    )
    rows = [
        (
            label,
            " ".join(settings(tried["params"])) or text.NONE,
            text.number(tried["cost"], 3),
            "yes" if tried["chosen"] else None,
            found["prompts"] or None,
        )
        for label, found in tuning["rows"].items()
        for tried in found["candidates"]
    ]
    return ["## Tuning", how, _table(("row", "parameters", unit, "chosen", "prompts"), rows)]


def _families(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{family} {n}" for family, n in counts.items())


def _value(params: Mapping[str, Any], name: str) -> str | None:
    return written(params[name]) if name in params else None


_DETAIL_HEADINGS = (
    "method",
    "parameters",
    "from",
    "guarantee",
    "decode speedup",
    "MAT",
    "macro",
    "full steps",
    "alpha",
    "accepted at level 1, 2, ...",
    "nodes a step",
    "node yield",
    "TTFT p50 ms",
    "ms/token p50",
    "p95",
    "target / draft forwards",
    "peak MB",
    "void",
)


def _detail(row: Row) -> Sequence[object]:
    positions = ", ".join(text.percent(rate) for rate in row.acceptance_by_position[:8])
    forwards = (row.target_forwards, row.draft_forwards)
    return (
        row.label,
        " ".join(settings(row.params)) or text.NONE,
        row.params_from,
        row.guarantee,
        text.ratio(row.decode_speedup),
        text.number(row.mat) if row.mat_note is None else f"{text.NONE} ({row.mat_note})",
        text.number(row.mat_macro),
        text.number(row.mat_full),
        text.percent(row.alpha),
        positions or text.NONE,
        text.number(row.nodes_per_step, 1),
        text.percent(row.node_yield),
        text.number(row.ttft_p50_ms, 1),
        text.number(row.ms_per_token_p50),
        text.number(row.ms_per_token_p95),
        " / ".join(text.number(count, 0) for count in forwards),
        text.number(None if row.peak_bytes is None else row.peak_bytes / 1e6, 0),
        f"{row.n_void} of {row.n_cells}",
    )


def _by_family(summary: Summary) -> str:
    rows = []
    by_family = [{row.label: row for row in rows} for rows in summary.families.values()]
    for label in (row.label for row in summary.rows):
        found = [family.get(label) for family in by_family]
        rows.append((label, *(text.NONE if row is None else text.speedup(row) for row in found)))
    return _table(("method", *summary.families), rows)


def _settings(manifest: Mapping[str, Any]) -> list[tuple[str, object]]:
    """The manifest, flattened to a line a fact, with the source of each configured value."""
    sources = manifest.get("config_sources", {})
    lines: list[tuple[str, object]] = []
    for key in ("created_utc", "finished_utc", "status", "noisy"):
        lines.append((key, manifest.get(key)))
    for key, value in manifest.get("config", {}).get("effective", {}).items():
        source = sources.get(key)
        lines.append((key, f"{value} ({source})" if source else value))
    for section in ("models", "heads", "machine", "versions", "git", "tolerance", "step_costs"):
        for key, value in (manifest.get(section) or {}).items():
            lines.append((f"{section}.{key}", value))
    for task in manifest.get("tasks", []):
        lines.append((f"task {task['name']}", {k: v for k, v in task.items() if k != "name"}))
    return lines


def _cells(title: str, headings: Sequence[str], cells: Sequence[Sequence[object]]) -> list[str]:
    if not cells:
        return []
    parts = [f"## {title}", _table(headings, cells[:_LISTED])]
    if len(cells) > _LISTED:
        parts.append(f"And {len(cells) - _LISTED} more, in records.jsonl.")
    return parts


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_field, line))} |" for line in lines)


def _field(value: object) -> str:
    if value is None:
        return text.NONE
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    return " ".join(str(value).split()).replace("|", "\\|")
