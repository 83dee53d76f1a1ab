"""The tables of a result, 100 columns wide or as wide as the terminal, and the same as TSV and
JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.text import Text

from specbench_cli import output
from specbench_cli.report.reading import Reading
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.forced import by_target
from specbench_cli.summary.load import load_lines
from specbench_cli.summary.metrics import Align, Column, Row
from specbench_cli.summary.summary import ALL, Summary

WIDTH = 100
BAR_WIDTH = 11
BAR_MARKS = {"target": "#", "draft": "+", "host": "."}
_BAR_LEGEND = " ".join(f"{mark} {name}" for name, mark in BAR_MARKS.items())
_BAR_STYLES = {"target": "blue", "draft": "yellow", "host": "bright_black"}
_LEAST_LABEL = 8
_ALIGN: dict[Align, Literal["left", "center", "right"]] = {"l": "left", "c": "center", "r": "right"}
_MARKS = {"left": "<", "center": "^", "right": ">"}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: heading, cell, alignment, the blanks before it, whether it gives way first, the
    heading where there is little room, and whether it is never put apart from those before it."""

    heading: str
    cell: Callable[[Row], Text]
    align: Literal["left", "center", "right"] = "right"
    gap: int = 1
    shrinks: bool = False
    narrow: str = ""
    bound: bool = False


def print_runs(
    readings: Sequence[Reading], *, families: bool, form: output.Format = "table"
) -> None:
    """Print the default table of each run, and by task family too if asked.

    Args:
        form: tables, one after another; or one TSV, or a JSON object a row, on stdout, and what is
            said of the figures on stderr.
    """
    for reading in readings:
        summary, facts = reading.summary, reading.facts
        head = facts.header(summary.prompts, min(WIDTH, output.columns() or WIDTH))
        foot = footer(summary, facts, reading.where)
        foot += load_lines(reading.records)
        if form == "table":
            width = output.columns()
            notes = (output.styled(line, "dim") for line in _noted(foot, width))
            more = _drawn_targets(summary, facts, width)
            more += _drawn_families(summary, width) if families else []
            for line in (*map(output.styled, head), *_drawn(summary, facts, width), *notes, *more):
                output.data(line)
        else:
            for note in (*head, *foot):
                output.note(note)
    records = [row for reading in readings for row in _records(reading, families)]
    if form == "tsv":
        output.tsv(records)
    if form == "json":
        for record in records:
            output.json_line(record)


def footer(summary: Summary, facts: Facts, where: str | None) -> list[str]:
    """What the figures mean, and what must be known before using them."""
    return [
        *_ranked(summary, facts),
        *text.letter_ranges(summary),
        *([] if facts.unranked else [*text.two_intervals(summary), *_one_process(summary)]),
        *text.few_questions(summary, text.more_questions(facts)),
        *_wrapped(text.rare_questions(summary)),
        *([_OWN_VANILLA] if facts.runs > 1 and not facts.unranked else []),
        f"noise floor A/A {text.noise_floor(summary)}"
        f";  vanilla / hf:vanilla {text.vanilla_ratio(summary)};  time: {_BAR_LEGEND}",
        text.proof(summary) + (f".  by task: specbench report {where}" if where else ""),
        *text.work(summary),
        *([facts.tuned] if facts.tuned else []),
        *text.near_ties(summary),
        *text.evidence(summary),
        *text.learning(summary),
        *text.grammar(summary, facts),
        *text.controls(summary),
        *text.warnings(summary, facts),
    ]


def _ranked(summary: Summary, facts: Facts) -> list[str]:
    """What ranks the rows."""
    if facts.targets:
        return [_EACH_ITS_OWN]
    if facts.forced:
        return ["forced: nothing ranks these rows; each speedup is over its own run's vanilla"]
    if not any(row.letters for row in summary.rows):
        return []
    processes = "1 process" if summary.passes == 1 else f"{summary.passes} processes"
    return [f"same letter = no significant difference (simultaneous 95%, {processes})"]


def _one_process(summary: Summary) -> list[str]:
    return _wrapped(text.one_process(summary))


def _wrapped(notes: Iterable[str]) -> list[str]:
    """Wrap notes to the width of the table."""
    said = (textwrap.wrap(note, WIDTH - 1) for note in notes)
    return [f"{'  ' * bool(at)}{line}" for lines in said for at, line in enumerate(lines)]


_OWN_VANILLA = "several runs: each row's speedup is over vanilla of its own run"
_EACH_ITS_OWN = "several targets: a speedup is over vanilla of its own target; nothing ranks them"


