"""How a comparison is said, the same on a terminal, in Markdown and in JUnit."""

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
"""Failed rows that the headline tells the finding of."""


def is_compared(row: RowOutcome) -> bool:
    """Whether anything of a row was compared: one that was not is not the same."""
    return row.rule != "nothing" or bool(row.changes)


def changed_rows(comparison: Comparison) -> list[RowOutcome]:
    """The rows with an outcome to tell, worst first."""
    rows = [row for row in comparison.rows if row.outcome != "same"]
    return sorted(rows, key=lambda row: OUTCOMES.index(row.outcome))


def unchanged_rows(comparison: Comparison) -> list[RowOutcome]:
    """The rows that were compared and are the same."""
    return [row for row in comparison.rows if row.outcome == "same" and is_compared(row)]


def uncompared_rows(comparison: Comparison) -> list[RowOutcome]:
    """The rows that both sides have and nothing of which could be compared."""
    return [row for row in comparison.rows if row.outcome == "same" and not is_compared(row)]


def headline(comparison: Comparison) -> str:
    """Pass or fail, and why, in one line."""
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
    """How many rows came to what."""
    counts = Counter(row.outcome for row in changed_rows(comparison))
    words = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]]
    kept, unknown = len(unchanged_rows(comparison)), len(uncompared_rows(comparison))
    words += [f"{kept} same"] * bool(kept) + [f"{unknown} not compared"] * bool(unknown)
    return ", ".join(words)


def failing_findings(row: RowOutcome, comparison: Comparison) -> list[ComparisonFinding]:
    """The findings that close the gate, worst first."""
    return [found for found in sort_findings(row) if found.outcome in comparison.fail_on]


def sort_findings(row: RowOutcome) -> list[ComparisonFinding]:
    """A row's findings, worst first."""
    return sorted(row.findings, key=lambda found: OUTCOMES.index(found.outcome))


def group_findings(comparison: Comparison) -> list[tuple[str, ComparisonFinding]]:
    """Findings, worst rows first, with the rows that they are of: what is the same of several rows
    of a task is told once."""
    rows: dict[tuple[str, ComparisonFinding], list[str]] = {}
    for row in changed_rows(comparison):
        for found in sort_findings(row):
            rows.setdefault((row.key.task, found), []).append(row.key.label)
    return [(f"{task} {', '.join(labels)}", found) for (task, found), labels in rows.items()]


def can_accept(comparison: Comparison) -> bool:
    """Whether something closes the gate that may be wanted: a wrong output never is."""
    return any(
        found.outcome != "broken"
        for row in comparison.failed_rows
        for found in failing_findings(row, comparison)
    )


def side_names(comparison: Comparison) -> tuple[tuple[str, str], tuple[str, str]]:
    """Name and commit of BASE, and of NEW; the commit is empty where it is not known."""
    facts = comparison.facts
    base, new = (str(facts.get(side, {}).get("commit", "")) for side in ("base", "new"))
    return (comparison.base, base), (comparison.new, new)


def row_name(row: RowOutcome | trend.TrendSeries) -> str:
    """A row in one word or two."""
    return f"{row.key.task} {row.key.label}"


def outcome_name(row: RowOutcome) -> str:
    """A row's outcome; a row that was not compared has none."""
    return row.outcome if row.outcome != "same" or is_compared(row) else "not compared"


def format_row_count(n: int) -> str:
    """How many rows."""
    return f"{n} row" if n == 1 else f"{n} rows"


def format_mat(row: RowOutcome) -> str:
    """MAT, once where it is the same."""
    base, new = (formats.number(value) for value in row.mat)
    return base if base == new else f"{base} -> {new}"


def format_times(row: RowOutcome) -> list[str]:
    """What became of each of a row's times."""
    return [str(found) for found in row.changes]


def decode_change(row: RowOutcome) -> TimeChange | None:
    """The change of a row's decoding time."""
    return next((found for found in row.changes if found.figure == "decode"), None)


def format_locations(where: Sequence[str], shown: int) -> str:
    """The first places, and how many more there are."""
    words = ", ".join(where[:shown])
    return words if len(where) <= shown else f"{words} and {len(where) - shown} more"


def describe_basis(comparison: Comparison) -> list[str]:
    """What was compared with what, by which rules, a sentence each."""
    rules = Counter(row.rule for row in comparison.rows if row.rule != "nothing")
    applied = ", ".join(f"{rule} ({format_row_count(n)})" for rule, n in rules.items()) or "none"
    fail_on = ", ".join(comparison.fail_on) or "nothing"
    return [
        f"deterministic gate: {applied}",
        f"timing gate: {comparison.timing or 'not applied'}",
        f"fails on: {fail_on}; slower means by more than {comparison.tolerance:.0%}",
    ]


def format_figure(kind: str, value: float) -> str:
    """A value of a trend."""
    if kind == trend.SPEEDUP:
        return formats.ratio(value)
    if kind == trend.ACCEPTANCE:
        return formats.percent(value, 1)
    return formats.number(value, 0 if kind == trend.BAD else 2)
