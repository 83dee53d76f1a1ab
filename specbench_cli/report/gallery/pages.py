"""Pages of the gallery: the index with its leaderboard, and one page per run.

Pages are self-contained: style and figure are inline, and there is no script. All text is escaped
when it is inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from specbench_cli.report import tables
from specbench_cli.report.document import Grid, Paragraph, Section, make_grid
from specbench_cli.report.gallery.entry import GalleryEntry, LeaderboardRow
from specbench_cli.report.html.facts import hide_paths
from specbench_cli.report.html.figures import InlineFigure
from specbench_cli.report.html.page import NAME as REPORT
from specbench_cli.report.html.page import BarLegend, Figures, heading, lead_line, list_warnings
from specbench_cli.report.html.writer import render_page, render_parts
from specbench_cli.report.report_data import ReportData
from specbench_cli.store.schema import GUARANTEES
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.columns import Column
from specbench_cli.summary.metrics import METRICS, MethodSummary

MARK = "specbench gallery"
"""Text by which specbench recognizes its own index page. Other pages are never overwritten."""

_TEMPLATES = Path(__file__).with_name("templates")
_GUARANTEES = {
    "exact_tokens": "Lossless: the same tokens as vanilla",
    "exact_law": "Lossless: drawn from the target's distribution",
    "bounded": "Lossy within a stated bound",
    "quality_only": "Lossy: only the quality of the answers is claimed",
    "workflow": "Lossy: a different workflow",
}
"""Guarantee -> caption of its table on the leaderboard."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A run on the index page.

    Attributes:
        link: Link to its page.
    """

    entry: GalleryEntry
    link: str


RankedMethod = tuple[IndexRow, LeaderboardRow]
"""A method on the leaderboard, with the run that it comes from."""


def _metric_column(
    column: Column[MethodSummary], format_row: Callable[[LeaderboardRow], str], value: str
) -> Column[RankedMethod]:
    """Return a column of the report, such as MAT, as a column of the leaderboard."""
    return Column(
        column.heading,
        column.meaning,
        column.align,
        column.choose,
        format=lambda method: format_row(method[1]),
        data={value: lambda method: getattr(method[1], value)},
    )


_COLUMNS: tuple[Column[RankedMethod], ...] = (
    replace(
        _metric_column(metrics.METHOD, lambda line: line.label, "label"),
        look=lambda method: "peer" if method[1].peer else "",
    ),
    replace(
        _metric_column(metrics.SPEEDUP, lambda line: formats.ratio(line.speedup), "speedup"),
        look=lambda _: "strong",
    ),
    _metric_column(metrics.INTERVAL, lambda line: formats.bounds(line.low, line.high), "low"),
    _metric_column(metrics.MAT, lambda line: METRICS["mat"].form(line.mat), "mat"),
    _metric_column(
        metrics.TOKENS, lambda line: METRICS["tokens_per_s"].form(line.tokens_per_s), "tokens_per_s"
    ),
    Column(
        "draft",
        "the draft model that it uses",
        "l",
        format=lambda method: method[1].draft or formats.NONE,
    ),
    Column(
        "questions",
        format=lambda method: str(_questions(method[0])),
        data={"questions": lambda method: _questions(method[0])},
    ),
    _metric_column(metrics.OUTPUT, lambda line: line.output, "output"),
    Column(
        "run",
        align="l",
        format=lambda method: method[0].entry.name,
        link=lambda method: method[0].link,
    ),
)


def _questions(row: IndexRow) -> int:
    return sum(row.entry.prompts.values())


def run_page(data: ReportData, entry: GalleryEntry, picture: InlineFigure | None) -> str:
    """Return the HTML page of a run.

    Args:
        picture: Figure of its speedups. None if there is nothing to draw.
    """
    proof = text.proof(data.summary)
    return render_page(
        "run.html.j2",
        _read_style(),
        title=hide_paths(heading(data)),
        lead=hide_paths(lead_line(data)),
        entry=entry,
        warnings=[hide_paths(line) for line in list_warnings(data)],
        body=render_parts(
            [
                *([] if picture is None else [Figures([picture])]),
                *tables.overall_tables(data.summary),
                BarLegend(text.prose([proof])),
            ]
        ),
        report=REPORT,
    )


def index_page(rows: Sequence[IndexRow]) -> str:
    """Return the index page of a gallery: the leaderboard, and all runs, newest first."""
    newest = sorted(rows, key=lambda row: row.entry.created_utc, reverse=True)
    return render_page(
        "index.html.j2",
        _read_style(),
        title="Gallery",
        mark=MARK,
        warnings=(),
        rows=newest,
        leaderboards=render_parts(make_leaderboards(rows)),
    )


def make_leaderboards(rows: Iterable[IndexRow]) -> list[Section]:
    """Return the leaderboard: one section per combination of target, tasks, setting and machine.

    A section has one table per guarantee, with the fastest methods first.
    """

    def key(row: IndexRow) -> tuple[str, str, str, str]:
        entry = row.entry
        return entry.target, entry.tasks, entry.machine, entry.setting

    found = []
    for number, (_, group) in enumerate(groupby(sorted(rows, key=key), key), start=1):
        group_rows = list(group)
        entry = group_rows[0].entry
        note = Paragraph("; ".join([*_section_notes(entry), *_small_run_notes(group_rows)]))
        grids = _leaderboard_tables(group_rows, f"board-{number}")
        found.append(Section(f"{entry.target} on {entry.tasks}", [note, *grids], level=3))
    return found


def _section_notes(entry: GalleryEntry) -> Iterator[str]:
    """Yield notes on a section of the leaderboard: machine, settings, and warnings on tasks."""
    yield f"{entry.hardware} (machine {entry.machine})"
    yield entry.setting
    if entry.plumbing:
        beyond = ", ".join(entry.plumbing)
        yield f"plumbing: the model was not trained on {beyond}, so these speedups mean nothing"


def _small_run_notes(rows: Sequence[IndexRow]) -> list[str]:
    """Return a note on the runs that are too small to rank."""
    small = [row.entry for row in rows if _questions(row) < text.MIN_QUESTIONS]
    names = ", ".join(entry.name for entry in small)
    note = f"fewer than {text.MIN_QUESTIONS} questions, too few to rank by: {names}"
    return [note] if small else []


def _leaderboard_tables(rows: Sequence[IndexRow], name: str) -> Iterator[Grid]:
    """Yield one table per guarantee.

    Methods that learn across prompts have their own table, since their results depend on the order
    of the prompts.
    """
    methods = [(row, line) for row in rows for line in row.entry.lines]
    for guarantee in GUARANTEES:
        for across_prompts in (False, True):
            ranked = [
                (row, line)
                for row, line in methods
                if line.guarantee == guarantee and (line.scope != "prompt") is across_prompts
            ]
            if ranked:
                ranked.sort(key=lambda method: -method[1].speedup)
                caption = _GUARANTEES[guarantee] + (f"; {text.RUN_SCOPE}" if across_prompts else "")
                table_id = f"{name}-{guarantee}-{across_prompts:d}"
                yield make_grid(_COLUMNS, ranked, id=table_id, caption=caption)


def link(folder: str) -> str:
    """Return the relative link from the index page to the page of a run.

    Args:
        folder: Name of the run's folder in the gallery.
    """
    return f"runs/{quote(folder)}/index.html"


def _read_style() -> str:
    """Return the style sheet of a gallery."""
    return (_TEMPLATES / "gallery.css").read_text(encoding="utf-8")
