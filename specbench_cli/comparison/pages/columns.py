"""Columns of a comparison, declared once: heading, text and data.

Each output format (terminal, TSV, pandas, Markdown, JSON) selects columns, and decides how a table
cell looks. To add a column, declare it here and add it to the tuples below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbench_cli.comparison.outcome import Comparison, RowOutcome
from specbench_cli.comparison.pages import words
from specbench_cli.summary.metrics import METRICS

Getter = Callable[[RowOutcome, Comparison], Any]
_PLACES = 3
"""Maximum number of prompts shown for a finding. The data contain all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonColumn:
    """A column of the table of a comparison. A row is a method on a task.

    lines: returns the text of the column's cell for a row, as lines.
    data: returns flat values for programs, by name.
    document: returns nested values for JSON, by name.
    """

    heading: str = ""
    lines: Callable[[RowOutcome, Comparison], Sequence[str]] = lambda *_: ()
    data: Mapping[str, Getter]
    document: Mapping[str, Getter]


def _plain_column(
    name: str, get: Callable[[RowOutcome], Any], *, document: str | None = None
) -> ComparisonColumn:
    """Return a column whose text and data are the same value."""

    def value(row: RowOutcome, _: Comparison) -> Any:
        return get(row)

    return ComparisonColumn(
        heading=name,
        lines=lambda row, _: (str(get(row)),),
        data={name: value},
        document={document or name: value},
    )


def _is_failed(row: RowOutcome, comparison: Comparison) -> bool:
    return row in comparison.failed_rows


def _get_decode_change(name: str) -> Getter:
    """Return a function that reads an attribute of a row's decode time change."""
    return lambda row, _: getattr(words.decode_change(row), name, None)


def _findings(row: RowOutcome, _: Comparison) -> list[dict[str, Any]]:
    return [
        {"outcome": found.outcome, "says": found.message, "where": list(found.locations)}
        for found in words.sort_findings(row)
    ]


FAILS = ComparisonColumn(
    lines=lambda *of: ("!",) if _is_failed(*of) else (),
    data={"fails": lambda *of: "yes" if _is_failed(*of) else "no"},
    document={"fails": _is_failed},
)
OUTCOME = _plain_column("outcome", words.outcome_name)
TASK = _plain_column("task", lambda row: row.key.task)
METHOD = _plain_column("method", lambda row: row.key.label, document="label")
NAME = ComparisonColumn(
    heading="method", lines=lambda row, _: (words.row_name(row),), data={}, document={}
)
"""Task and method."""
RULE = _plain_column("rule", lambda row: row.rule)
WHY = _plain_column("why", lambda row: row.rule_reason)
PAIRS = _plain_column("pairs", lambda row: row.pairs)
MAT = ComparisonColumn(
    heading=METRICS["mat"].heading,
    lines=lambda row, _: (words.format_mat(row),),
    data={"mat_base": lambda row, _: row.mat[0], "mat_new": lambda row, _: row.mat[1]},
    document={"mat": lambda row, _: dict(zip(("base", "new"), row.mat, strict=True))},
)
DECODE = ComparisonColumn(
    heading="decode time",
    lines=lambda row, _: [found.percent for found in [words.decode_change(row)] if found],
    data={f"decode_{name}": _get_decode_change(name) for name in ("ratio", "low", "high")},
    document={},
)
TIMES = ComparisonColumn(
    heading="times",
    lines=lambda row, _: words.format_times(row),
    data={},
    document={"times": lambda row, _: [asdict(change) for change in row.changes]},
)
FINDINGS = ComparisonColumn(
    heading="what",
    lines=lambda row, _: [found.message for found in words.sort_findings(row)],
    data={"found": lambda row, _: "; ".join(found.message for found in words.sort_findings(row))},
    document={"findings": _findings},
)
WHERE = ComparisonColumn(
    heading="where",
    lines=lambda row, _: [
        words.format_locations(found.locations, _PLACES)
        for found in words.sort_findings(row)
        if found.locations
    ],
    data={"where": lambda row, _: [place for found in row.findings for place in found.locations]},
    document={},
)

TERMINAL = (FAILS, OUTCOME, TASK, METHOD, RULE, PAIRS, MAT, DECODE)
FLAT = (OUTCOME, FAILS, TASK, METHOD, RULE, PAIRS, MAT, DECODE, FINDINGS, WHERE)
"""Columns of TSV and pandas."""
DOCUMENT = (TASK, METHOD, OUTCOME, FAILS, RULE, WHY, PAIRS, MAT, FINDINGS, TIMES)
CHANGED = (OUTCOME, NAME, FINDINGS, WHERE, TIMES)
"""Columns of the Markdown table of rows that changed."""
UNCHANGED = (NAME, RULE, PAIRS, MAT, TIMES)
"""Columns of the Markdown table of rows that did not change."""


def flat_row(row: RowOutcome, comparison: Comparison) -> dict[str, Any]:
    """Return all values of a row by column name."""
    return {name: get(row, comparison) for each in FLAT for name, get in each.data.items()}


def document_row(row: RowOutcome, comparison: Comparison) -> dict[str, Any]:
    """Return a row of the JSON document."""
    return {name: get(row, comparison) for each in DOCUMENT for name, get in each.document.items()}
