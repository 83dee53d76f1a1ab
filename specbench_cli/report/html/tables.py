"""The tables of the page: which rows each has, and what is said below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench_cli.report import claims
from specbench_cli.report.html.facts import public
from specbench_cli.report.reading import Reading
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.metrics import Column, Heading, Row, Value
from specbench_cli.summary.pareto import Sweep, swept
from specbench_cli.summary.summary import Summary

_MOST = 500
"""Cells of a kind that are listed one by one."""
_SHORT = 32
"""Characters of a text that stands on one line."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows and is sorted by. kind: its look. shares: of a bar; their sum is 1. link:
    where it leads, if anywhere."""

    shown: str
    value: Value = None
    kind: str = ""
    shares: tuple[float, ...] = ()
    link: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first `heads` cells of a row name it."""

    id: str
    caption: str
    columns: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    heads: int = 1


def overall(summary: Summary, but: Sequence[Column] = ()) -> list[Table]:
    """All prompts together, without some columns; lossless and lossy rows apart, as they are never
    ranked together, and those of run scope apart from both, as their figures depend on the order of
    the prompts."""
    letters = text.prose(
        [
            *text.letter_ranges(summary),
            *text.two_intervals(summary),
            *text.one_process(summary),
        ]
    )
    return [
        _table(
            f"overall-{key}",
            caption,
            rows,
            [column for column in _columns(key) if column not in but],
            f"{note} {letters if key == 'lossless' else ''}".rstrip(),
        )
        for key, caption, note in _KINDS
        if (rows := [row for row in summary.rows if _key(row) == key])
    ]


_ORDER = (
    "They learn from one prompt for the next: their figures depend on the order of the prompts."
)
_KINDS = (
    (
        "lossless",
        "Lossless methods",
        "Same letter: no significant difference (simultaneous 95%). Peers are other"
        " implementations, measured in the same run.",
    ),
    ("run", "Lossless methods, run scope", f"{_ORDER} Letters are those of all."),
    (
        "lossy",
        "Lossy: speed and quality",
        "The output is not vanilla's; these rows are not ranked with the lossless ones.",
    ),
    ("lossy-run", "Lossy: speed and quality, run scope", f"{_ORDER} The output is not vanilla's."),
)
"""The kinds of rows, each with a table of its own: its key, caption and note."""


def _key(row: Row) -> str:
    """A row's kind."""
    if row.lossless:
        return "run" if row.order_matters else "lossless"
    return "lossy-run" if row.order_matters else "lossy"


def _columns(key: str) -> Sequence[Column]:
    """Those of a kind of rows."""
    return metrics.LOSSY_PAGE if key.startswith("lossy") else metrics.PAGE


def by_family(summary: Summary) -> list[Table]:
    """A row a family and method; the kinds of rows apart, as in `overall`."""
    tables = []
    for key, caption, _ in _KINDS:
        of_family = {
            family.replace("_", " "): [row for row in rows if _key(row) == key]
            for family, rows in summary.families.items()
        }
        shown = metrics.of(_columns(key), [row for rows in of_family.values() for row in rows])
        rows = tuple(
            (word(family), _cell(metrics.QUESTIONS, row), *(_cell(column, row) for column in shown))
            for family, own in of_family.items()
            for row in own
        )
        if rows:
            family = Heading("family", "task family", "l", choose=True)
            name = f"By task family, {caption.lower()}"
            heads = (family, metrics.QUESTIONS, *shown)
            note = text.prose(text.small_families(summary, "column n", then=""))
            named = 2 + _naming(shown)
            tables.append(Table(f"family-{key}", name, heads, rows, note, heads=named))
    return tables


def in_detail(summary: Summary) -> Table:
    """What a row was run with, and its counters."""
    return _table("detail", "Parameters and counters", summary.rows, metrics.DETAIL)


def equivalence(summary: Summary) -> Table:
    """What became of the outputs, and what that proves."""
    note = text.prose([text.proof(summary)])
    return _table(
        "equivalence", "Outputs against vanilla's", summary.rows, metrics.EQUIVALENCE, note
    )


