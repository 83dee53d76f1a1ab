"""Columns and cells of the tables in a report."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from specbench_cli import output
from specbench_cli.summary.formats import NONE

Align = Literal["l", "r", "c"]
Value = str | int | float | bool | None
R = TypeVar("R")
"""Type of the object that one row of a table shows, such as `MethodSummary`."""


@dataclass(frozen=True, slots=True)
class Heading:
    """Heading of a column.

    Attributes:
        heading: Text above the column.
        meaning: Explanation, shown as a tooltip. May be empty.
        align: Left, right or centre.
        choose: True if users of the HTML page can filter rows by this column.
        narrow: Shorter heading for narrow terminals. "" if there is none.
    """

    heading: str
    meaning: str = ""
    align: Align = "r"
    choose: bool = False
    narrow: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: Text of the cell.
        value: Value to sort by. None sorts last.
        look: Emphasis: "", "strong", "broken", "letters", "peer", "bound", "time" or "long".
        shares: Parts of a bar, which add up to 1. HTML and terminal show the bar.
        link: Address of a link. "" for none.
    """

    text: str
    value: Value = None
    look: str = ""
    shares: tuple[float, ...] = ()
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column(Heading, Generic[R]):
    """A column of a table with a row per method, request load, prediction and so on.

    Attributes:
        format: Formats the cell of a row.
        data: TSV name -> function that returns the value for programs. Tables sort by the first
            value, or by the text of the cell if there is none.
        when: Returns True if the column is informative for some rows. Otherwise tables omit it.
        look, shares, link: See `Cell`.
    """

    format: Callable[[R], str]
    data: Mapping[str, Callable[[R], Value]] = field(default_factory=dict)
    when: Callable[[Sequence[R]], bool] = lambda _: True
    look: Callable[[R], str] = lambda _: ""
    shares: Callable[[R], tuple[float, ...]] = lambda _: ()
    link: Callable[[R], str] = lambda _: ""

    def cell(self, row: R) -> Cell:
        """Return the cell of a row. An empty cell has no value."""
        text = self.format(row)
        value: Value = None
        if text not in ("", NONE):
            value = next(iter(self.data.values()))(row) if self.data else text
        return Cell(text, value, self.look(row), self.shares(row), self.link(row))


def select_informative(columns: Sequence[Column[R]], rows: Sequence[R]) -> list[Column[R]]:
    """Return the columns that have information about the given rows."""
    return [column for column in columns if column.when(rows)]


def row_data(columns: Sequence[Column[R]], row: R) -> dict[str, Value]:
    """Return the values of a row for programs, by TSV name."""
    return {name: get(row) for column in columns for name, get in column.data.items()}


def write_csv(lines: Sequence[Mapping[str, object]], path: Path, *, empty: str = "") -> Path:
    """Write records as a CSV file that is safe in a spreadsheet. A missing value is empty.

    Args:
        lines: The records. The names of their values are the header.
        empty: Header of a file without records.
    """
    names = list(dict.fromkeys(name for line in lines for name in line)) or [empty]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(output.escape_formula, names))
        writer.writerows(
            [output.escape_formula(line.get(name)) for name in names] for line in lines
        )
    return path
