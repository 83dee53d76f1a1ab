"""Tables on a terminal, with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.text import Text

from specbench_cli import output
from specbench_cli.report.document import Grid
from specbench_cli.summary.columns import Align, Cell

BAR_WIDTH = 11
BAR_MARKS = {"target": "#", "draft": "+", "host": "."}
_BAR_STYLES = {"target": "blue", "draft": "yellow", "host": "bright_black"}
_STYLES = {"letters": "bold", "strong": "bold", "broken": "bold red"}
_MIN_NAME_WIDTH = 8
"""Minimum width of the label column, which is shortened if a table is too wide."""
_ALIGN: dict[Align, Literal["left", "center", "right"]] = {"l": "left", "c": "center", "r": "right"}
_MARKS: dict[Align, str] = {"l": "<", "c": "^", "r": ">"}


def draw(
    grid: Grid,
    width: int | None = None,
    *,
    max_width: int | None = None,
    gaps: Sequence[int] = (),
    kept_with_previous: Collection[int] = (),
    head: str = "",
) -> list[Text]:
    """Return a table as aligned lines: the headings, and one line per row or section.

    If a table is too wide for the terminal, the gaps are smaller. If it is still too wide, it is
    split into several tables, and each starts with the columns that name a row.

    Args:
        width: Width of the terminal. None allows lines of any length.
        max_width: Width above which labels are shortened. None never shortens them.
        gaps: Number of spaces before each column. () means two between columns.
        kept_with_previous: Indices of columns that are not separated from the previous column.
        head: Style of the headings.
    """
    cells = [[_text(cell) for cell in row] for row in grid.rows]
    gaps = gaps or [2 * bool(at) for at in range(len(grid.columns))]
    headings = list(map(output.escape_hidden, grid.headings))

    def lines(chosen: Sequence[int], max_width: int | None) -> list[Text]:
        return _lines(grid, headings, cells, gaps, chosen, max_width)

    whole = lines(range(len(headings)), max_width)
    parts = [whole]
    if width is not None and max(map(len, whole)) > width:
        gaps = [1] * len(headings)
        headings = [
            output.escape_hidden(column.narrow or column.heading) for column in grid.columns
        ]
        names = list(range(grid.label_columns))
        chosen = [[*names]]
        for at in range(grid.label_columns, len(headings)):
            full = len(chosen[-1]) > len(names) and at not in kept_with_previous
            if full and max(map(len, lines([*chosen[-1], at], max_width))) > width:
                chosen.append([*names])
            chosen[-1].append(at)
        least = width if max_width is None else min(width, max_width)
        parts = [lines(each, least) for each in chosen]
    for part in parts:
        part[0].stylize(head)
        for place, kind in reversed(grid.sections):
            part.insert(1 + place if place else 0, output.make_text(kind))
    return [line for part in parts for line in part]


def _lines(
    grid: Grid,
    headings: Sequence[str],
    cells: Sequence[Sequence[Text]],
    gaps: Sequence[int],
    chosen: Sequence[int],
    max_width: int | None,
) -> list[Text]:
    """Return the headings and rows of some columns, aligned."""
    widths = {at: max([len(headings[at]), *(len(line[at]) for line in cells)]) for at in chosen}
    surplus = (
        0
        if max_width is None
        else sum(widths.values()) + sum(gaps[at] for at in chosen) - max_width
    )
    name = grid.label_columns - 1
    if surplus > 0:
        widths[name] = max(min(widths[name], _MIN_NAME_WIDTH), widths[name] - surplus)
    aligns = {at: grid.columns[at].align for at in chosen}
    heading = "".join(
        " " * gaps[at] + f"{headings[at]:{_MARKS[aligns[at]]}{widths[at]}}" for at in chosen
    )
    lines = [Text(heading.rstrip())]
    for row, line in zip(grid.rows, cells, strict=True):
        line_text = Text(style="dim" if any(cell.look == "peer" for cell in row) else "")
        for at in chosen:
            text = _shorten(line[at], widths[at])
            text.align(_ALIGN[aligns[at]], widths[at])
            line_text.append(" " * gaps[at]).append_text(text)
        line_text.rstrip()
        lines.append(line_text)
    return lines


def _text(cell: Cell) -> Text:
    """Return a cell as styled text. A cell with shares becomes a bar."""
    if not cell.shares:
        return output.make_text(cell.text, _STYLES.get(cell.look, ""))
    bar = Text()
    for name, marks in bar_widths(cell.shares).items():
        bar.append(BAR_MARKS[name] * marks, _BAR_STYLES[name])
    return bar


def bar_widths(shares: Sequence[float]) -> dict[str, int]:
    """Return part ("target", "draft", "host") -> its width on the time bar, in characters.

    Widths are rounded by the largest remainder, so they add up to `BAR_WIDTH`.
    """
    exact = [BAR_WIDTH * share for share in shares]
    marks = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: marks[i] - exact[i])
    for i in by_remainder[: BAR_WIDTH - sum(marks)]:
        marks[i] += 1
    return dict(zip(BAR_MARKS, marks, strict=True))


def _shorten(cell: Text, width: int) -> Text:
    """Return a copy of a cell. If it is too wide, its middle is cut out.

    The end is kept, because the labels of a method's variants differ there.
    """
    if len(cell) <= width:
        return cell.copy()
    tail = width // 2
    cut: Text = Text.assemble(cell[: width - 1 - tail], "…", cell[len(cell) - tail :])
    return cut


def print_grid(
    head: Iterable[str],
    grid: Grid | None,
    records: Iterable[Mapping[str, Any]],
    notes: Iterable[str] = (),
) -> None:
    """Print lines, a table and notes.

    On a terminal, everything is printed to stdout. In a pipe, the records are printed to stdout as
    TSV, and the rest to stderr.

    Args:
        head: Lines above the table.
        grid: The table, or None.
        records: The rows of the table, as data for programs.
        notes: Lines below the table.
    """
    is_terminal = output.is_interactive()
    write = output.data if is_terminal else output.note
    for line in head:
        write(line)
    if not is_terminal:
        if rows := list(records):
            output.rows(rows)
    elif grid is not None and grid.rows:
        for line_text in draw(grid, head="bold"):
            output.data(line_text)
    for line in notes:
        write(f" {line}" if is_terminal else line)