def evidence(summary: Summary) -> Table | None:
    """Sampled outputs against vanilla's, where token by token there is nothing to compare."""
    rows = [row for row in summary.rows if row.log_likelihood_difference is not None]
    note = "Evidence, not proof: the proof of a law is its audit (specbench audit)."
    if not rows:
        return None
    return _table("evidence", "Sampled outputs, less vanilla's", rows, metrics.EVIDENCE, note)


def sweep_table(sweep: Sweep) -> Table:
    """The rows of a sweep by parameter."""
    note = (
        "Discarded: drafted tokens that do not stand / tokens. Verified: target forwards /"
        " tokens. The front: no other row has less of one and as little of the other."
    )
    rows = [point.row for point in sweep.points]
    return _table("sweep", "Sweep", rows, swept(sweep), note)


def incidents(reading: Reading) -> list[Table]:
    """The cells that a reader has to know of, one by one."""
    found = reading.incidents
    kinds = (
        (
            "differing",
            "Outputs that differ",
            (
                Heading("verdict", align="l", choose=True),
                Heading("position", "index of the first token that differs"),
                Heading("gap", "what the worst token lacks of the best decision score"),
                Heading("explained by width", "whether vanilla's forward chooses the same tokens at"
                       " the method's verify width", align="l"),
            ),
            found.differing,
        ),
        ("failed", "Failed cells", (Heading("error", align="l"),), found.failed),
        (
            "void",
            "Void cells",
            (Heading("other processes' CPU", "the machine was not quiet: times do not count"),),
            found.void,
        ),
    )  # fmt: skip
    return [_listed(*kind) for kind in kinds if kind[-1]]


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
    numeric = [
        all(isinstance(row[at].value, float | None) for row in rows) for at in range(len(headings))
    ]
    heads = (
        Heading(heading, align="r" if figures else "l")
        for heading, figures in zip(headings, numeric, strict=True)
    )
    return Table(key, caption, tuple(heads), rows, note)


def _listed(
    key: str, caption: str, headings: Sequence[Heading], cells: Sequence[Sequence[object]]
) -> Table:
    rows = tuple(tuple(_plain(value) for value in cell) for cell in cells[:_MOST])
    more = len(cells) - _MOST
    note = f"And {more} more, in records.jsonl." if more > 0 else ""
    return Table(key, caption, (*_OUTPUT, *headings), rows, note, heads=2)


def _table(
    key: str, caption: str, rows: Sequence[Row], chosen: Sequence[Column], note: str = ""
) -> Table:
    shown = metrics.of(chosen, rows)
    cells = tuple(tuple(_cell(column, row) for column in shown) for row in rows)
    return Table(key, caption, tuple(shown), cells, note, _naming(shown))


def _naming(shown: Sequence[Column]) -> int:
    """How many columns name a row."""
    return 2 if shown[0] is metrics.GROUP else 1


_LOOKS: dict[Column, Callable[[Row], str]] = {
    metrics.GROUP: lambda row: "letters",
    metrics.METHOD: lambda row: "peer" if row.peer else "bound" if row.upper_bound else "",
    metrics.SPEEDUP: lambda row: "broken" if row.broken else "strong",
    metrics.OUTPUT: lambda row: "broken" if row.broken or row.failed or row.mismatch else "",
    metrics.PARAMETERS: lambda row: "long",
}


def _cell(column: Column, row: Row) -> Cell:
    """A row's cell; of where time goes a bar."""
    look = _LOOKS[column](row) if column in _LOOKS else ""
    shown, value = column.shown(row), column.value(row)
    if column is metrics.TIME and value is not None:
        shares = (row.share_target, row.share_draft, row.share_host)
        return Cell(shown, value, "time", tuple(share for share in shares if share is not None))
    return Cell(shown, value, look)


def word(shown: str, kind: str = "") -> Cell:
    """A text, sorted as it reads; none has no place."""
    return Cell(shown, None if shown == formats.NONE else shown, kind)


def _plain(value: object) -> Cell:
    """What is written out already; numbers sort as numbers."""
    if value is None:
        return Cell(formats.NONE)
    shown = public(str(value))
    try:
        return Cell(shown, float(shown.removesuffix("%").removesuffix("x")))
    except ValueError:
        return word(shown, "long" if len(shown) > _SHORT else "")


_OUTPUT = (
    Heading("method", align="l", choose=True),
    Heading("prompt", align="l"),
    Heading("turn"),
    Heading("pass"),
)
