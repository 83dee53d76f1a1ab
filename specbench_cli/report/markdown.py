"""Conversion of documents to Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from specbench_cli import output
from specbench_cli.report.document import (
    Bullets,
    Grid,
    Paragraph,
    Part,
    Picture,
    Preformatted,
    ReportDocument,
    Section,
)
from specbench_cli.report.markdown_table import fenced, inline, table


def render(document: ReportDocument) -> str:
    """Return a document as a Markdown page."""
    parts = [f"# {inline(document.title)}", *_render_parts(document.parts)]
    return output.escape_hidden("\n\n".join(parts)) + "\n"


def _render_parts(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        match part:
            case Section(title, inner, level):
                yield f"{'#' * level} {inline(title)}"
                yield from _render_parts(inner)
            case Grid():
                yield from _tables(part)
            case Paragraph(words):
                yield inline(words)
            case Bullets(lines, title):
                head = [inline(title), ""] if title else []
                yield "\n".join([*head, *(f"- {inline(line)}" for line in lines)])
            case Preformatted(lines):
                yield fenced(lines)
            case Picture(path, alt):
                yield f"![{alt}]({path})"


def _tables(grid: Grid) -> Iterator[str]:
    """Yield one Markdown table for each section of a table, below the title of the section."""
    starts = [(0, ""), *grid.sections, (len(grid.rows), "")]
    for (first, kind), (end, _) in pairwise(starts):
        if kind:
            yield f"{inline(kind.capitalize())}."
        if first < end or not grid.rows:
            lines = grid.rows[first:end]
            yield table(grid.headings, ([cell.text for cell in line] for line in lines))
