"""Results of runs as tables on a terminal, or as TSV and JSON.

Tables are at most 100 columns wide, or as wide as the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from specbench_cli import output
from specbench_cli.report.document import make_grid, make_pivot_grid
from specbench_cli.report.report_data import ReportData
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.report.spec_bench.table import SpecBench
from specbench_cli.report.terminal.grid import BAR_MARKS, draw
from specbench_cli.summary import formats, load, metrics, text
from specbench_cli.summary.columns import Column, row_data, select_informative
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.load import LoadRow, load_rows
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import ALL, Summary
from specbench_cli.summary.unranked import group_by_target

WIDTH = 100
_BAR_LEGEND = " ".join(f"{mark} {name}" for name, mark in BAR_MARKS.items())
_WIDE_GAP_COLUMNS = (metrics.INTERVAL, metrics.MAT, metrics.CHOSEN, metrics.TIME)
"""Columns with a wider gap before them."""


def print_runs(
    reports: Sequence[ReportData],
    *,
    families: bool = False,
    explain: bool = False,
    form: output.Format = "table",
) -> None:
    """Print the default table of each run.

    Args:
        families: True to print tables by task family, too.
        explain: True to print all notes. By default only a few short notes are printed.
        form: Output format. TSV and JSON have one line per method on stdout. Notes go to stderr.
    """
    for data in reports:
        summary, facts = data.summary, data.facts
        head = facts.header(summary.prompts, min(WIDTH, output.columns() or WIDTH))
        foot = (
            all_notes(summary, facts)
            if explain
            else short_notes(summary, facts, data.report_arguments)
        )
        loads = load_rows(data.records)
        if form == "table":
            width = output.columns()
            lines = [*map(output.make_text, head), *_method_lines(summary, facts, width)]
            notes = [output.make_text(line) for line in _note_lines(foot, width)]
            notes += [Text(" ").append_text(line) for line in load_lines(loads, width)]
            for note in notes:
                note.style = "dim"
            more = _target_lines(summary, facts, width)
            more += _family_lines(summary, width) if families else []
            for line in (*lines, *notes, *more):
                output.data(line)
        else:
            for words in (*head, *foot, *(line.plain for line in load_lines(loads))):
                output.note(words)
    _print_records([row for data in reports for row in _records(data, families)], form)


def print_spec_bench(found: SpecBench, form: output.Format = "table") -> None:
    """Print the results by Spec-Bench's formulas next to specbench's own.

    Args:
        form: Output format, as in `print_runs`.
    """
    output.note(f"{spec_bench_table.TITLE}. {spec_bench_table.NOTE}")
    for note in found.notes:
        output.note(note)
    for table in (found.overall(), found.by_family()) if form == "table" else ():
        for line in draw(table):
            output.data(line)
    _print_records(found.records(), form)


def _print_records(records: Sequence[Mapping[str, Any]], form: output.Format) -> None:
    """Print rows as TSV or JSON. Nothing is printed in the table format."""
    if form == "tsv":
        output.tsv(records)
    for record in records if form == "json" else ():
        output.json_line(record)


def load_lines(
    rows: Sequence[LoadRow], width: int | None = None, title: str = "under load"
) -> list[Text]:
    """Return the table of requests under load, and the arrival rates at which methods saturate."""
    if not rows:
        return []
    lines = draw(
        make_grid(load.TERMINAL, rows),
        width and width - 1,
        gaps=(1, 1, 2, 2, 2, 2, 2, 1, 2),
        kept_with_previous=(7, 8),  # the interval, and if it is saturated
    )
    notes = [f"{title}; {load.HEAD}"], load.saturation_notes(rows)
    above, below = (map(output.make_text, _note_lines(each, width, lead="")) for each in notes)
    return [*above, *lines, *below]


def short_notes(summary: Summary, facts: Facts, report_arguments: str | None) -> list[str]:
    """Return the notes that every reader needs, the warnings, and the command for all notes.

    Args:
        report_arguments: Arguments of `specbench report` for the run. None omits the command.
    """
    few_questions = text.few_questions(summary, text.more_questions(facts))
    return [
        ".  ".join([*_ranking_notes(summary, facts), f"time: {_BAR_LEGEND}"]),
        *([] if facts.unranked else text.disagreements(summary)),
        text.proof(summary),
        *(few_questions or text.one_process(summary)),
        *text.warnings(summary, facts),
        *(
            [f"all notes, and tables by task: specbench report {report_arguments} --explain"]
            if report_arguments
            else []
        ),
    ]


def all_notes(summary: Summary, facts: Facts) -> list[str]:
    """Return all notes (`--explain`): what the numbers mean, and their limits."""
    return [
        *_ranking_notes(summary, facts),
        *text.letter_ranges(summary),
        *([] if facts.unranked else [*text.two_intervals(summary), *text.one_process(summary)]),
        *([] if facts.unranked else text.disagreements(summary)),
        *text.few_questions(summary, text.more_questions(facts)),
        *text.rare_questions(summary),
        *([_OWN_VANILLA] if facts.runs > 1 and not facts.unranked else []),
        f"noise floor A/A {text.noise_floor(summary)}"
        f";  vanilla / hf:vanilla {text.vanilla_ratio(summary)};  time: {_BAR_LEGEND}",
        text.proof(summary),
        *text.work(summary),
        *([facts.tuned] if facts.tuned else []),
        *text.near_ties(summary),
        *text.evidence(summary),
        *text.learning(summary),
        *text.grammar(summary, facts),
        *text.controls(summary),
        *text.warnings(summary, facts),
    ]


def _ranking_notes(summary: Summary, facts: Facts) -> list[str]:
    """Return notes on how the methods are ranked."""
    if facts.targets:
        return [_EACH_ITS_OWN]
    if facts.forced:
        return ["forced: different runs are not ranked; a speedup is over vanilla of its own run"]
    if not any(row.letters for row in summary.rows):
        return []
    return ["group: a common letter = no significant difference (95%, all pairs)"]


_OWN_VANILLA = "several runs: a speedup is over vanilla of its own run"
_EACH_ITS_OWN = (
    "several targets: a speedup is over vanilla on the same target; targets are not ranked"
)


def run_text(summary: Summary, facts: Facts) -> str:
    """Return the default table with all notes as plain text, for `report.md`."""
    lines = [line.plain for line in _method_lines(summary, facts)]
    notes = _note_lines(all_notes(summary, facts), WIDTH)
    return output.escape_hidden("\n".join([*facts.header(summary.prompts, WIDTH), *lines, *notes]))


def _records(data: ReportData, families: bool) -> list[dict[str, Any]]:
    """Return one mapping per method. With `families`, also one per task family and method."""
    scopes = {ALL: data.summary.rows} | (data.summary.families if families else {})
    return [
        {"run": data.name, "family": family}
        | row_data(metrics.DATA, row)
        | ({"speedup": metrics.speedup_or_broken(row)} if row.broken else {})
        for family, rows in scopes.items()
        for row in rows
    ]


def _note_lines(notes: Sequence[str], width: int | None, lead: str = " ") -> list[str]:
    """Wrap notes to the width of a terminal."""
    if width is None:
        return [f"{lead}{note}" for note in notes]
    whole = "\n".join(notes).replace("\n  ", " ").splitlines()  # some notes already have two lines
    return [line for note in whole for line in output.wrap(note, width, lead, f"{lead}  ")]


def _method_lines(summary: Summary, facts: Facts, width: int | None = None) -> list[Text]:
    """Return the tables of lossless and of lossy methods as lines."""
    rows = summary.rows
    columns = metrics.TERMINAL
    if facts.targets:  # columns for target and draft replace the end of the label
        rows = tuple(replace(row, label=row.label.rpartition(" @")[0]) for row in rows)
        columns = metrics.BY_TARGET
    lines = []
    for lossless, candidates in ((True, columns), (False, metrics.LOSSY)):
        own = [row for row in rows if row.lossless == lossless]
        if own or (lossless and not rows):
            lines += _methods(candidates, own, width, () if lossless else metrics.WITH_SPEEDUP)
    return lines


def _methods(
    candidates: Sequence[Column[MethodSummary]],
    rows: Sequence[MethodSummary],
    width: int | None,
    kept_with_previous: Sequence[object],
) -> list[Text]:
    """Return a table of methods as lines.

    Args:
        candidates: Columns of the table. Those without information are omitted.
        kept_with_previous: Columns that are not separated from the previous column.
    """
    columns = select_informative(candidates, rows)
    found = make_grid(
        columns,
        rows,
        sections=text.sections(rows),
        label_columns=1 + columns.index(metrics.METHOD),
    )
    return draw(
        found,
        width,
        max_width=WIDTH,
        gaps=[2 if column in _WIDE_GAP_COLUMNS else 1 for column in columns],
        kept_with_previous=[
            at for at, column in enumerate(columns) if column in kept_with_previous
        ],
    )


def _family_lines(summary: Summary, width: int | None = None) -> list[Text]:
    """Return speedup and MAT by task family, with one column per family.

    Accuracy is included if answers were scored.
    """
    by_family = {
        text.family(family, rows).replace(" (", "("): {row.label: row for row in rows}  # six fit
        for family, rows in summary.families.items()
    }
    figures = {"speedup by family": metrics.SPEEDUP.format, "MAT by family": metrics.MAT.format}
    if any(row.score is not None for row in summary.rows):
        figures["accuracy by family"] = lambda row: formats.percent(row.score)
    lines = _grid_lines(by_family, summary.rows, figures, width)
    small = _note_lines(text.small_families(summary), width)
    return [*lines, *(output.make_text(line, "dim") for line in small)]


def _target_lines(summary: Summary, facts: Facts, width: int | None) -> list[Text]:
    """Return speedup and MAT by target, or [] if there is only one target."""
    found = group_by_target(summary, facts.targets)
    if found is None:
        return []
    figures = {"speedup by target": metrics.SPEEDUP.format, "MAT by target": metrics.MAT.format}
    return _grid_lines(found.targets, found.rows, figures, width)


def _grid_lines(
    parts: Mapping[str, Mapping[str, MethodSummary]],
    rows: Sequence[MethodSummary],
    figures: Mapping[str, Callable[[MethodSummary], str]],
    width: int | None,
) -> list[Text]:
    """Return one table per metric, below its title.

    Args:
        parts: Column heading -> label -> method.
        figures: Title -> function that formats the metric.
    """
    lines = []
    for title, figure in figures.items():
        # Omit speedups of lossy methods: they must be shown with the accuracy, and there is no
        # space.
        own = [row for row in rows if row.lossless] if figure is metrics.SPEEDUP.format else rows
        found = make_pivot_grid(own, parts, figure, heading="", align="r")
        gaps = [1, *(2 for _ in parts)]
        lines += [output.make_text(title, "bold"), *draw(found, width, max_width=WIDTH, gaps=gaps)]
    return lines
