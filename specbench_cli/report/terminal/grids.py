"""Tables of a written report, as words: what Markdown and LaTeX print, each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.metrics import Align, Column, Row
from specbench_cli.summary.summary import Summary


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. sections: where its rows are of another kind than those above (`text.sections`)."""

    headings: tuple[str, ...]
    aligns: tuple[Align, ...]
    rows: tuple[tuple[str, ...], ...]
    sections: text.Sections = ()


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
