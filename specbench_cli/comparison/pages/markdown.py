"""A comparison as Markdown, for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specbench_cli import output
from specbench_cli.comparison.outcome import Comparison, RowOutcome
from specbench_cli.comparison.pages import columns, words
from specbench_cli.comparison.pages.columns import ComparisonColumn
from specbench_cli.report.markdown_table import inline, table
from specbench_cli.summary import formats

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
"""A commit hash; GitHub and GitLab link it."""


def render(comparison: Comparison) -> str:
    """Return the comment: pass or fail, changes, what was not compared, how to accept changes."""
    changed, same = words.changed_rows(comparison), words.unchanged_rows(comparison)
    base, new = (_format_side(*side) for side in words.side_names(comparison))
    verdict, _, why = words.headline(comparison).partition(": ")
    parts = [
        f"### specbench compare: {verdict}",
        f"{inline(why)}.",
        f"New {new} against base {base}.",
    ]
    if changed:
        parts.append(_table(columns.CHANGED, changed, comparison))
    parts += _not_compared(comparison)
    if words.can_accept(comparison):
        parts.append(
            f"Wanted? Make the new run the baseline, and commit it: `{words.ACCEPT}`"
            " (it writes `results/baselines/NAME/`)."
        )
    if same:
        title = f"{words.format_row_count(len(same))} the same"
        parts += _fold(title, _table(columns.UNCHANGED, same, comparison))
    parts += _fold(
        "How it was compared", "\n".join(f"- {inline(s)}" for s in _explain_comparison(comparison))
    )
    return "\n\n".join(parts) + "\n"


def code(value: object) -> str:
    """Return text as a Markdown code span.

    Backticks would end the span, so they become apostrophes.
    """
    return output.escape_hidden(" ".join(str(value).split())).replace("`", "'")


def _format_side(name: str, commit: str) -> str:
    known = commit if _COMMIT.fullmatch(commit) else inline(commit)
    return f"`{code(name)}`" + (f" (commit {known})" if commit else "")


def _table(
    shown: Sequence[ComparisonColumn], rows: Sequence[RowOutcome], comparison: Comparison
) -> str:
    cells = ([_format_cell(column, row, comparison) for column in shown] for row in rows)
    return table([column.heading for column in shown], cells, escaped=True)


def _format_cell(column: ComparisonColumn, row: RowOutcome, comparison: Comparison) -> str:
    """Return a cell; an outcome that fails the gate is bold."""
    text = "<br>".join(map(inline, column.lines(row, comparison))) or formats.NONE
    return f"**{text}**" if column is columns.OUTCOME and row in comparison.failed_rows else text


def _not_compared(comparison: Comparison) -> list[str]:
    sentences = [inline(sentence) for sentence in comparison.not_compared]
    sentences += [
        inline(f"{words.row_name(row)}: {row.rule_reason}")
        for row in words.uncompared_rows(comparison)
    ]
    return ["**Not compared:**", "\n".join(f"- {s}" for s in sentences)] if sentences else []


def _explain_comparison(comparison: Comparison) -> list[str]:
    """Return sentences on how rows were compared, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in comparison.rows:
        if row.rule_reason and words.is_compared(row):
            reasons.setdefault((row.rule, row.rule_reason), []).append(words.row_name(row))
    lines = [f"{rule}: {reason}: {', '.join(rows)}" for (rule, reason), rows in reasons.items()]
    return [*words.describe_basis(comparison), *lines]


def _fold(title: str, content: str) -> list[str]:
    return [f"<details><summary>{title}</summary>", content, "</details>"]
