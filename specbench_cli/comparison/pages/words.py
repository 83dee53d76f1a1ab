"""Wording of a comparison, shared by terminal, Markdown and JUnit output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specbench_cli.comparison import trend
from specbench_cli.comparison.outcome import (
    OUTCOMES,
    Comparison,
    ComparisonFinding,
    RowOutcome,
    TimeChange,
)
from specbench_cli.summary import formats

ACCEPT = "specbench compare --save NAME RUN"
"""The command that makes a run the baseline."""
_HEADLINE_ROWS = 2
"""Maximum number of failed rows whose finding is in the headline."""


def is_compared(row: RowOutcome) -> bool:
    """Return True if the outputs or times of a row were compared."""
    return row.rule != "nothing" or bool(row.changes)


def changed_rows(comparison: Comparison) -> list[RowOutcome]:
    """Return the rows whose outcome is not "same", worst first."""
    rows = [row for row in comparison.rows if row.outcome != "same"]
    return sorted(rows, key=lambda row: OUTCOMES.index(row.outcome))


def unchanged_rows(comparison: Comparison) -> list[RowOutcome]:
    """Return the rows that were compared and are the same."""
    return [row for row in comparison.rows if row.outcome == "same" and is_compared(row)]


def uncompared_rows(comparison: Comparison) -> list[RowOutcome]:
    """Return the rows that both sides have but that could not be compared."""
    return [row for row in comparison.rows if row.outcome == "same" and not is_compared(row)]


def headline(comparison: Comparison) -> str:
    """Return one line that says whether the comparison passes or fails, and why."""
    failed, rows = comparison.failed_rows, comparison.rows
    if not failed:
        return f"pass: {format_row_count(len(rows))}: {tally(comparison)}"
    worst = [row for row in changed_rows(comparison) if row in failed]
    descriptions = [
        f"{row_name(row)}: {failing_findings(row, comparison)[0].message}"
        for row in worst[:_HEADLINE_ROWS]
    ]
    more = [f"{len(failed) - _HEADLINE_ROWS} more"] if len(failed) > _HEADLINE_ROWS else []
    return f"fail: {len(failed)} of {format_row_count(len(rows))}: {'; '.join(descriptions + more)}"


def tally(comparison: Comparison) -> str:
    """Return the number of rows with each outcome."""
    counts = Counter(row.outcome for row in changed_rows(comparison))
    words = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]]
    kept, unknown = len(unchanged_rows(comparison)), len(uncompared_rows(comparison))
    words += [f"{kept} same"] * bool(kept) + [f"{unknown} not compared"] * bool(unknown)
    return ", ".join(words)


def failing_findings(row: RowOutcome, comparison: Comparison) -> list[ComparisonFinding]:
    """Return the findings of a row with which the comparison fails, worst first."""
    return [found for found in sort_findings(row) if found.outcome in comparison.fail_on]


def sort_findings(row: RowOutcome) -> list[ComparisonFinding]:
    """Return the findings of a row, worst first."""
    return sorted(row.findings, key=lambda found: OUTCOMES.index(found.outcome))


def group_findings(comparison: Comparison) -> list[tuple[str, ComparisonFinding]]:
    """Return findings with the names of their rows, worst rows first.

    Equal findings of several rows of a task are grouped.
    """
    rows: dict[tuple[str, ComparisonFinding], list[str]] = {}
    for row in changed_rows(comparison):
        for found in sort_findings(row):
            rows.setdefault((row.key.task, found), []).append(row.key.label)
    return [(f"{task} {', '.join(labels)}", found) for (task, found), labels in rows.items()]


def can_accept(comparison: Comparison) -> bool:
    """Return True if the user may have intended the failing changes.

    Broken outputs are never intended.
    """
    return any(
        found.outcome != "broken"
        for row in comparison.failed_rows
        for found in failing_findings(row, comparison)
    )


def side_names(comparison: Comparison) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return (name, commit) of BASE and of NEW. An unknown commit is an empty text."""
    facts = comparison.facts
    base, new = (str(facts.get(side, {}).get("commit", "")) for side in ("base", "new"))
    return (comparison.base, base), (comparison.new, new)


def row_name(row: RowOutcome | trend.TrendSeries) -> str:
    """Return task and method of a row."""
    return f"{row.key.task} {row.key.label}"


def outcome_name(row: RowOutcome) -> str:
    """Return the outcome of a row, or "not compared"."""
    return row.outcome if row.outcome != "same" or is_compared(row) else "not compared"


def format_row_count(n: int) -> str:
    """Return a number of rows as text."""
    return f"{n} row" if n == 1 else f"{n} rows"


def format_mat(row: RowOutcome) -> str:
    """Return the MAT of both sides, or one value if they are equal."""
    base, new = (formats.number(value) for value in row.mat)
    return base if base == new else f"{base} -> {new}"


def format_times(row: RowOutcome) -> list[str]:
    """Return the change of each time of a row."""
    return [str(found) for found in row.changes]


def decode_change(row: RowOutcome) -> TimeChange | None:
    """Return the change of a row's decode time, or None."""
    return next((found for found in row.changes if found.figure == "decode"), None)


def format_locations(where: Sequence[str], shown: int) -> str:
    """Return the first locations, and the number of the others."""
    words = ", ".join(where[:shown])
    return words if len(where) <= shown else f"{words} and {len(where) - shown} more"


def describe_basis(comparison: Comparison) -> list[str]:
    """Return sentences on how rows were compared: the checks and rules that applied."""
    rules = Counter(row.rule for row in comparison.rows if row.rule != "nothing")
    applied = ", ".join(f"{rule} ({format_row_count(n)})" for rule, n in rules.items()) or "none"
    fail_on = ", ".join(comparison.fail_on) or "nothing"
    return [
        f"deterministic gate: {applied}",
        f"timing gate: {comparison.timing or 'not applied'}",
        f"fails on: {fail_on}; slower means by more than {comparison.tolerance:.0%}",
    ]


def format_figure(kind: str, value: float) -> str:
    """Format a value of a trend."""
    if kind == trend.SPEEDUP:
        return formats.ratio(value)
    if kind == trend.ACCEPTANCE:
        return formats.percent(value, 1)
    return formats.number(value, 0 if kind == trend.BAD else 2)
