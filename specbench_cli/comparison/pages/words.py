"""How a comparison is said, the same on a terminal, in Markdown and in JUnit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specbench_cli.comparison import trend
from specbench_cli.comparison.outcome import OUTCOMES, Change, Comparison, Finding, RowOutcome
from specbench_cli.summary import formats

ACCEPT = "specbench compare --save NAME RUN"
"""The command that makes a run the baseline."""
_NAMED = 2
"""Failed rows that the headline tells the finding of."""


def compared(row: RowOutcome) -> bool:
    """Whether anything of a row was compared: one that was not is not the same."""
    return row.rule != "nothing" or bool(row.changes)


def changed(comparison: Comparison) -> list[RowOutcome]:
    """The rows with an outcome to tell, worst first."""
    rows = [row for row in comparison.rows if row.outcome != "same"]
    return sorted(rows, key=lambda row: OUTCOMES.index(row.outcome))


def same(comparison: Comparison) -> list[RowOutcome]:
    """The rows that were compared and are the same."""
    return [row for row in comparison.rows if row.outcome == "same" and compared(row)]


def left_out(comparison: Comparison) -> list[RowOutcome]:
    """The rows that both sides have and nothing of which could be compared."""
    return [row for row in comparison.rows if row.outcome == "same" and not compared(row)]


def headline(comparison: Comparison) -> str:
    """Pass or fail, and why, in one line."""
    failed, rows = comparison.failed, comparison.rows
    if not failed:
        return f"pass: {of_rows(len(rows))}: {tally(comparison)}"
    worst = [row for row in changed(comparison) if row in failed]
    told = [f"{name(row)}: {gates(row, comparison)[0].says}" for row in worst[:_NAMED]]
    more = [f"{len(failed) - _NAMED} more"] if len(failed) > _NAMED else []
    return f"fail: {len(failed)} of {of_rows(len(rows))}: {'; '.join(told + more)}"


def tally(comparison: Comparison) -> str:
    """How many rows came to what."""
    counts = Counter(row.outcome for row in changed(comparison))
    words = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]]
    kept, unknown = len(same(comparison)), len(left_out(comparison))
    words += [f"{kept} same"] * bool(kept) + [f"{unknown} not compared"] * bool(unknown)
    return ", ".join(words)


def gates(row: RowOutcome, comparison: Comparison) -> list[Finding]:
    """The findings that close the gate, worst first."""
    return [found for found in findings(row) if found.outcome in comparison.fail_on]


def findings(row: RowOutcome) -> list[Finding]:
    """A row's findings, worst first."""
    return sorted(row.findings, key=lambda found: OUTCOMES.index(found.outcome))


def told(comparison: Comparison) -> list[tuple[str, Finding]]:
    """Findings, worst rows first, with the rows that they are of: what is the same of several rows
    of a task is told once."""
    rows: dict[tuple[str, Finding], list[str]] = {}
    for row in changed(comparison):
        for found in findings(row):
            rows.setdefault((row.key.task, found), []).append(row.key.label)
    return [(f"{task} {', '.join(labels)}", found) for (task, found), labels in rows.items()]


def acceptable(comparison: Comparison) -> bool:
    """Whether something closes the gate that may be wanted: a wrong output never is."""
    return any(
        found.outcome != "broken" for row in comparison.failed for found in gates(row, comparison)
    )


def sides(comparison: Comparison) -> tuple[tuple[str, str], tuple[str, str]]:
    """Name and commit of BASE, and of NEW; the commit is empty where it is not known."""
    facts = comparison.facts
    base, new = (str(facts.get(side, {}).get("commit", "")) for side in ("base", "new"))
    return (comparison.base, base), (comparison.new, new)


def name(row: RowOutcome | trend.Series) -> str:
    """A row in one word or two."""
    return f"{row.key.task} {row.key.label}"


def outcome(row: RowOutcome) -> str:
    """A row's outcome; a row that was not compared has none."""
    return row.outcome if row.outcome != "same" or compared(row) else "not compared"


def of_rows(n: int) -> str:
    """How many rows."""
    return f"{n} row" if n == 1 else f"{n} rows"


def mat(row: RowOutcome) -> str:
    """MAT, once where it is the same."""
    base, new = (formats.number(value) for value in row.mat)
    return base if base == new else f"{base} -> {new}"


def times(row: RowOutcome) -> list[str]:
    """What became of each of a row's times."""
    return [str(found) for found in row.changes]


def decode(row: RowOutcome) -> Change | None:
    """The change of a row's decoding time."""
    return next((found for found in row.changes if found.figure == "decode"), None)


def places(where: Sequence[str], shown: int) -> str:
    """The first places, and how many more there are."""
    words = ", ".join(where[:shown])
    return words if len(where) <= shown else f"{words} and {len(where) - shown} more"


def basis(comparison: Comparison) -> list[str]:
    """What was compared with what, by which rules, a sentence each."""
    rules = Counter(row.rule for row in comparison.rows if row.rule != "nothing")
    applied = ", ".join(f"{rule} ({of_rows(n)})" for rule, n in rules.items()) or "none"
    fail_on = ", ".join(comparison.fail_on) or "nothing"
    return [
        f"deterministic gate: {applied}",
        f"timing gate: {comparison.timing or 'not applied'}",
        f"fails on: {fail_on}; slower means by more than {comparison.tolerance:.0%}",
    ]


def figure(kind: str, value: float) -> str:
    """A value of a trend."""
    if kind == trend.SPEEDUP:
        return formats.ratio(value)
    if kind == trend.ACCEPTANCE:
        return formats.percent(value, 1)
    return formats.number(value, 0 if kind == trend.BAD else 2)
