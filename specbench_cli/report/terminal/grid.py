"""Terminal writer of grids."""

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
_LEAST_NAME = 8
"""Minimum width of the column that shrinks."""
_ALIGN: dict[Align, Literal["left", "center", "right"]] = {"l": "left", "c": "center", "r": "right"}
_MARKS: dict[Align, str] = {"l": "<", "c": "^", "r": ">"}


def draw(
    grid: Grid,
    width: int | None = None,
    *,
    most: int | None = None,
    gaps: Sequence[int] = (),
    bound: Collection[int] = (),
    head: str = "",
) -> list[Text]:
    """Return a grid as aligned lines: the headings, and a line per row or section.

    A grid that is too wide for the terminal has smaller gaps. If it is still too wide, it becomes
    several grids, each with the columns that name a row.

    Args:
        width: width of the terminal. None permits lines of any length.
        most: width from which on the last naming column is shortened. None never shortens it.
        gaps: blanks before each column. () means two between columns.
        bound: indices of the columns that stay with the column before them.
        head: style of the headings.
    """
    cells = [[_text(cell) for cell in row] for row in grid.rows]
    gaps = gaps or [2 * bool(at) for at in range(len(grid.columns))]
    headings = list(map(output.escape_hidden, grid.headings))

    def lines(chosen: Sequence[int], most: int | None) -> list[Text]:
        return _lines(grid, headings, cells, gaps, chosen, most)

    whole = lines(range(len(headings)), most)
    parts = [whole]
    if width is not None and max(map(len, whole)) > width:
        gaps = [1] * len(headings)
        headings = [
            output.escape_hidden(column.narrow or column.heading) for column in grid.columns
        ]
        names = list(range(grid.label_columns))
        chosen = [[*names]]
        for at in range(grid.label_columns, len(headings)):
            full = len(chosen[-1]) > len(names) and at not in bound
            if full and max(map(len, lines([*chosen[-1], at], most))) > width:
                chosen.append([*names])
            chosen[-1].append(at)
        least = width if most is None else min(width, most)
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
    most: int | None,
) -> list[Text]:
    """Return the headings and rows of some columns, aligned."""
    widths = {at: max([len(headings[at]), *(len(line[at]) for line in cells)]) for at in chosen}
    excess = 0 if most is None else sum(widths.values()) + sum(gaps[at] for at in chosen) - most
    name = grid.label_columns - 1
    if excess > 0:
        widths[name] = max(min(widths[name], _LEAST_NAME), widths[name] - excess)
    aligns = {at: grid.columns[at].align for at in chosen}
    heading = "".join(
        " " * gaps[at] + f"{headings[at]:{_MARKS[aligns[at]]}{widths[at]}}" for at in chosen
    )
    lines = [Text(heading.rstrip())]
    for row, line in zip(grid.rows, cells, strict=True):
        drawn = Text(style="dim" if any(cell.look == "peer" for cell in row) else "")
        for at in chosen:
            shown = _cut(line[at], widths[at])
            shown.align(_ALIGN[aligns[at]], widths[at])
            drawn.append(" " * gaps[at]).append_text(shown)
        drawn.rstrip()
        lines.append(drawn)
    return lines


def _text(cell: Cell) -> Text:
    """Return a cell as styled text. Shares become a bar."""
    if not cell.shares:
        return output.make_text(cell.shown, _STYLES.get(cell.look, ""))
    bar = Text()
    for name, marks in bar_widths(cell.shares).items():
        bar.append(BAR_MARKS[name] * marks, _BAR_STYLES[name])
    return bar


def bar_widths(shares: Sequence[float]) -> dict[str, int]:
    """Return how many marks target, draft and host get on the time bar, by largest remainders."""
    exact = [BAR_WIDTH * share for share in shares]
    marks = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: marks[i] - exact[i])
    for i in by_remainder[: BAR_WIDTH - sum(marks)]:
        marks[i] += 1
    return dict(zip(BAR_MARKS, marks, strict=True))


def _cut(cell: Text, width: int) -> Text:
    """Return a copy of a cell, cut in the middle if it is too wide.

    Variants of a method differ at the end of their labels.
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

    A terminal gets everything on stdout. A pipe gets the records as TSV on stdout, and the rest on
    stderr.

    Args:
        grid: Table for a terminal. None if there is none.
        records: Rows for programs.
    """
    human = output.is_interactive()
    say = output.data if human else output.note
    for line in head:
        say(line)
    if not human:
        if rows := list(records):
            output.rows(rows)
    elif grid is not None and grid.rows:
        for drawn in draw(grid, head="bold"):
            output.data(drawn)
    for line in notes:
        say(f" {line}" if human else line)
