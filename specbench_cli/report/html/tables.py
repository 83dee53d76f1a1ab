"""The tables of the page: which rows each has, and what is said below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from specbench_cli.report.html.columns import (
    DETAILS,
    EQUIVALENCE,
    EVIDENCE,
    FIGURES,
    GROUP,
    LOSSY,
    METHOD,
    RANK,
    SWEEP,
    Cell,
    Column,
    Figure,
    number,
    param,
    percent,
    word,
)
from specbench_cli.report.html.facts import public
from specbench_cli.report.numbers.row import Row
from specbench_cli.report.numbers.summary import Summary
from specbench_cli.report.pareto import Sweep
from specbench_cli.report.reading import Reading
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.report.terminal import claims, text

_MOST = 500
"""Cells of a kind that are listed one by one."""
_SHORT = 32
"""Characters of a text that stands on one line."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first `heads` cells of a row name it."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    heads: int = 1


def overall(summary: Summary) -> list[Table]:
    """All prompts together; lossless and lossy rows apart, as they are never ranked together, and
    those of run scope apart from both, as their figures depend on the order of the prompts."""
    rest = (*_work(summary), *_quality(summary))
    return [
        _table(f"overall-{key}", caption, rows, (*RANK, *figures, *rest), note)
        for key, caption, figures, note in _KINDS
        if (rows := [row for row in summary.rows if _key(row) == key])
    ]


_ORDER = (
    "They learn from one prompt for the next: their figures depend on the order of the prompts."
)
_KINDS = (
    (
        "lossless",
        "Lossless methods",
        FIGURES,
        "Same letter: no significant difference (simultaneous 95%). Peers are other"
        " implementations, measured in the same run.",
    ),
    ("run", "Lossless methods, run scope", FIGURES, f"{_ORDER} Letters are those of all."),
    (
        "lossy",
        "Lossy methods",
        LOSSY,
        "The output is not vanilla's; these rows are not ranked with the lossless ones.",
    ),
    ("lossy-run", "Lossy methods, run scope", LOSSY, f"{_ORDER} The output is not vanilla's."),
)
"""The kinds of rows, each with a table of its own: its key, caption, columns and note."""


def _key(row: Row) -> str:
    """A row's kind."""
    if row.lossless:
        return "run" if row.order_matters else "lossless"
    return "lossy-run" if row.order_matters else "lossy"


def by_family(summary: Summary) -> list[Table]:
    """A row a family and method; the kinds of rows apart, as in `overall`."""
    rest = (*_work(summary), *_quality(summary))
    tables = []
    for key, caption, figures, _ in _KINDS:
        shown = (*RANK, *figures, *rest)
        rows = tuple(
            (word(family.replace("_", " ")), *(cell(row) for _, cell in shown))
            for family, of_family in summary.families.items()
            for row in of_family
            if _key(row) == key
        )
        if rows:
            family = Column("family", "task family", numeric=False, choose=True)
            columns = (family, *(column for column, _ in shown))
            name = f"By task family, {caption.lower()}"
            tables.append(Table(f"family-{key}", name, columns, rows, heads=3))
    return tables


def in_detail(summary: Summary) -> Table:
    """What a row was run with, and its counters."""
    return _table("detail", "Parameters and counters", summary.rows, DETAILS)


def equivalence(summary: Summary) -> Table:
    """What became of the outputs, and what that proves."""
    note = text.proof(summary)
    return _table("equivalence", "Outputs against vanilla's", summary.rows, EQUIVALENCE, note)


def evidence(summary: Summary) -> Table | None:
    """Sampled outputs against vanilla's, where token by token there is nothing to compare."""
    rows = [row for row in summary.rows if row.log_likelihood_difference is not None]
    note = "Evidence, not proof: the proof of a law is its audit (specbench audit)."
    if not rows:
        return None
    return _table("evidence", "Sampled outputs, less vanilla's", rows, EVIDENCE, note)


