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
from specbench_cli.report.html.page import Figures, Key, heading, lead_line, list_warnings
from specbench_cli.report.html.writer import render_page, render_parts
from specbench_cli.report.report_data import ReportData
from specbench_cli.store.schema import GUARANTEES
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.columns import Column
from specbench_cli.summary.metrics import METRICS, MethodSummary

MARK = "specbench gallery"
"""Marker in the index that specbench writes. An index without it is never overwritten."""

_TEMPLATES = Path(__file__).with_name("templates")
_GUARANTEES = {
    "exact_tokens": "Lossless: the very tokens of vanilla",
    "exact_law": "Lossless: drawn from the target's distribution",
    "bounded": "Lossy within a stated bound",
    "quality_only": "Lossy: the quality of the answers alone is claimed",
    "workflow": "Lossy: another way of working",
}
"""Guarantees as text, in the order of the leaderboards."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A run on the index.

    Attributes:
        link: Link to its page.
    """

    entry: GalleryEntry
    link: str


Ranked = tuple[IndexRow, LeaderboardRow]
"""A method on the leaderboard."""


def _like(
    column: Column[MethodSummary], shown: Callable[[LeaderboardRow], str], value: str
) -> Column[Ranked]:
    """Return a column of reports for the leaderboard."""
    return Column(
        column.heading,
        column.meaning,
        column.align,
        column.choose,
        shown=lambda ranked: shown(ranked[1]),
        data={value: lambda ranked: getattr(ranked[1], value)},
    )


_COLUMNS: tuple[Column[Ranked], ...] = (
    replace(
        _like(metrics.METHOD, lambda line: line.label, "label"),
        look=lambda ranked: "peer" if ranked[1].peer else "",
    ),
    replace(
        _like(metrics.SPEEDUP, lambda line: formats.ratio(line.speedup), "speedup"),
        look=lambda _: "strong",
    ),
    _like(metrics.INTERVAL, lambda line: formats.bounds(line.low, line.high), "low"),
    _like(metrics.MAT, lambda line: METRICS["mat"].form(line.mat), "mat"),
    _like(
        metrics.TOKENS, lambda line: METRICS["tokens_per_s"].form(line.tokens_per_s), "tokens_per_s"
    ),
    Column(
        "draft",
        "the draft model that it uses",
        "l",
        shown=lambda ranked: ranked[1].draft or formats.NONE,
    ),
    Column(
        "questions",
        shown=lambda ranked: str(_questions(ranked[0])),
        data={"questions": lambda ranked: _questions(ranked[0])},
    ),
    _like(metrics.OUTPUT, lambda line: line.output, "output"),
    Column(
        "run",
        align="l",
        shown=lambda ranked: ranked[0].entry.name,
        link=lambda ranked: ranked[0].link,
    ),
)


def _questions(place: IndexRow) -> int:
    return sum(place.entry.prompts.values())


def run_page(reading: ReportData, entry: GalleryEntry, picture: InlineFigure | None) -> str:
    """Return a run's own page.

    Args:
        picture: Figure of its speedups. None if there is nothing to draw.
    """
    proof = text.proof(reading.summary)
    return render_page(
        "run.html.j2",
        _style(),
        title=hide_paths(heading(reading)),
        lead=hide_paths(lead_line(reading)),
        entry=entry,
        warnings=[hide_paths(line) for line in list_warnings(reading)],
        body=render_parts(
            [
                *([] if picture is None else [Figures([picture])]),
                *tables.overall_tables(reading.summary),
                Key(text.prose([proof])),
            ]
        ),
        report=REPORT,
    )


def index_page(places: Sequence[IndexRow]) -> str:
    """Return the index of a gallery: all runs, the newest first, and their leaderboard."""
    newest = sorted(places, key=lambda place: place.entry.created_utc, reverse=True)
    return render_page(
        "index.html.j2",
        _style(),
        title="Gallery",
        mark=MARK,
        warnings=(),
        places=newest,
        boards=render_parts(boards(places)),
    )


def boards(places: Iterable[IndexRow]) -> list[Section]:
    """Return the leaderboard: one section per target, tasks, setting and machine.

    A section has one table per guarantee, with the fastest methods first.
    """

    def key(place: IndexRow) -> tuple[str, str, str, str]:
        entry = place.entry
        return entry.target, entry.tasks, entry.machine, entry.setting

    found = []
    for number, (_, group) in enumerate(groupby(sorted(places, key=key), key), start=1):
        own = list(group)
        entry = own[0].entry
        note = Paragraph("; ".join([*_note(entry), *_few(own)]))
        title = f"{entry.target} on {entry.tasks}"
        found.append(Section(title, [note, *_ranked(own, f"board-{number}")], level=3))
    return found


def _note(entry: GalleryEntry) -> Iterator[str]:
    """Yield the common properties of a leaderboard section: machine, settings and warnings."""
    yield f"{entry.hardware} (machine {entry.machine})"
    yield entry.setting
    if entry.plumbing:
        beyond = ", ".join(entry.plumbing)
        yield f"plumbing: {beyond} is beyond the model's training, and speedups mean nothing there"


def _few(places: Sequence[IndexRow]) -> list[str]:
    """Return a note on the runs that are too small to rank."""
    few = [place.entry for place in places if _questions(place) < text.MIN_QUESTIONS]
    names = ", ".join(entry.name for entry in few)
    return (
        [f"fewer than {text.MIN_QUESTIONS} questions, too few to rank by: {names}"] if few else []
    )


def _ranked(places: Sequence[IndexRow], name: str) -> Iterator[Grid]:
    """Yield one table per guarantee.

    Methods that learn across prompts have their own table, since their results depend on the order
    of the prompts.
    """
    rows = [(place, line) for place in places for line in place.entry.lines]
    for guarantee in GUARANTEES:
        for learns in (False, True):
            own = [
                (place, line)
                for place, line in rows
                if line.guarantee == guarantee and (line.scope != "prompt") is learns
            ]
            if own:
                own.sort(key=lambda row: -row[1].speedup)
                caption = _GUARANTEES[guarantee] + (f"; {text.RUN_SCOPE}" if learns else "")
                yield make_grid(_COLUMNS, own, id=f"{name}-{guarantee}-{learns:d}", caption=caption)


def link(folder: str) -> str:
    """Return the link from the index to a run's page."""
    return f"runs/{quote(folder)}/index.html"


def _style() -> str:
    """Return the style sheet of a gallery."""
    return (_TEMPLATES / "gallery.css").read_text(encoding="utf-8")
