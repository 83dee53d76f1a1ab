"""A comparison and trends as tables in plain text and as TSV.

The text is the same in a log file and on a terminal.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from specbench_cli import output
from specbench_cli.comparison import trend
from specbench_cli.comparison.compared_output import RowKey
from specbench_cli.comparison.outcome import OUTCOMES, Comparison, RowOutcome
from specbench_cli.comparison.pages import columns, words
from specbench_cli.comparison.trend import ChangePoint, Trends, TrendSeries
from specbench_cli.report.terminal.table import WIDTH
from specbench_cli.summary import formats

_PLACES = 2
"""Maximum number of prompts named for a finding; TSV has all of them."""


def print_comparison(comparison: Comparison, form: output.Format = "table") -> None:
    """Print a comparison as a table or TSV, worst rows first.

    Findings follow the table; with TSV they go to stderr.
    """
    say = partial(_print_line, form)
    rows = sorted(comparison.rows, key=lambda row: OUTCOMES.index(row.outcome))
    base, new = (
        f"{name} (commit {commit})" if commit else name
        for name, commit in words.side_names(comparison)
    )
    say(f"specbench compare: base {base}, new {new}")
    if form == "tsv":
        output.tsv(columns.flat_row(row, comparison) for row in rows)
    else:
        output.table(_format_row(row, comparison) for row in rows)
    for names, found in words.group_findings(comparison):
        where = f": {words.format_locations(found.locations, _PLACES)}" if found.locations else ""
        say(f"{names}: {found.outcome}: {found.message}{where}")
    for sentence in comparison.not_compared:
        say(f"not compared: {sentence}")
    for row in words.uncompared_rows(comparison):
        say(f"not compared: {words.row_name(row)}: {row.rule_reason}")
    for line in words.describe_basis(comparison):
        say(line)
    say(words.headline(comparison))
    if words.can_accept(comparison):
        say(f"if that is wanted: {words.ACCEPT}")


def _print_line(form: output.Format, line: str) -> None:
    if form == "tsv":
        output.note(line)
    else:
        width = min(WIDTH, output.columns() or WIDTH)
        output.data("\n".join(output.wrap(line, width)))


def _format_row(row: RowOutcome, comparison: Comparison) -> dict[str, str]:
    lines = {each.heading: each.lines(row, comparison) for each in columns.TERMINAL}
    return {name: "; ".join(own) or (name and formats.NONE) for name, own in lines.items()}


def print_trends(trends: Trends, form: output.Format = "table") -> None:
    """Print first and newest value of each metric, and its change points.

    TSV has one line per run and metric. Everything else is printed to stderr.
    """
    say = partial(_print_line, form)
    first, newest = trends.runs[0], trends.runs[-1]
    say(f"specbench compare --over-time: {len(trends.runs)} runs, {first.name} to {newest.name}")
    if form == "tsv":
        output.tsv(_value_rows(trends))
    else:
        output.table(_summary_rows(trends), ("task", "method", "runs", *trend.FIGURES))
    for series in trends.series:
        for point in series.changes:
            say(f"{series.key.task} {series.key.label} {_describe_change(trends, series, point)}")
    for sentence in trends.left_out:
        say(f"left out: {sentence}")
    say(_explain_changes(trends))


def _summary_rows(trends: Trends) -> list[dict[str, Any]]:
    """Return one line per row (method on a task), with one column per metric."""
    lines: dict[RowKey, dict[str, Any]] = {}
    for series in trends.series:
        line = lines.setdefault(
            series.key, {"task": series.key.task, "method": series.key.label, "runs": 0}
        )
        line["runs"] = max(line["runs"], len(series.known_values))
        values = list(
            dict.fromkeys(words.format_figure(series.figure, v) for v in series.known_values)
        )
        ends = (
            values
            if len(values) < 2
            else [values[0], words.format_figure(series.figure, series.known_values[-1])]
        )
        line[series.figure] = " -> ".join(ends) + " *" * bool(series.changes)
    return list(lines.values())


def _value_rows(trends: Trends) -> list[dict[str, Any]]:
    """Return one line per run, row and metric."""
    return [
        {
            "run": run.name,
            "created_utc": run.created_utc,
            "commit": run.commit,
            "task": series.key.task,
            "method": series.key.label,
            "figure": series.figure,
            "value": value,
            "changed": "yes" if any(point.first == i for point in series.changes) else "no",
        }
        for series in trends.series
        for i, (run, value) in enumerate(zip(trends.runs, series.values, strict=True))
    ]


def _describe_change(trends: Trends, series: TrendSeries, point: ChangePoint) -> str:
    """Describe a change point: values before and after it, time and commits."""
    last, first = trends.runs[point.last], trends.runs[point.first]
    levels = (words.format_figure(series.figure, level) for level in (point.before, point.after))
    commits = f"commit {last.commit or 'unknown'} -> {first.commit or 'unknown'}"
    chance = f", p {point.p:.1g}" if series.noisy else ""
    params = f"; {', '.join(point.params)}" if point.params else ""
    return (
        f"{series.figure} {' -> '.join(levels)} at {first.created_utc} ({first.name},"
        f" {commits}{chance}){params}"
    )


def _explain_changes(trends: Trends) -> str:
    """Explain what a change point is, and the probability of a false one."""
    noisy = sum(series.noisy for series in trends.series)
    return (
        f"* changes: of the {noisy} noisy figures those of level, with a chance of"
        f" {trend.FALSE_ALARMS:.0%} that any of them is false; of the others every difference"
    )
