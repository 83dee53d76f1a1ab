"""Parts of a report, independent of its format: sections, paragraphs, tables and pictures.

`content.py` and `html/page.py` build documents from the tables in `tables.py`. Each format has one
writer, which turns a document into text:
`terminal/grid.py`, `markdown.py`, `html/writer.py` and `paper/latex.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_cli.summary import formats, metrics
from specbench_cli.summary.columns import Align, Cell, Column, Heading, R, select_informative
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.text import Sections

_SHORT = 32
"""Maximum number of characters of a text that a table does not wrap."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    Attributes:
        columns: Headings of its columns.
        rows: Cells of each row.
        sections: (index of the first row, title) of each section (`summary.text.sections`).
        id: HTML id of the table.
        caption: Title. Markdown uses the heading of the section instead.
        note: Sentences below the table. Markdown omits them.
        label_columns: Number of leading columns that name a row.
    """

    columns: Sequence[Heading]
    rows: Sequence[Sequence[Cell]]
    sections: Sections = ()
    id: str = ""
    caption: str = ""
    note: str = ""
    label_columns: int = 1

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of the columns."""
        return tuple(column.heading for column in self.columns)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """An unordered list with an optional title line."""

    lines: Sequence[str]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Text with fixed line breaks and spaces, such as a terminal table."""

    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file.

    Attributes:
        path: Path relative to the document's folder.
        alt: Alternative text.
    """

    path: str
    alt: str


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its content.

    Attributes:
        level: 2 is a section, 3 a subsection.
        id: HTML id of the section.
    """

    title: str
    parts: Sequence[Part]
    level: int = 2
    id: str = ""


class Widget:
    """Base class of parts that only the HTML page has, such as the token viewer."""

    __slots__ = ()


Part = Grid | Paragraph | Bullets | Preformatted | Picture | Section | Widget


@dataclass(frozen=True, slots=True)
class ReportDocument:
    """A whole report."""

    title: str
    parts: Sequence[Part]


def make_grid(columns: Sequence[Column[R]], rows: Sequence[R], **more: Any) -> Grid:
    """Return a table with one line per row. Columns without information are omitted.

    Args:
        more: Further attributes of the grid.
    """
    informative = select_informative(columns, rows)
    lines = tuple(tuple(column.cell(row) for column in informative) for row in rows)
    return Grid(tuple(informative), lines, **more)


def make_pivot_grid(
    rows: Sequence[MethodSummary],
    parts: Mapping[str, Mapping[str, MethodSummary]],
    format_entry: Callable[[MethodSummary], str],
    heading: str = "method",
    align: Align = "c",
    missing: str = formats.NONE,
    **more: Any,
) -> Grid:
    """Return a table with one line per method and one column per task family or target.

    Args:
        parts: Column heading -> label of a method -> metrics of the method.
        format_entry: Formats a method's metrics as the text of a cell.
        missing: Text of the cell if the method is missing in a family or on a target.
        more: Further attributes of the grid.
    """
    lines = []
    for row in rows:
        found = (own.get(row.label) for own in parts.values())
        cells = (Cell(missing if each is None else format_entry(each)) for each in found)
        lines.append((metrics.METHOD.cell(row), *cells))
    return Grid(
        (Heading(heading, align="l"), *(Heading(part, align=align) for part in parts)),
        tuple(lines),
        **more,
    )


def make_value_grid(
    headings: Sequence[str | Heading], lines: Iterable[Sequence[object]], **more: Any
) -> Grid:
    """Return a table of numbers and texts. None is a missing value.

    Args:
        more: Further attributes of the grid.
    """
    columns = (Heading(each, align="l") if isinstance(each, str) else each for each in headings)
    return Grid(tuple(columns), tuple(tuple(map(plain_cell, line)) for line in lines), **more)


def plain_cell(value: object) -> Cell:
    """Return a number or a text as a cell. A text such as "2.5x" or "10%" sorts as a number."""
    if value is None:
        return Cell(formats.NONE)
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    text = str(value)
    try:
        return Cell(text, float(text.removesuffix("%").removesuffix("x")))
    except ValueError:
        known = None if text == formats.NONE else text
        return Cell(text, known, "long" if len(text) > _SHORT else "")
