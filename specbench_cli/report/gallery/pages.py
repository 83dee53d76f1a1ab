"""The gallery's pages: the index with its leaderboard, and a page a run. Both are complete: style
and picture are inside, there is no script, and all text is escaped on its way in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from specbench_cli import output
from specbench_cli.report.gallery.entry import Entry, Line
from specbench_cli.report.html import tables
from specbench_cli.report.html.facts import public
from specbench_cli.report.html.figures import Inlined
from specbench_cli.report.html.page import NAME as REPORT
from specbench_cli.report.html.page import asset, environment, heading, lead, policy, warned
from specbench_cli.report.html.tables import Cell, Table, word
from specbench_cli.report.reading import Reading
from specbench_cli.store.schema import GUARANTEES
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.metrics import METRICS, Heading

MARK = "specbench gallery"
"""What an index says that it was made by; another's page is not written over."""

_TEMPLATES = Path(__file__).with_name("templates")
_GUARANTEES = {
    "exact_tokens": "Lossless: the very tokens of vanilla",
    "exact_law": "Lossless: drawn from the target's distribution",
    "bounded": "Lossy within a stated bound",
    "quality_only": "Lossy: the quality of the answers alone is claimed",
    "workflow": "Lossy: another way of working",
}
"""What a guarantee is, in words; the order is that of the boards."""
_COLUMNS = (
    *(metrics.METHOD, metrics.SPEEDUP, metrics.INTERVAL, metrics.MAT, metrics.TOKENS),
    Heading("draft", "the draft model that it uses", "l"),
    Heading("questions"),
    metrics.OUTPUT,
    Heading("run", align="l"),
)


@dataclass(frozen=True, slots=True)
class Board:
    """A part of the leaderboard: one target, tasks, setting and machine; a table a guarantee."""

    heading: str
    note: str
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A run on the index. link: its page."""

    entry: Entry
    link: str


def run_page(reading: Reading, entry: Entry, picture: Inlined | None) -> str:
    """A run's own page. picture: its speedups, where there are any to draw."""
    return _rendered(
        "run.html.j2",
        title=public(heading(reading)),
        lead=public(lead(reading)),
        entry=entry,
        warnings=[public(line) for line in warned(reading)],
        picture=picture,
        tables=tables.overall(reading.summary),
        proof=text.proof(reading.summary),
        report=REPORT,
    )


def index_page(places: Sequence[Place]) -> str:
    """The index of a gallery: all runs, the newest first, and their leaderboard."""
    newest = sorted(places, key=lambda place: place.entry.created_utc, reverse=True)
    return _rendered(
        "index.html.j2", title="Gallery", mark=MARK, places=newest, boards=boards(places)
    )


def boards(places: Iterable[Place]) -> list[Board]:
    """The leaderboard: rows of one target, tasks, setting and machine, best first."""

    def key(place: Place) -> tuple[str, str, str, str]:
        entry = place.entry
        return entry.target, entry.tasks, entry.machine, entry.setting

    found = []
    for number_, (_, group) in enumerate(groupby(sorted(places, key=key), key), start=1):
        own = list(group)
        entry = own[0].entry
        found.append(
            Board(
                heading=f"{entry.target} on {entry.tasks}",
                note="; ".join([*_note(entry), *_few(own)]),
                tables=tuple(_ranked(own, f"board-{number_}")),
            )
        )
    return found


def _note(entry: Entry) -> Iterator[str]:
    """What the rows of a board have in common."""
    yield f"{entry.hardware} (machine {entry.machine})"
    yield entry.setting
    if entry.plumbing:
        beyond = ", ".join(entry.plumbing)
        yield f"plumbing: {beyond} is beyond the model's training, and speedups mean nothing there"


def _few(places: Sequence[Place]) -> list[str]:
    """The runs that are too small to rank by."""
    few = [place.entry for place in places if sum(place.entry.prompts.values()) < text.FEW]
    names = ", ".join(entry.name for entry in few)
    return [f"fewer than {text.FEW} questions, too few to rank by: {names}"] if few else []


def _ranked(places: Sequence[Place], name: str) -> Iterator[Table]:
    """A table a guarantee; those that learn from prompt to prompt apart, as their figures depend on
    the order of the prompts."""
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
                cells = tuple(_cells(place, line) for place, line in own)
                yield Table(f"{name}-{guarantee}-{learns:d}", caption, _COLUMNS, cells)


def _cells(place: Place, line: Line) -> tuple[Cell, ...]:
    entry, figures = place.entry, {"mat": line.mat, "tokens_per_s": line.tokens_per_s}
    return (
        word(line.label, "peer" if line.peer else ""),
        Cell(formats.ratio(line.speedup), line.speedup, "strong"),
        Cell(formats.between(line.low, line.high), line.low),
        *(Cell(METRICS[name].form(value), value) for name, value in figures.items()),
        word(line.draft or formats.NONE),
        Cell(str(sum(entry.prompts.values())), sum(entry.prompts.values())),
        word(line.output),
        Cell(entry.name, entry.name, link=place.link),
    )


def link(folder: str) -> str:
    """Where a run's page is, seen from the index."""
    return f"runs/{quote(folder)}/index.html"


def _rendered(name: str, **facts: object) -> str:
    style = asset("report.css") + (_TEMPLATES / "gallery.css").read_text(encoding="utf-8")
    page = environment(_TEMPLATES).get_template(name)
    return output.plain(page.render(policy=policy(style), style=Markup(style), **facts))