def sweep_table(sweep: Sweep) -> Table:
    """The rows of a sweep by parameter."""
    swept: tuple[Figure, ...] = tuple(
        (Column(name), partial(param, name=name)) for name in sweep.params
    )
    columns = (METHOD[0], *(column for column, _ in (*swept, *SWEEP)), Column("Pareto front"))
    rows = tuple(
        (
            *(cell(point.row) for _, cell in (METHOD, *swept, *SWEEP)),
            word("yes" if point.front else text.NONE),
        )
        for point in sweep.points
    )
    note = (
        "Discarded: drafted tokens that do not stand / tokens. Verified: target forwards /"
        " tokens. The front: no other row has less of one and as little of the other."
    )
    return Table("sweep", "Sweep", columns, rows, note)


def incidents(reading: Reading) -> list[Table]:
    """The cells that a reader has to know of, one by one."""
    found = reading.incidents
    kinds = (
        (
            "differing",
            "Outputs that differ",
            (
                Column("verdict", numeric=False, choose=True),
                Column("position", "index of the first token that differs"),
                Column("gap", "what the worst token lacks of the best decision score"),
                Column("explained by width", "whether vanilla's forward chooses the same tokens at"
                       " the method's verify width", numeric=False),
            ),
            found.differing,
        ),
        ("failed", "Failed cells", (Column("error", numeric=False),), found.failed),
        (
            "void",
            "Void cells",
            (Column("other processes' CPU", "the machine was not quiet: times do not count"),),
            found.void,
        ),
    )  # fmt: skip
    return [
        _listed(key, caption, columns, cells) for key, caption, columns, cells in kinds if cells
    ]


def claimed(reading: Reading) -> Table | None:
    """What the methods' sources report, beside what was measured here."""
    rows = [line.cells() for line in claims.lines(reading.summary, reading.facts)]
    return _said("claimed", claims.TITLE, claims.HEADINGS, rows, claims.NOTE) if rows else None


def spec_bench(reading: Reading) -> Table | None:
    """The figures by Spec-Bench's formulas, where they were asked for."""
    found = reading.spec_bench
    if found is None:
        return None
    note = " ".join((spec_bench_table.NOTE, *found.notes))
    headings = spec_bench_table.HEADINGS
    return _said("spec-bench", spec_bench_table.TITLE, headings, found.overall().rows, note)


def _said(
    key: str, caption: str, headings: Sequence[str], lines: Sequence[Sequence[object]], note: str
) -> Table:
    """A table of what is written out already."""
    rows = tuple(tuple(map(_plain, line)) for line in lines)
    columns = tuple(
        Column(heading, numeric=all(isinstance(row[at].value, float | None) for row in rows))
        for at, heading in enumerate(headings)
    )
    return Table(key, caption, columns, rows, note)


def _listed(
    key: str, caption: str, columns: Sequence[Column], cells: Sequence[Sequence[object]]
) -> Table:
    rows = tuple(tuple(_plain(value) for value in cell) for cell in cells[:_MOST])
    more = len(cells) - _MOST
    note = f"And {more} more, in records.jsonl." if more > 0 else ""
    return Table(key, caption, (*_CELL, *columns), rows, note, heads=2)


def _table(
    key: str, caption: str, rows: Iterable[Row], figures: Sequence[Figure], note: str = ""
) -> Table:
    shown = tuple(tuple(cell(row) for _, cell in figures) for row in rows)
    heads = 2 if figures[0] is GROUP else 1
    return Table(key, caption, tuple(column for column, _ in figures), shown, note, heads)


def _plain(value: object) -> Cell:
    """What is written out already; numbers sort as numbers."""
    if value is None:
        return Cell(text.NONE)
    shown = public(str(value))
    try:
        return Cell(shown, float(shown.removesuffix("%").removesuffix("x")))
    except ValueError:
        return word(shown, "long" if len(shown) > _SHORT else "")


def _work(summary: Summary) -> tuple[Figure, ...]:
    """The target's work, where parts of it drafted."""
    return tuple(
        (Column("work", note.removeprefix("work: ")), lambda row: number(row.work))
        for note in text.work(summary)
    )


def _quality(summary: Summary) -> tuple[Figure, ...]:
    """Accuracy, where answers are scored."""
    if all(row.score is None for row in summary.rows):
        return ()
    return ((Column("accuracy", "mean score of the answers"), lambda r: percent(r.score)),)


_CELL = (
    Column("method", numeric=False, choose=True),
    Column("prompt", numeric=False),
    Column("turn"),
    Column("pass"),
)
