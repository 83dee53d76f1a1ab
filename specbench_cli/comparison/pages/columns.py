"""The columns of a comparison, declared once: heading, what each shows of a row and has as data.

A rendering (terminal, TSV, pandas, Markdown, JSON) chooses among them and decides only how a cell
looks. A new column is declared here and named in the tables below that are to have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbench_cli.comparison.outcome import Comparison, RowOutcome
from specbench_cli.comparison.pages import words
from specbench_cli.summary.metrics import METRICS

Of = Callable[[RowOutcome, Comparison], Any]
_PLACES = 3
"""Prompts shown for a finding; data has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a comparison's rows.

    shown: a row's cell in words, a line each.
    data: the same for programs, flat: a name each.
    document: the same in JSON, nested.
    """

    heading: str = ""
    shown: Callable[[RowOutcome, Comparison], Sequence[str]] = lambda *_: ()
    data: Mapping[str, Of]
    document: Mapping[str, Of]


def _same(name: str, get: Callable[[RowOutcome], Any], *, document: str | None = None) -> Column:
    """A column that is the same in words and as data."""

    def value(row: RowOutcome, _: Comparison) -> Any:
        return get(row)

    return Column(
        heading=name,
        shown=lambda row, _: (str(get(row)),),
        data={name: value},
        document={document or name: value},
    )


def _fails(row: RowOutcome, comparison: Comparison) -> bool:
    return row in comparison.failed


def _decode(name: str) -> Of:
    """A figure of the change of a row's decoding time."""
    return lambda row, _: getattr(words.decode(row), name, None)


def _findings(row: RowOutcome, _: Comparison) -> list[dict[str, Any]]:
    return [
        {"outcome": found.outcome, "says": found.says, "where": list(found.where)}
        for found in words.findings(row)
    ]


FAILS = Column(
    shown=lambda *of: ("!",) if _fails(*of) else (),
    data={"fails": lambda *of: "yes" if _fails(*of) else "no"},
    document={"fails": _fails},
)
OUTCOME = _same("outcome", words.outcome)
TASK = _same("task", lambda row: row.key.task)
METHOD = _same("method", lambda row: row.key.label, document="label")
NAME = Column(heading="method", shown=lambda row, _: (words.name(row),), data={}, document={})
"""Task and method."""
RULE = _same("rule", lambda row: row.rule)
WHY = _same("why", lambda row: row.why)
PAIRS = _same("pairs", lambda row: row.pairs)
MAT = Column(
    heading=METRICS["mat"].heading,
    shown=lambda row, _: (words.mat(row),),
    data={"mat_base": lambda row, _: row.mat[0], "mat_new": lambda row, _: row.mat[1]},
    document={"mat": lambda row, _: dict(zip(("base", "new"), row.mat, strict=True))},
)
DECODE = Column(
    heading="decode time",
    shown=lambda row, _: [found.percent for found in [words.decode(row)] if found],
    data={f"decode_{name}": _decode(name) for name in ("ratio", "low", "high")},
    document={},
)
TIMES = Column(
    heading="times",
    shown=lambda row, _: words.times(row),
    data={},
    document={"times": lambda row, _: [asdict(change) for change in row.changes]},
)
FOUND = Column(
    heading="what",
    shown=lambda row, _: [found.says for found in words.findings(row)],
    data={"found": lambda row, _: "; ".join(found.says for found in words.findings(row))},
    document={"findings": _findings},
)
WHERE = Column(
    heading="where",
    shown=lambda row, _: [
        words.places(found.where, _PLACES) for found in words.findings(row) if found.where
    ],
    data={"where": lambda row, _: [place for found in row.findings for place in found.where]},
    document={},
)

TERMINAL = (FAILS, OUTCOME, TASK, METHOD, RULE, PAIRS, MAT, DECODE)
FLAT = (OUTCOME, FAILS, TASK, METHOD, RULE, PAIRS, MAT, DECODE, FOUND, WHERE)
"""Of TSV and pandas."""
DOCUMENT = (TASK, METHOD, OUTCOME, FAILS, RULE, WHY, PAIRS, MAT, FOUND, TIMES)
CHANGED = (OUTCOME, NAME, FOUND, WHERE, TIMES)
"""Of Markdown: rows with an outcome to tell."""
SAME = (NAME, RULE, PAIRS, MAT, TIMES)
"""Of Markdown: rows without."""


def flat(row: RowOutcome, comparison: Comparison) -> dict[str, Any]:
    """A row with every figure, for programs that want a value a column."""
    return {name: get(row, comparison) for each in FLAT for name, get in each.data.items()}


def document(row: RowOutcome, comparison: Comparison) -> dict[str, Any]:
    """A row of the JSON document."""
    return {name: get(row, comparison) for each in DOCUMENT for name, get in each.document.items()}
