"""Document model of written reports: sections with paragraphs, grids, pictures.

`content.py` builds documents, and `markdown.py` writes them. LaTeX and Spec-Bench tables are grids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.metrics import Align, Column, Row
from specbench_cli.summary.summary import Summary


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    Attributes:
        headings: the names of its columns.
        aligns: their alignment. () leaves it to the writer.
        rows: the cells of each row; None is a missing value.
        sections: the indices at which rows of another kind begin (`text.sections`).
    """

    headings: Sequence[str]
    aligns: Sequence[Align]
    rows: Sequence[Sequence[object]]
    sections: text.Sections = ()


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Sentences."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """An unordered list with an optional title line."""

    lines: Sequence[str]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Lines with preserved whitespace."""

    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture. path: relative to the document's folder. alt: alternative text."""

    path: str
    alt: str


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what follows it. level: 2 is a section, 3 a part of it."""

    title: str
    parts: Sequence[Part]
    level: int = 2


Part = Grid | Paragraph | Bullets | Preformatted | Picture | Section


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    title: str
    parts: Sequence[Part]


def grid(chosen: Sequence[Column], rows: Sequence[Row], *, apart: bool = True) -> Grid:
    """A line a row. apart: whether rows of another kind have a section of their own."""
    shown = metrics.of(chosen, rows)
    return Grid(
        tuple(column.heading for column in shown),
        tuple(column.align for column in shown),
        tuple(tuple(column.shown(row) for column in shown) for row in rows),
        text.sections(rows) if apart else (),
    )


def by_family(summary: Summary, figure: Callable[[Row], str]) -> Grid:
    """A line a row, a column a family, and one for all."""
    found = {family: {row.label: row for row in rows} for family, rows in summary.families.items()}
    lines = []
    for row in summary.rows:
        parts = (rows.get(row.label) for rows in found.values())
        cells = (formats.NONE if part is None else figure(part) for part in parts)
        lines.append((row.label, *cells, figure(row)))
    figures: list[Align] = ["c"] * (len(found) + 1)
    names = (text.family(family.replace("_", " "), rows.values()) for family, rows in found.items())
    return Grid(
        ("method", *names, "all"),
        ("l", *figures),
        tuple(lines),
        text.sections(summary.rows),
    )