def run_text(summary: Summary, facts: Facts) -> str:
    """The default table as plain text, for a page that has the rest as well."""
    lines = [line.plain for line in _drawn(summary, facts)]
    notes = [f" {note}" for note in footer(summary, facts, None)]
    return output.plain("\n".join([*facts.header(summary.prompts, WIDTH), *lines, *notes]))


def _records(reading: Reading, families: bool) -> list[dict[str, Any]]:
    """A line a row; with `families` the overall rows (family "all") come first."""
    scopes = {ALL: reading.summary.rows} | (reading.summary.families if families else {})
    return [
        {"run": reading.name, "family": family}
        | {name: get(row) for column in metrics.DATA for name, get in column.data.items()}
        | ({"speedup": metrics.speedup_or_broken(row)} if row.broken else {})
        for family, rows in scopes.items()
        for row in rows
    ]


def _noted(notes: Sequence[str], width: int | None) -> list[str]:
    """Notes in lines that a terminal of a width does not break."""
    if width is None:
        return [f" {note}" for note in notes]
    whole = "\n".join(notes).replace("\n  ", " ").splitlines()  # some are two lines already
    return [line for note in whole for line in output.wrapped(note, width, " ", "   ")]


def _drawn(summary: Summary, facts: Facts, width: int | None = None) -> list[Text]:
    """Heading and rows; those of another kind below, under a line that says which. Of `width` see
    `_grids`."""
    rows = summary.rows
    wanted: Sequence[Column] = metrics.TERMINAL
    if facts.targets:  # what a label ends with has columns of its own, where it is not cut
        rows = tuple(replace(row, label=row.label.rpartition(" @")[0]) for row in rows)
        wanted = metrics.BY_TARGET
    drawn = []
    for lossless, chosen in ((True, wanted), (False, metrics.LOSSY)):
        own = [row for row in rows if row.lossless == lossless]
        if not own and (rows or not lossless):
            continue
        bound = () if lossless else metrics.WITH_SPEEDUP
        drawn_as = [replace(_column(c), bound=c in bound) for c in metrics.of(chosen, own)]
        grids = _grids(drawn_as, own, width)
        for lines in grids:
            for place, kind in reversed(text.sections(own)):
                lines.insert(1 + place if place else 0, output.styled(kind))
            drawn += lines
    return drawn


def _column(column: Column) -> _Column:
    """A column as it is drawn: the first two go without a heading."""
    looks: dict[Column, Callable[[Row], Text]] = {
        metrics.GROUP: lambda row: output.styled(metrics.group(row), "bold"),
        metrics.METHOD: lambda row: output.styled(row.label),
        metrics.SPEEDUP: lambda row: output.styled(
            metrics.speedup_or_broken(row), "bold red" if row.broken else "bold"
        ),
        metrics.TIME: _bar,
        metrics.OUTPUT: lambda row: output.styled(
            metrics.verdicts(row), "red" if row.broken or row.failed else ""
        ),
    }
    return _Column(
        "" if column in (metrics.GROUP, metrics.METHOD) else column.heading,
        looks.get(column, lambda row: output.styled(column.shown(row))),
        _ALIGN[column.align],
        2 if column in (metrics.INTERVAL, metrics.MAT, metrics.CHOSEN, metrics.TIME) else 1,
        column is metrics.METHOD,
        "time" if column is metrics.TIME else "",
    )


def _drawn_families(summary: Summary, width: int | None = None) -> list[Text]:
    """A grid a figure: a row a method, a column a family; accuracy where answers are scored."""
    by_family = {
        text.family(family, rows).replace(" (", "("): {row.label: row for row in rows}  # six fit
        for family, rows in summary.families.items()
    }
    figures = {"speedup by family": metrics.SPEEDUP.shown, "MAT by family": metrics.MAT.shown}
    if any(row.score is not None for row in summary.rows):
        figures["accuracy by family"] = lambda row: formats.percent(row.score)
    lines = _drawn_by(by_family, summary.rows, figures, width)
    small = _noted(text.small_families(summary), width)
    return [*lines, *(output.styled(line, "dim") for line in small)]


def _drawn_targets(summary: Summary, facts: Facts, width: int | None) -> list[Text]:
    """The same with a column a target; nothing where there is but one."""
    found = by_target(summary, facts.targets)
    if found is None:
        return []
    figures = {"speedup by target": metrics.SPEEDUP.shown, "MAT by target": metrics.MAT.shown}
    return _drawn_by(found.targets, found.rows, figures, width)


def _drawn_by(
    parts: Mapping[str, Mapping[str, Row]],
    shown: Sequence[Row],
    figures: Mapping[str, Callable[[Row], str]],
    width: int | None,
) -> list[Text]:
    """A grid a figure, under its title: a line a row, a column a part of what was measured."""
    lines = []
    for title, figure in figures.items():
        # There is no room for what a lossy row's speedup costs: the table above has it.
        rows = [row for row in shown if row.lossless] if figure is metrics.SPEEDUP.shown else shown
        drawn = [_column(metrics.METHOD)]
        drawn += [
            _Column(output.plain(part), _cell_of(own, figure), gap=2) for part, own in parts.items()
        ]
        grids = _grids(drawn, rows, width)
        lines += [output.styled(title, "bold"), *(line for grid in grids for line in grid)]
    return lines


def _cell_of(rows: Mapping[str, Row], figure: Callable[[Row], str]) -> Callable[[Row], Text]:
    return lambda row: output.styled(figure(rows[row.label]) if row.label in rows else formats.NONE)


def _grids(chosen: Sequence[_Column], rows: Sequence[Row], width: int | None) -> list[list[Text]]:
    """`_grid`, for a terminal of a width: closer where that is needed to fit, else one below the
    other, each with the columns up to the one that shrinks, which does so for those that are bound
    to those before them; None for lines of any length."""
    if width is None or _wide(_grid(chosen, rows)) <= width:
        return [_grid(chosen, rows)]
    close = [replace(column, gap=1, heading=column.narrow or column.heading) for column in chosen]
    lead = next(at for at, column in enumerate(close) if column.shrinks) + 1
    parts = [close[:lead]]
    for column in close[lead:]:
        full = len(parts[-1]) > lead and _wide(_grid([*parts[-1], column], rows)) > width
        if full and not column.bound:
            parts.append(close[:lead])
        parts[-1] = [*parts[-1], column]
    return [_grid(part, rows, min(width, WIDTH)) for part in parts]


def _wide(lines: Sequence[Text]) -> int:
    return max(map(len, lines))


def _grid(chosen: Sequence[_Column], rows: Sequence[Row], most: int = WIDTH) -> list[Text]:
    """Aligned lines, of at most so many columns as far as the one that shrinks allows."""
    cells = [[column.cell(row) for column in chosen] for row in rows]
    widths = [
        max([len(column.heading), *(len(line[i]) for line in cells)])
        for i, column in enumerate(chosen)
    ]
    excess = sum(widths) + sum(column.gap for column in chosen) - most
    for i, column in enumerate(chosen):
        if column.shrinks and excess > 0:
            widths[i] = max(min(widths[i], _LEAST_LABEL), widths[i] - excess)
    heading = "".join(
        " " * column.gap + f"{column.heading:{_MARKS[column.align]}{width}}"
        for column, width in zip(chosen, widths, strict=True)
    )
    lines = [output.styled(heading.rstrip())]
    for row, line in zip(rows, cells, strict=True):
        drawn = Text(style="dim" if row.peer else "")
        for column, width, cell in zip(chosen, widths, line, strict=True):
            shown = _cut(cell, width)
            shown.align(column.align, width)
            drawn.append(" " * column.gap).append_text(shown)
        drawn.rstrip()
        lines.append(drawn)
    return lines


def _cut(cell: Text, width: int) -> Text:
    """A cell, without its middle if it is too wide: rows of one method differ at the end."""
    if len(cell) <= width:
        return cell
    tail = width // 2
    cut: Text = Text.assemble(cell[: width - 1 - tail], "…", cell[len(cell) - tail :])
    return cut


def bar_marks(row: Row) -> dict[str, int]:
    """Return how many marks target, draft and host get on the time bar, by largest remainders."""
    if row.share_target is None or row.share_draft is None or row.share_host is None:
        return {}
    exact = [BAR_WIDTH * s for s in (row.share_target, row.share_draft, row.share_host)]
    marks = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: marks[i] - exact[i])
    for i in by_remainder[: BAR_WIDTH - sum(marks)]:
        marks[i] += 1
    return dict(zip(BAR_MARKS, marks, strict=True))


def _bar(row: Row) -> Text:
    bar = Text()
    for name, marks in bar_marks(row).items():
        bar.append(BAR_MARKS[name] * marks, _BAR_STYLES[name])
    return bar or Text(formats.NONE)
